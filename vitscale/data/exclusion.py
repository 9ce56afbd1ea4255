"""A list of samples that are left out: written by `vitscale dedup`, used in packing and training.

One row a sample of the dataset that the list was made for. Packing leaves out the same images by
the hash of their stored bytes, training the same samples by shard and key.
"""

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from vitscale.config.errors import DataError, UserError
from vitscale.data.manifest import parquet_bytes, sha256_hex
from vitscale.data.storage import open_storage

EXCLUSION_VERSION = 1
_METADATA_KEY = b"vitscale_exclusions"
EXCLUSION_SCHEMA = pa.schema(
    [
        ("shard", pa.string()),
        ("key", pa.string()),
        # of the stored image bytes
        ("xxh3_64", pa.uint64()),
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
    rows: pa.Table = field(repr=False)

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
    """Write a list.

    Args:
        rows: By the fields of EXCLUSION_SCHEMA.
        train_digest: Digest of the manifest of the dataset that the rows are of.
        about: How the list was made.
    """
    ordered = sorted(rows, key=lambda row: (row["shard"], row["key"]))
    table = pa.Table.from_pylist(ordered, EXCLUSION_SCHEMA)
    described = {"version": EXCLUSION_VERSION, "train_digest": train_digest, **about}
    metadata = {_METADATA_KEY: json.dumps(described, sort_keys=True)}
    return parquet_bytes(table.replace_schema_metadata(metadata))


def load_exclusions(place: str) -> Exclusions:
    """Read a list.

    Args:
        place: A path, file:///path or s3://bucket/name.

    Raises:
        UserError: There is none.
        DataError: It is damaged, or something else.
    """
    folder, _, name = place.rpartition("/")
    try:
        if "://" in place:
            data = open_storage(folder).read_bytes(name)
        else:
            data = Path(place).expanduser().read_bytes()
    except OSError as error:
        raise UserError(
            f"list of excluded images {place}: {error}; make one with `vitscale dedup`"
        ) from error
    try:
        table = pq.read_table(io.BytesIO(data), use_threads=False)
        about = json.loads((table.schema.metadata or {})[_METADATA_KEY])
    except (pa.ArrowInvalid, KeyError, ValueError) as error:
        raise DataError(f"{place} is no list of excluded images: {error!r}") from error
    if about["version"] != EXCLUSION_VERSION or table.schema.names != EXCLUSION_SCHEMA.names:
        raise DataError(f"{place}: version {about['version']}; make it anew with `vitscale dedup`")
    return Exclusions(place, about["train_digest"], sha256_hex(data), table)
