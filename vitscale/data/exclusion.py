"""A list of samples that are left out: written by `vitscale dedup`, used in packing and training.

One row a sample of the dataset that the list was made for. Packing leaves out the same images by
the hash of their stored bytes, training the same samples by shard and key.
"""

import io
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from vitscale.config.errors import DataError, UserError
from vitscale.data.manifest import parquet_bytes, sha256_hex
from vitscale.data.storage import Storage, open_storage

EXCLUSION_VERSION = 1
_METADATA_KEY = b"vitscale_exclusions"
EXCLUSION_SCHEMA = pa.schema(
    [
        ("shard", pa.string()),
        ("key", pa.string()),
        # of the stored image bytes
        ("xxh3_64", pa.uint64()),
        # xxh3_128 of the decoded pixels, big-endian: finds the image whatever its file format
        ("pixels", pa.binary(16)),
        # exact, near or embedding; with "self_" in front where the match is in the same dataset
        ("reason", pa.string()),
        # 0, differing bits of 64, or 1 - cosine
        ("distance", pa.float32()),
        ("against", pa.string()),
        ("against_key", pa.string()),
    ]
)


@dataclass(frozen=True)
class Exclusions:
    """The samples of a list."""

    place: str
    # digest of the manifest of the dataset that the list was made for
    train_digest: str
    # sha256 of the list
    digest: str
    # how it was made
    about: dict[str, Any]
    rows: pa.Table = field(repr=False)

    @property
    def keys(self) -> frozenset[str]:
        """Keys of the samples."""
        return frozenset(self.rows["key"].to_pylist())

    @property
    def xxh3_64(self) -> npt.NDArray[np.uint64]:
        """Hashes of the stored image bytes."""
        return np.asarray(self.rows["xxh3_64"].to_numpy())

    def keys_by_shard(self) -> dict[str, set[str]]:
        """Give shard name -> keys of the samples that are left out."""
        found: dict[str, set[str]] = {}
        pairs = zip(self.rows["shard"].to_pylist(), self.rows["key"].to_pylist(), strict=True)
        for shard, key in pairs:
            found.setdefault(shard, set()).add(key)
        return found


def exclusions_bytes(rows: list[dict[str, Any]], train_digest: str, about: dict[str, Any]) -> bytes:
    """Make a list; equal arguments give equal bytes.

    Args:
        rows: By the fields of EXCLUSION_SCHEMA; a field that is not there stays empty.
        train_digest: Digest of the manifest of the dataset that the rows are of.
        about: How the list was made.
    """
    ordered = sorted(rows, key=lambda row: (row["key"], row["shard"]))
    table = pa.Table.from_pylist(ordered, EXCLUSION_SCHEMA)
    described = {**about, "version": EXCLUSION_VERSION, "train_digest": train_digest}
    metadata = {_METADATA_KEY: json.dumps(described, sort_keys=True)}
    return parquet_bytes(table.replace_schema_metadata(metadata))


def write_exclusions(
    place: str, rows: list[dict[str, Any]], train_digest: str, about: dict[str, Any]
) -> None:
    """Write a list to a path, file:///path or s3://bucket/name; see `exclusions_bytes`."""
    storage, name = split_place(place)
    storage.put(name, exclusions_bytes(rows, train_digest, about))


def load_exclusions(place: str) -> Exclusions:
    """Read a list.

    Args:
        place: A path, file:///path or s3://bucket/name.

    Raises:
        UserError: There is none.
        DataError: It is damaged, or something else.
    """
    storage, name = split_place(place)
    try:
        data = storage.read_bytes(name)
    except OSError as error:
        raise UserError(
            f"list of excluded images {place}: {error}; make one with `vitscale dedup`"
        ) from error
    try:
        table = pq.read_table(io.BytesIO(data), use_threads=False)
        about = json.loads((table.schema.metadata or {})[_METADATA_KEY])
        version, train_digest = about["version"], about["train_digest"]
    except (pa.ArrowInvalid, OSError, KeyError, ValueError) as error:
        raise DataError(f"{place} is no list of excluded images: {error!r}") from error
    if version != EXCLUSION_VERSION or table.schema.names != EXCLUSION_SCHEMA.names:
        raise DataError(
            f"{place}: version {version} with columns {table.schema.names}, this program reads "
            f"version {EXCLUSION_VERSION} with {EXCLUSION_SCHEMA.names}; make the list anew with "
            "`vitscale dedup`"
        )
    return Exclusions(place, train_digest, sha256_hex(data), about, table)


def split_place(place: str) -> tuple[Storage, str]:
    """Give the store that a file is in, and its name there.

    Raises:
        UserError: It is no name of a file.
    """
    folder, slash, name = place.rpartition("/")
    if not name:
        raise UserError(f"{place!r} names no file: write for example exclude.parquet")
    return open_storage(folder or slash or "."), name
