"""A label column that was added to a finished dataset: in files beside it, no image is rewritten.

    URI/labels/NAME/shard-000000.parquet    key and labels, in the order of the shard's index
    URI/labels/NAME.json                    written last: the column, its dataset, all hashes

manifest.json knows nothing of it: a dataset keeps its name, whatever is added. A sample that was
not labelled has -1, in a multi-label column an empty list.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from vitscale.config.errors import UserError
from vitscale.data.label_columns import LabelColumn
from vitscale.data.manifest import Manifest, damaged, json_bytes, read_table, sha256_hex
from vitscale.data.storage import Readable, Storage

SIDECAR_VERSION = 1
PREFIX = "labels/"
# What may become a name of an object and of a field.
COLUMN_NAME = re.compile(r"[A-Za-z]\w{0,63}", re.ASCII)


class SidecarShard(NamedTuple):
    """What is known of a column in one shard without reading it."""

    # of the Parquet object
    sha256: str
    # samples with a label
    num_labelled: int
    # sum modulo 2**64 of xxh64(key) over the samples with a label
    keys_sum64: int


@dataclass(frozen=True)
class Sidecar:
    """A column that was added."""

    column: LabelColumn
    # of the dataset that it was made for
    manifest_digest: str
    samples_sha256: str
    # by shard_id
    shards: list[SidecarShard] = field(repr=False)
    # sha256 of NAME.json
    digest: str

    @property
    def num_labelled(self) -> int:
        """Samples with a label."""
        return sum(shard.num_labelled for shard in self.shards)


def sidecar_name(column: str) -> str:
    """Give the name of the object that completes a column."""
    return f"{PREFIX}{column}.json"


def sidecar_shard_name(column: str, shard_name: str) -> str:
    """Give the name of a column's part: shard-000000.tar -> labels/NAME/shard-000000.parquet."""
    return f"{PREFIX}{column}/{shard_name.rpartition('.')[0]}.parquet"


def sidecar_schema(column: LabelColumn) -> pa.Schema:
    """Give the schema of a column's parts."""
    return pa.schema([pa.field("key", pa.string()), column.field])


def sidecar_bytes(column: LabelColumn, manifest: Manifest, shards: Sequence[SidecarShard]) -> bytes:
    """Write the object that completes a column.

    Args:
        column: With the names of the classes.
        manifest: Of the dataset.
        shards: By shard_id.
    """
    return json_bytes(
        {
            "version": SIDECAR_VERSION,
            "column": {"name": column.name, "multi": column.multi, "names": list(column.names)},
            "manifest_digest": manifest.digest,
            "samples_sha256": manifest.samples_sha256,
            "shards": [shard._asdict() for shard in shards],
        }
    )


def list_sidecars(storage: Storage) -> list[str]:
    """Give the names of the complete columns that were added to a dataset."""
    names = (name.removeprefix(PREFIX) for name in storage.list(PREFIX))
    return sorted(
        name.removesuffix(".json") for name in names if name.endswith(".json") and "/" not in name
    )


def load_sidecar(storage: Storage, manifest: Manifest, column: str) -> Sidecar:
    """Read what completes a column.

    Args:
        storage: The dataset.
        manifest: Its manifest, not a view.
        column: Name of the column.

    Raises:
        UserError: There is no such column, or it was made for another dataset.
        DataError: It is damaged.
    """
    name = sidecar_name(column)
    try:
        if not COLUMN_NAME.fullmatch(column):
            raise FileNotFoundError(column)
        data = storage.read_bytes(name)
    except FileNotFoundError:
        known = [own["name"] for own in manifest.columns] + list_sidecars(storage)
        raise UserError(
            f"{storage.uri} has no label column {column!r}; it has {', '.join(known)}. Add one "
            f"with `vitscale labels {storage.uri} --add NAME --from FILE`"
        ) from None
    try:
        values = json.loads(data)
        version = values["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(storage.uri, name, f"is no label column: {error!r}") from error
    if version != SIDECAR_VERSION:
        raise UserError(
            f"{storage.uri}/{name}: version {version}, this program reads version "
            f"{SIDECAR_VERSION}; use the release that wrote it, or add the column again"
        )
    try:
        sidecar = _parsed(values, sha256_hex(data))
    except (KeyError, TypeError) as error:
        raise damaged(storage.uri, name, f"fields are missing or unknown: {error}") from error
    if sidecar.manifest_digest != manifest.digest:
        raise UserError(
            f"{storage.uri}/{name} was made for another dataset: manifest.json had sha256 "
            f"{sidecar.manifest_digest[:16]}.., has {manifest.digest[:16]}..; remove the column "
            f"(`vitscale labels {storage.uri} --remove {column}`) and add it again"
        )
    if len(sidecar.shards) != manifest.num_shards or sidecar.column.name != column:
        reason = (
            f"is column {sidecar.column.name!r} of {len(sidecar.shards)} shards, the dataset has "
            f"{manifest.num_shards}"
        )
        raise damaged(storage.uri, name, reason)
    return sidecar


def _parsed(values: dict[str, Any], digest: str) -> Sidecar:
    own = values["column"]
    return Sidecar(
        LabelColumn(own["name"], bool(own["multi"]), tuple(own["names"])),
        values["manifest_digest"],
        values["samples_sha256"],
        [SidecarShard(**shard) for shard in values["shards"]],
        digest,
    )


def load_sidecar_shard(
    storage: Readable, manifest: Manifest, sidecar: Sidecar, shard_id: int
) -> pa.Table:
    """Read a column in one shard: fields `key` and the column, in the order of the index.

    Args:
        storage: The dataset.
        manifest: Its manifest, not a view.
        sidecar: The column.
        shard_id: 0 to manifest.num_shards - 1.

    Raises:
        DataError: It is missing or damaged.
    """
    name = sidecar_shard_name(sidecar.column.name, manifest.shards.names[shard_id])
    schema = sidecar_schema(sidecar.column)
    table = read_table(storage, name, sidecar.shards[shard_id].sha256, schema)
    wanted = int(manifest.shards.num_samples[shard_id])
    if table.num_rows != wanted:
        raise damaged(storage.uri, name, f"has {table.num_rows} rows, the shard {wanted} samples")
    return table
