"""A dataset as a sequence of samples, for notebooks, tools and tests.

Every image's bytes are checked against the hash of pack time before they are handed out. Training
reads through the loader instead, which adds order, decoding and worker processes.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from vitscale.config.errors import DataError
from vitscale.data.label_columns import LabelColumn
from vitscale.data.manifest import (
    Manifest,
    ShardIndex,
    damaged,
    load_index,
    load_label_columns,
    load_manifest,
)
from vitscale.data.parquet_shard import ParquetShard, RowGroups, open_stored
from vitscale.data.storage import Storage, open_storage
from vitscale.data.view import view_of

SPAN_BYTES = 16 << 20  # iteration reads this much of a shard at a time
KEPT_INDEXES = 8


@dataclass(frozen=True)
class Sample:
    """One stored sample."""

    key: str
    # encoded, as stored; checked
    image: bytes
    # class in the default or chosen label column; of a multi-label one the first, -1 for none
    label: int
    # name of a label column -> class, or list of classes
    labels: dict[str, int | list[int]]
    # name of the shard, and where in it the image bytes start
    shard: str
    offset: int
    # "jpg", "png" or "webp"
    image_format: str


class Dataset:
    """Samples of a dataset in stored order.

    Args:
        storage: The dataset.
        manifest: Its manifest, or a view of it.
    """

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self.storage = storage
        self.manifest = manifest
        self._starts = manifest.shards.starts
        self._indexes: OrderedDict[int, ShardIndex] = OrderedDict()
        # The latest Parquet file, by name.
        self._parquet: dict[str, ParquetShard] = {}
        self._groups = RowGroups()

    @property
    def class_names(self) -> list[str]:
        """Names of the classes of the default or chosen label column; a label is an index."""
        return list(self.label_columns[0].names)

    @property
    def label_columns(self) -> list[LabelColumn]:
        """The kinds of label."""
        return load_label_columns(self.storage, self.manifest)

    def __len__(self) -> int:
        return self.manifest.num_samples

    def __getitem__(self, sample_index: int) -> Sample:
        """Read one sample.

        Raises:
            IndexError: There is no such sample.
            DataError: Its bytes are damaged.
        """
        number = int(sample_index)
        position = number + len(self) if number < 0 else number
        if not 0 <= position < len(self):
            raise IndexError(f"sample {number} of {len(self)} samples at {self.storage.uri}")
        shard_id = int(np.searchsorted(self._starts, position, side="right")) - 1
        row = position - int(self._starts[shard_id])
        index = self._index(shard_id)
        shard = self.manifest.shards.names[shard_id]
        data = self._read(shard, int(index.offsets[row]), int(index.num_bytes[row]))
        return self._sample(shard, index, row, data)

    def __iter__(self) -> Iterator[Sample]:
        for shard_id, shard in enumerate(self.manifest.shards.names):
            index = self._index(shard_id)
            if self.manifest.format == "parquet":
                for row in range(len(index)):
                    data = self._read(shard, int(index.offsets[row]), 0)
                    yield self._sample(shard, index, row, data)
                continue
            first = 0
            while first < len(index):
                start = int(index.offsets[first])
                ends = index.offsets + index.num_bytes
                last = max(first + 1, int(np.searchsorted(ends, start + SPAN_BYTES, side="right")))
                span = memoryview(self._read(shard, start, int(ends[last - 1]) - start))
                for row in range(first, last):
                    begin = int(index.offsets[row]) - start
                    yield self._sample(
                        shard, index, row, bytes(span[begin : begin + int(index.num_bytes[row])])
                    )
                first = last

    def _index(self, shard_id: int) -> ShardIndex:
        if shard_id in self._indexes:
            self._indexes.move_to_end(shard_id)
        else:
            self._indexes[shard_id] = load_index(self.storage, self.manifest, shard_id)
            if len(self._indexes) > KEPT_INDEXES:
                self._indexes.popitem(last=False)
        return self._indexes[shard_id]

    def _read(self, shard: str, offset: int, num_bytes: int) -> bytes:
        try:
            if self.manifest.format == "parquet":
                return self._read_row(shard, offset)
            return self.storage.read_range(shard, offset, num_bytes)
        except FileNotFoundError:
            raise damaged(self.storage.uri, shard, "is missing") from None

    def _read_row(self, shard: str, row: int) -> bytes:
        try:
            if shard not in self._parquet:
                column = self.manifest.image["column"]
                self._parquet = {shard: open_stored(self.storage, shard, column, self._groups)}
            return self._parquet[shard].image(row) or b""
        except DataError as error:
            raise damaged(self.storage.uri, shard, str(error), offset=row) from error

    def _sample(self, shard: str, index: ShardIndex, row: int, data: bytes) -> Sample:
        key, offset = index.keys[row], int(index.offsets[row])
        wanted, found = int(index.xxh3[row]), xxhash.xxh3_64_intdigest(data)
        if found != wanted:
            reason = (
                f"xxh3 of {len(data)} bytes is {found:016x}, was {wanted:016x} when it was packed"
            )
            raise damaged(self.storage.uri, shard, reason, key, offset)
        labels = {name: values[row].as_py() for name, values in index.columns.items()}
        label, image_format = int(index.labels[row]), index.image_formats[row]
        return Sample(key, data, label, labels, shard, offset, image_format)


def open_dataset(
    uri: str | os.PathLike[str], label_column: str | None = None, exclude: str | None = None
) -> Dataset:
    """Open a packed dataset.

    Args:
        uri: A plain path, `file:///path`, or `s3://bucket/prefix`.
        label_column: Column whose labels are taken, stored or added (`vitscale labels`); None takes
            the first stored one. Samples without a label in an added column are left out.
        exclude: List of samples that are left out (`vitscale dedup`).

    Returns:
        The dataset: `len()`, `[i]` and iteration give `Sample`s.

    Raises:
        UserError: There is no finished dataset, or no such column or list for it.
    """
    storage = open_storage(uri)
    manifest = view_of(storage, load_manifest(storage), label_column, exclude)
    return Dataset(storage, manifest)
