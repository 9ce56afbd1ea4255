"""What a dataset on storage is made of, and how its tables are written and checked.

    URI/manifest.json                written last, so it says that the rest is whole
    URI/shards.parquet               one row a shard: SHARDS_SCHEMA
    URI/shard-000000.tar             samples in the order of their keys (tar_shard.py), or
    URI/shard-000000.arrow           the same samples (arrow_shard.py), or
    URI/anything.parquet             samples in a file of somebody else (parquet_shard.py)
    URI/shard-000000.index.parquet   one row a sample: INDEX_FIELDS and the label columns
    URI/labels.json                  label columns with class names (label_columns.py)
    URI/labels/                      label columns that were added later (label_sidecar.py)
    URI/ledger/shard-000000.parquet  one row for every input: packed, failed or excluded, and why
    URI/_commit/                     the plan and one record a finished shard; for the packer

Equal tables give equal bytes: fixed writer options, no clock. A shard whose inputs all failed is
not in shards.parquet, so `name` is not a function of `shard_id`.
"""

import hashlib
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from vitscale.config.errors import DataError, UserError
from vitscale.data.label_columns import LABELS_NAME, NO_LABEL, LabelColumn, parse_labels
from vitscale.data.storage import Readable, Storage

MANIFEST_VERSION = 2
MANIFEST_NAME = "manifest.json"
SHARDS_NAME = "shards.parquet"
FORMATS = ("tar", "arrow", "parquet")

SHARDS_SCHEMA = pa.schema(
    [
        ("shard_id", pa.int64()),
        ("name", pa.string()),
        ("num_samples", pa.int64()),
        ("num_bytes", pa.int64()),
        ("sha256", pa.string()),
        ("index_sha256", pa.string()),
    ]
)
INDEX_FIELDS = (
    pa.field("key", pa.string()),
    # of the image bytes, from the start of the shard file; the row in a Parquet file
    pa.field("offset", pa.int64()),
    pa.field("num_bytes", pa.int64()),
    # px, as stored
    pa.field("width", pa.int32()),
    pa.field("height", pa.int32()),
    pa.field("image_format", pa.string()),
    # of the image bytes
    pa.field("xxh3_64", pa.uint64()),
)


def index_schema(columns: Iterable[LabelColumn]) -> pa.Schema:
    """Give the schema of the indexes of a dataset with these label columns."""
    return pa.schema([*INDEX_FIELDS, *(column.field for column in columns)])


@dataclass(frozen=True)
class ShardTable:
    """The rows of shards.parquet; position in the lists = shard_id."""

    names: list[str]
    num_samples: npt.NDArray[np.int64]
    num_bytes: npt.NDArray[np.int64]
    sha256: list[str]
    index_sha256: list[str]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Global index of each shard's first sample, and the total: num_shards + 1 numbers."""
        return np.concatenate([[0], np.cumsum(self.num_samples)]).astype(np.int64)


@dataclass(frozen=True)
class Manifest:
    """A dataset's manifest.json together with its shard table."""

    version: int
    format: str
    split: str
    num_samples: int
    # bytes of all shard files
    num_bytes: int
    num_shards: int
    num_failed: int
    num_excluded: int
    # [{"name": .., "multi": .., "num_classes": ..}] of the label columns, first the default one
    columns: list[dict[str, Any]]
    labels_sha256: str
    shards_sha256: str
    plan_digest: str
    # sum modulo 2**64 of xxh64(key) over all samples
    keys_sum64: int
    # names the samples (key, image hash, labels, in order) whatever the kind of shard
    samples_sha256: str
    # how images were treated: {"policy": "keep"} or {"policy": "resize", "side": .., "quality": ..}
    # and so on; of Parquet files also the "column" with the images
    image: dict[str, Any]
    # [{"name": .., "sha256": ..}] of the ledger files
    ledger: list[dict[str, str]]
    shards: ShardTable = field(repr=False)
    # sha256 of manifest.json, and of what a view makes of it: the name of these exact data
    digest: str
    # None: all samples with the stored labels
    view: "View | None" = field(repr=False)

    @property
    def num_classes(self) -> int:
        """Classes of the default label column."""
        return int(self.columns[0]["num_classes"])


@dataclass(frozen=True)
class ShardIndex:
    """The rows of one shard's index, in the order of the shard."""

    keys: list[str]
    # of the image bytes, from the start of the shard file; rows of a Parquet file
    offsets: npt.NDArray[np.int64]
    num_bytes: npt.NDArray[np.int64]
    # classes in the default label column; of a multi-label one the first class, -1 for none
    labels: npt.NDArray[np.int64]
    # px, as stored
    widths: npt.NDArray[np.int32]
    heights: npt.NDArray[np.int32]
    # "jpg", "png" or "webp": what the bytes are
    image_formats: list[str]
    xxh3: npt.NDArray[np.uint64]
    # name -> values of every label column: int64, or lists of them
    columns: dict[str, pa.ChunkedArray] = field(repr=False)

    def __len__(self) -> int:
        return len(self.keys)


class View(Protocol):
    """What a manifest takes of a stored dataset (view.py)."""

    @property
    def stored(self) -> Manifest:
        """Manifest of the whole dataset."""

    def index(self, storage: Readable, shard_id: int) -> ShardIndex:
        """Read one shard's index, with the labels and without the samples that are left out."""

    def label_columns(self, storage: Storage) -> list[LabelColumn]:
        """Read the label columns, the chosen one first."""


def sha256_hex(data: bytes) -> str:
    """Give the sha256 of bytes as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def json_bytes(value: Any) -> bytes:
    """Write JSON in the one form that every JSON object of a dataset has."""
    return (json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False) + "\n").encode()


def parquet_bytes(table: pa.Table) -> bytes:
    """Write a Parquet file whose bytes depend on the table (and the library's version) alone."""
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        version="2.6",
        data_page_version="1.0",
        compression="zstd",
        compression_level=3,
        use_dictionary=True,
        write_statistics=True,
        row_group_size=1 << 20,
    )
    return sink.getvalue()


def index_name(shard_name: str) -> str:
    """Give the name of a shard's index: shard-000000.tar -> shard-000000.index.parquet."""
    return shard_name.rpartition(".")[0] + ".index.parquet"


def ledger_name(shard_name: str) -> str:
    """Give the name of a shard's ledger: shard-000000.tar -> ledger/shard-000000.parquet."""
    return "ledger/" + shard_name.rpartition(".")[0] + ".parquet"


def damaged(
    uri: str, shard: str, reason: str, key: str | None = None, offset: int | None = None
) -> DataError:
    """Build the error for damage at a place.

    Args:
        uri: The dataset.
        shard: Name of the object in it.
        reason: What is wrong, with both values where two were compared.
        key: The sample, if the damage is in one.
        offset: Where in the shard its image bytes start.
    """
    place = f"shard {shard}" + ("" if key is None else f", key {key}")
    place += "" if offset is None else f", offset {offset}"
    return DataError(f"{uri}: {place}: {reason}")


def load_manifest(storage: Storage) -> Manifest:
    """Read a dataset's manifest and shard table.

    Raises:
        UserError: There is no finished dataset, or one of a version or format this program cannot
            read.
        DataError: manifest.json or shards.parquet is damaged.
    """
    try:
        data = storage.read_bytes(MANIFEST_NAME)
    except FileNotFoundError:
        raise UserError(
            f"no dataset at {storage.uri}: it has no {MANIFEST_NAME}; make one with "
            f"`vitscale pack --source KIND:URI --out {storage.uri}`, or run the pack that was "
            "interrupted again"
        ) from None
    try:
        values = json.loads(data)
        version = values["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(storage.uri, MANIFEST_NAME, f"is not a manifest: {error!r}") from error
    if version != MANIFEST_VERSION:
        raise UserError(
            f"{storage.uri}: manifest version {version}, this program reads version "
            f"{MANIFEST_VERSION}; "
            "use the release that wrote it, or pack again"
        )
    if values.get("format") not in FORMATS:
        raise UserError(
            f"{storage.uri}: format {values.get('format')!r} cannot be read, only "
            f"{', '.join(FORMATS)}; pack again"
        )
    try:
        shards = _load_shards(storage, values["shards_sha256"], values["num_shards"])
        manifest = Manifest(**values, shards=shards, digest=sha256_hex(data), view=None)
    except (KeyError, TypeError) as error:
        raise damaged(
            storage.uri, MANIFEST_NAME, f"fields are missing or unknown: {error}"
        ) from error
    total = int(shards.num_samples.sum())
    if total != manifest.num_samples:
        reason = f"says {manifest.num_samples} samples, {SHARDS_NAME} has {total}"
        raise damaged(storage.uri, MANIFEST_NAME, reason)
    return manifest


def _load_shards(storage: Storage, sha256: str, num_shards: int) -> ShardTable:
    table = read_table(storage, SHARDS_NAME, sha256, SHARDS_SCHEMA)
    if table.num_rows != num_shards:
        raise damaged(
            storage.uri, SHARDS_NAME, f"has {table.num_rows} rows, the manifest says {num_shards}"
        )
    return ShardTable(
        names=table["name"].to_pylist(),
        num_samples=table["num_samples"].to_numpy(),
        num_bytes=table["num_bytes"].to_numpy(),
        sha256=table["sha256"].to_pylist(),
        index_sha256=table["index_sha256"].to_pylist(),
    )


def load_index(storage: Readable, manifest: Manifest, shard_id: int) -> ShardIndex:
    """Read one shard's index, checked against the shard table.

    Args:
        storage: The dataset, or `ShardCache.index_of` it.
        manifest: Its manifest.
        shard_id: 0 to manifest.num_shards - 1.

    Raises:
        DataError: The index is missing or damaged.
    """
    if manifest.view is not None:
        return manifest.view.index(storage, shard_id)
    shards = manifest.shards
    name = index_name(shards.names[shard_id])
    columns = [LabelColumn(column["name"], column["multi"], ()) for column in manifest.columns]
    table = read_table(storage, name, shards.index_sha256[shard_id], index_schema(columns))
    if table.num_rows != shards.num_samples[shard_id]:
        reason = f"has {table.num_rows} rows, {SHARDS_NAME} says {shards.num_samples[shard_id]}"
        raise damaged(storage.uri, name, reason)
    return ShardIndex(
        keys=table["key"].to_pylist(),
        offsets=table["offset"].to_numpy(),
        num_bytes=table["num_bytes"].to_numpy(),
        labels=first_labels(table[columns[0].name], columns[0].multi),
        widths=table["width"].to_numpy(),
        heights=table["height"].to_numpy(),
        image_formats=table["image_format"].to_pylist(),
        xxh3=table["xxh3_64"].to_numpy(),
        columns={column.name: table[column.name] for column in columns},
    )


def first_labels(values: pa.ChunkedArray, multi: bool) -> npt.NDArray[np.int64]:
    """Give one class a sample: of a multi-label column the first, -1 for none."""
    if not multi:
        return values.to_numpy()
    firsts = [labels[0] if labels else NO_LABEL for labels in values.to_pylist()]
    return np.asarray(firsts, np.int64)


def read_table(storage: Readable, name: str, sha256: str, schema: pa.Schema) -> pa.Table:
    """Read a Parquet object of a dataset.

    Args:
        storage: The dataset.
        name: Of the object.
        sha256: That it had when it was written.
        schema: Its columns.

    Raises:
        DataError: It is missing, damaged or has other columns.
    """
    try:
        data = storage.read_bytes(name)
    except FileNotFoundError:
        raise damaged(storage.uri, name, "is missing") from None
    found = sha256_hex(data)
    if found != sha256:
        raise damaged(storage.uri, name, f"sha256 is {found}, was {sha256} when it was packed")
    # No threads: loader workers are forked, and a pool of the parent's would be dead in them.
    table = pq.read_table(io.BytesIO(data), use_threads=False)
    if table.schema.names != schema.names:
        raise damaged(
            storage.uri, name, f"columns are {table.schema.names}, expected {schema.names}"
        )
    return table


def load_label_columns(storage: Storage, manifest: Manifest) -> list[LabelColumn]:
    """Read the label columns with the names of their classes, checked against the manifest.

    Raises:
        DataError: labels.json is missing or damaged.
    """
    if manifest.view is not None:
        return manifest.view.label_columns(storage)
    try:
        data = storage.read_bytes(LABELS_NAME)
    except FileNotFoundError:
        raise damaged(storage.uri, LABELS_NAME, "is missing") from None
    found = sha256_hex(data)
    if found != manifest.labels_sha256:
        raise damaged(
            storage.uri,
            LABELS_NAME,
            f"sha256 is {found}, was {manifest.labels_sha256} when it was packed",
        )
    columns = parse_labels(data)
    if [column.summary() for column in columns] != manifest.columns:
        raise damaged(storage.uri, LABELS_NAME, "has other columns than the manifest")
    return columns


def load_class_names(storage: Storage, manifest: Manifest) -> list[str]:
    """Read the class names of the default label column.

    Raises:
        DataError: labels.json is missing or damaged.
    """
    return list(load_label_columns(storage, manifest)[0].names)
