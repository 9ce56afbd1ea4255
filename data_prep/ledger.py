"""The rows that a shard leaves behind: its index, and a ledger of every input that it was given."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import xxhash

from data_prep.images import Prepared
from data_prep.verdict import BadInputError
from vitscale.data.label_columns import LabelColumn
from vitscale.data.manifest import index_schema, parquet_bytes

SHOWN_FAILURES = 3
LEDGER_FIELDS = (
    # KIND:NAME of the input, as data_prep.sources.build.printable writes names (N.KIND:NAME with
    # several sources)
    pa.field("source", pa.string()),
    pa.field("key", pa.string()),
    # packed, failed or excluded
    pa.field("status", pa.string()),
    # why it failed; what was done to a packed image, empty where its bytes are the input's
    pa.field("reason", pa.string()),
    # the input as it was found; px, bytes, xxh3_64 of all its bytes
    pa.field("input_format", pa.string()),
    pa.field("input_width", pa.int32()),
    pa.field("input_height", pa.int32()),
    pa.field("input_bytes", pa.int64()),
    pa.field("input_xxh3_64", pa.uint64()),
    # the image as it is stored
    pa.field("image_format", pa.string()),
    pa.field("width", pa.int32()),
    pa.field("height", pa.int32()),
    pa.field("num_bytes", pa.int64()),
    pa.field("xxh3_64", pa.uint64()),
)


class Ready(NamedTuple):
    """An input that was read: what goes into the shard, or why nothing does."""

    # classes in every label column
    labels: tuple[tuple[int, ...], ...]
    input_bytes: int
    input_xxh3: int | None
    image: Prepared | BadInputError
    # of the stored image bytes
    xxh3: int


class Rows:
    """The rows of a shard's index and ledger as they grow, and what is counted over them.

    Args:
        columns: Kinds of label of every input.
    """

    def __init__(self, columns: list[LabelColumn]) -> None:
        self._columns = columns
        self._ledger: list[tuple[Any, ...]] = []
        self._index: list[tuple[Any, ...]] = []
        self._status: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._examples: list[str] = []
        self._keys_sum64 = 0
        self._samples = hashlib.sha256()

    def add_packed(self, origin: str, key: str, ready: Ready, image: Prepared) -> None:
        """Add an image that went into the shard."""
        labels = self._add(origin, key, "packed", image.changes, ready)
        self._index.append(
            (key, len(image.data), image.width, image.height, image.image_format, ready.xxh3,
             *labels)
        )  # fmt: skip
        self._keys_sum64 = (self._keys_sum64 + xxhash.xxh64_intdigest(key.encode())) % 2**64
        self._samples.update(f"{key} {ready.xxh3:016x} {ready.labels}\n".encode())

    def add_excluded(self, origin: str, key: str, ready: Ready) -> None:
        """Add an image that was to be left out."""
        self._add(origin, key, "excluded", "in the list of excluded images", ready)

    def add_failed(self, origin: str, key: str, ready: Ready) -> None:
        """Add an input that cannot be packed."""
        reason = str(ready.image)
        self._add(origin, key, "failed", reason, ready)
        self._failed[reason.partition(":")[0]] += 1
        if len(self._examples) < SHOWN_FAILURES:
            self._examples.append(f"{origin}: {reason}")

    def _add(
        self, origin: str, key: str, status: str, reason: str, ready: Ready
    ) -> list[int | list[int]]:
        """Add a ledger row; give the labels as they are stored."""
        self._status[status] += 1
        image = ready.image
        if isinstance(image, BadInputError):
            seen = (image.image_format, image.width, image.height)
            stored: tuple[Any, ...] = (None, None, None, None, None)
        else:
            seen = (image.input_format, image.input_width, image.input_height)
            stored = (
                image.image_format, image.width, image.height, len(image.data), ready.xxh3,
            )  # fmt: skip
        pairs = zip(self._columns, ready.labels, strict=True)
        labels = [column.value(own) for column, own in pairs]
        self._ledger.append(
            (origin, key, status, reason, *seen, ready.input_bytes, ready.input_xxh3, *stored,
             *labels)
        )  # fmt: skip
        return labels

    def index_bytes(self, offsets: list[int]) -> bytes:
        """Write the index; nothing where there is no sample."""
        if not offsets:
            return b""
        schema = index_schema(self._columns)
        key, *others = _by_field(self._index)
        return parquet_bytes(_table([key, offsets, *others], schema))

    def ledger_bytes(self) -> bytes:
        """Write the ledger."""
        schema = pa.schema([*LEDGER_FIELDS, *(column.field for column in self._columns)])
        return parquet_bytes(_table(_by_field(self._ledger), schema))

    def counts(self) -> dict[str, Any]:
        """Give what the commit record says of the inputs."""
        return {
            "num_samples": self._status["packed"],
            "num_failed": self._status["failed"],
            "num_excluded": self._status["excluded"],
            "failed": dict(self._failed),
            "examples": self._examples,
            "keys_sum64": self._keys_sum64,
            "samples_sha256": self._samples.hexdigest(),
        }


def _by_field(rows: list[tuple[Any, ...]]) -> list[Sequence[Any]]:
    return list(zip(*rows, strict=True))


def _table(values: list[Sequence[Any]], schema: pa.Schema) -> pa.Table:
    if not values:  # a shard of somebody else may be empty
        return schema.empty_table()
    arrays = [pa.array(own, field.type) for own, field in zip(values, schema, strict=True)]
    return pa.table(arrays, schema=schema)
