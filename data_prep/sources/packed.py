"""One of our own datasets, to be packed again: into other shards, another format, another size.

Ledger and failed inputs of the old dataset stay behind: its samples are what is packed.
"""

from collections.abc import Iterator

import pyarrow as pa
import xxhash

from data_prep.sources.build import Column, Entry, LabelValue, SourceOptions
from vitscale.config.errors import UserError
from vitscale.data.label_columns import NO_LABEL
from vitscale.data.manifest import damaged, load_index, load_label_columns, load_manifest
from vitscale.data.storage import Storage, open_storage


class PackedDataset:
    """The samples of a packed dataset.

    Args:
        uri: Where its manifest.json is.
        options: None matters here.
    """

    kind = "vitscale"

    def __init__(self, uri: str, options: SourceOptions) -> None:
        self._storage: Storage = open_storage(uri)

    def entries(self) -> Iterator[Entry]:
        """List all samples, shard by shard.

        Raises:
            UserError: There is no finished dataset.
            DataError: Its tables are damaged.
        """
        manifest = load_manifest(self._storage)
        if manifest.format == "parquet":
            raise UserError(
                f"vitscale:{self._storage.uri} is an index over Parquet files; pack the files "
                f"themselves, with parquet:{self._storage.uri}"
            )
        for shard_id, shard in enumerate(manifest.shards.names):
            index = load_index(self._storage, manifest, shard_id)
            labels = zip(*map(_labels, index.columns.values()), strict=True)
            rows = zip(
                index.keys,
                index.num_bytes.tolist(),
                index.offsets.tolist(),
                index.xxh3.tolist(),
                labels,
                strict=True,
            )
            for key, num_bytes, offset, xxh3, own in rows:
                yield Entry(key, num_bytes, own, where=f"{shard}\0{offset}\0{xxh3:016x}")

    def columns(self) -> list[Column]:
        """Give the label columns with their classes, as they are."""
        columns = load_label_columns(self._storage, load_manifest(self._storage))
        return [Column(column.name, column.multi, column.names) for column in columns]

    def read(self, entry: Entry) -> bytes:
        """Read one image, checked against its hash of pack time."""
        shard, offset, wanted = entry.where.split("\0")
        try:
            data = self._storage.read_range(shard, int(offset), entry.num_bytes)
        except FileNotFoundError:
            raise damaged(self._storage.uri, shard, "is missing") from None
        if (found := xxhash.xxh3_64_hexdigest(data)) != wanted:
            reason = f"xxh3 of {len(data)} bytes is {found}, was {wanted} when it was packed"
            raise damaged(self._storage.uri, shard, reason, entry.name, int(offset))
        return data


def _labels(values: pa.ChunkedArray) -> list[LabelValue]:
    """Give the labels of all samples in one column; no class is an empty tuple."""
    return [
        tuple(own) if isinstance(own, list) else () if own == NO_LABEL else own
        for own in values.to_pylist()
    ]
