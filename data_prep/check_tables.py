"""Is everything of a dataset there, and do its tables agree with each other; no image is read."""

import io
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_prep.engine import PLAN_NAME
from data_prep.ledger import SHOWN_FAILURES
from data_prep.writer import COMMIT_VERSION, commit_name
from vitscale.config.errors import DataError
from vitscale.data.label_columns import LABELS_NAME
from vitscale.data.manifest import (
    MANIFEST_NAME,
    SHARDS_NAME,
    Manifest,
    index_name,
    json_bytes,
    load_label_columns,
    sha256_hex,
)
from vitscale.data.storage import Storage

# Threads: a ledger of a bucket is one round trip.
READERS = 16
# Fields of a commit record that only the index can confirm.
SUMS = {"keys_sum64", "samples_sha256"}
STATUSES = {"packed": "num_samples", "failed": "num_failed", "excluded": "num_excluded"}


@dataclass(frozen=True)
class Damage:
    """One thing that is not as it was."""

    # object of the dataset
    shard: str
    # sample, and where its image bytes start, if the damage is in one
    key: str | None
    offset: int | None
    reason: str


@dataclass
class _Inputs:
    """What became of the inputs of one shard, as its ledger says."""

    damage: list[Damage] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)


def check_tables(storage: Storage, manifest: Manifest) -> list[Damage]:
    """Check manifest, labels, ledgers, commit records, and that every object is there.

    Args:
        storage: The dataset.
        manifest: Its manifest, whose shard table is sound.

    Returns:
        All damage.
    """
    damage = list(_check_manifest(storage, manifest))
    if damage:
        return damage
    sizes = storage.sizes()
    damage += _check_labels(storage, manifest)
    damage += _check_objects(manifest, sizes)
    # A copy of a dataset may do without what is for the packer only.
    has_records = any(name.startswith("_commit/shard-") for name in sizes)
    if has_records or PLAN_NAME in sizes:
        damage += _check_plan(storage, manifest)
    shard_ids = {_stem(name): number for number, name in enumerate(manifest.shards.names)}

    def look(number: int) -> _Inputs:
        return _check_inputs(storage, manifest, sizes, number, shard_ids, has_records)

    # They end here, before any process is forked.
    with ThreadPoolExecutor(READERS) as threads:
        inputs = list(threads.map(look, range(len(manifest.ledger))))
    found = [item for own in inputs for item in own.damage]
    return damage + found + ([] if found else list(_check_sums(manifest, inputs)))


def _check_manifest(storage: Storage, manifest: Manifest) -> Iterator[Damage]:
    data = storage.read_bytes(MANIFEST_NAME)
    if json_bytes(json.loads(data)) != data:
        yield Damage(MANIFEST_NAME, None, None, "is not written as the packer writes it")
    shapes = {"columns": {"name", "multi", "num_classes"}, "ledger": {"name", "sha256"}}
    for name, fields in shapes.items():
        rows = getattr(manifest, name)
        if not isinstance(rows, list) or any(
            not isinstance(row, dict) or row.keys() != fields for row in rows
        ):
            reason = f"{name} is not a list of {', '.join(sorted(fields))}"
            yield Damage(MANIFEST_NAME, None, None, reason)


def _check_labels(storage: Storage, manifest: Manifest) -> Iterator[Damage]:
    try:
        load_label_columns(storage, manifest)
    except DataError as error:
        yield Damage(LABELS_NAME, None, None, str(error))


def _check_objects(manifest: Manifest, sizes: dict[str, int]) -> Iterator[Damage]:
    known = {entry["name"] for entry in manifest.ledger}
    known |= {commit_name(number) for number in range(len(manifest.ledger))}
    for name, wanted in zip(manifest.shards.names, manifest.shards.num_bytes.tolist(), strict=True):
        known |= {name, index_name(name)}
        for object_name in (name, index_name(name)):
            if object_name not in sizes:
                yield Damage(object_name, None, None, "is missing")
        if name in sizes and sizes[name] != wanted:
            reason = f"has {sizes[name]} bytes, had {wanted} when it was packed"
            yield Damage(name, None, None, reason)
    # Shards of others that hold no usable sample are in the ledger only.
    stems = {_stem(name.removeprefix("ledger/")) for name in known if name.startswith("ledger/")}
    for name in sizes:
        if name not in known and _is_ours(name, manifest.format) and _stem(name) not in stems:
            reason = "is not in the manifest; remove it, other readers would take it for a part"
            yield Damage(name, None, None, reason)


def _is_ours(name: str, shard_format: str) -> bool:
    """Tell whether a name is one that only a part of the dataset has."""
    if name == SHARDS_NAME or name.startswith("labels/"):
        return False
    if name.startswith(("ledger/", "_commit/shard-")):
        return True
    # A Parquet file may well be something else, such as a list of `vitscale dedup`.
    endings = (
        (".index.parquet",) if shard_format == "parquet" else (f".{shard_format}", ".index.parquet")
    )
    return name.endswith(endings)


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def _check_plan(storage: Storage, manifest: Manifest) -> Iterator[Damage]:
    try:
        plan = json.loads(storage.read_bytes(PLAN_NAME))
        settings = plan["settings"]
        digest = plan.pop("plan_digest")
        found = sha256_hex(json_bytes(plan))
        said = {
            "plan_digest": found,
            **{name: settings[name] for name in ("format", "split", "image")},
        }
    except FileNotFoundError:
        yield Damage(PLAN_NAME, None, None, "is missing")
        return
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield Damage(PLAN_NAME, None, None, f"is not a plan: {error!r}")
        return
    if found != digest:
        reason = f"plan_digest is {digest}, its content has {found}"
        yield Damage(PLAN_NAME, None, None, reason)
        return
    for name, value in said.items():
        if getattr(manifest, name) != value:
            reason = f"{name} is {getattr(manifest, name)!r}, {PLAN_NAME} has {value!r}"
            yield Damage(MANIFEST_NAME, None, None, reason)


def _check_inputs(
    storage: Storage,
    manifest: Manifest,
    sizes: dict[str, int],
    number: int,
    shard_ids: dict[str, int],
    has_records: bool,
) -> _Inputs:
    """Check the ledger of a shard, and its commit record against it."""
    entry = manifest.ledger[number]
    inputs = _Inputs()
    shard_id = shard_ids.get(_stem(entry["name"].removeprefix("ledger/")))
    rows = _read_ledger(storage, entry, inputs)
    wanted: dict[str, Any] = {
        "version": COMMIT_VERSION,
        "number": number,
        "plan_digest": manifest.plan_digest,
    }
    wanted |= {"ledger_sha256": entry["sha256"]}
    if rows is not None:
        wanted |= {"num_inputs": rows.num_rows, **_counts(rows, inputs)}
    if shard_id is not None:
        shards = manifest.shards
        wanted |= {
            "name": shards.names[shard_id],
            "num_samples": int(shards.num_samples[shard_id]),
            "num_bytes": int(shards.num_bytes[shard_id]),
            "sha256": shards.sha256[shard_id],
            "index_sha256": shards.index_sha256[shard_id],
        }
    sizes_of = {"ledger_bytes": entry["name"]}
    if shard_id is not None:
        sizes_of["index_bytes"] = index_name(manifest.shards.names[shard_id])
    # What is missing is named already.
    wanted |= {key: sizes[name] for key, name in sizes_of.items() if name in sizes}
    packed = inputs.statuses["packed"]
    if rows is not None and packed != (wanted["num_samples"] if shard_id is not None else 0):
        reason = f"has {packed} packed samples, the shard has {wanted.get('num_samples', 0)}"
        inputs.damage.append(Damage(entry["name"], None, None, reason))
    if has_records and not inputs.damage:
        _check_record(storage, number, wanted, inputs)
    return inputs


def _read_ledger(storage: Storage, entry: dict[str, str], inputs: _Inputs) -> pa.Table | None:
    try:
        data = storage.read_bytes(entry["name"])
    except FileNotFoundError:
        inputs.damage.append(Damage(entry["name"], None, None, "is missing"))
        return None
    found = sha256_hex(data)
    if found != entry["sha256"]:
        reason = f"sha256 is {found}, was {entry['sha256']} when it was packed"
        inputs.damage.append(Damage(entry["name"], None, None, reason))
        return None
    columns = ["source", "status", "reason"]
    return pq.read_table(io.BytesIO(data), columns=columns, use_threads=False)


def _counts(rows: pa.Table, inputs: _Inputs) -> dict[str, Any]:
    """Count a ledger as the packer counted it for the record."""
    for row in pc.value_counts(rows["status"]).to_pylist():
        inputs.statuses[row["values"]] += row["counts"]
    failed = rows.filter(pc.equal(rows["status"], "failed")).to_pylist()
    words = Counter(row["reason"].partition(":")[0] for row in failed)
    return {
        "num_failed": inputs.statuses["failed"],
        "num_excluded": inputs.statuses["excluded"],
        "failed": dict(words),
        "examples": [f"{row['source']}: {row['reason']}" for row in failed[:SHOWN_FAILURES]],
    }


def _check_record(storage: Storage, number: int, wanted: dict[str, Any], inputs: _Inputs) -> None:
    name = commit_name(number)
    try:
        data = storage.read_bytes(name)
        record = json.loads(data)
        wrong = [
            f"{key} is {record[key]!r}, the tables say {value!r}"
            for key, value in wanted.items()
            if record[key] != value
        ]
        if json_bytes(record) != data or not record.keys() >= SUMS:
            wrong.append("it is not written as the packer writes it")
    except FileNotFoundError:
        wrong = ["is missing"]
    except (ValueError, KeyError, TypeError) as error:
        wrong = [f"is not a commit record: {error!r}"]
    if wrong:
        inputs.damage.append(Damage(name, None, None, "; ".join(wrong)))


def _check_sums(manifest: Manifest, inputs: list[_Inputs]) -> Iterator[Damage]:
    """Compare the manifest with the sums over all shards."""
    statuses: Counter[str] = sum((own.statuses for own in inputs), Counter())
    pairs: list[tuple[str, Any, Any]] = [
        (field_name, getattr(manifest, field_name), statuses[status])
        for status, field_name in STATUSES.items()
        if inputs
    ]
    pairs.append(("num_bytes", manifest.num_bytes, int(manifest.shards.num_bytes.sum())))
    for name, said, found in pairs:
        if said != found:
            reason = f"{name} is {said}, the tables have {found}"
            yield Damage(MANIFEST_NAME, None, None, reason)


def record_numbers(manifest: Manifest) -> dict[str, int]:
    """Give name of a shard without its ending -> number of its ledger and commit record."""
    names = (entry["name"].removeprefix("ledger/") for entry in manifest.ledger)
    return {_stem(name): number for number, name in enumerate(names)}


def check_record_sums(storage: Storage, number: int, sums: dict[str, Any]) -> list[Damage]:
    """Compare what a shard's index holds with its commit record.

    Args:
        storage: The dataset.
        number: Of the record.
        sums: Fields of the record that can be had from the index.
    """
    name = commit_name(number)
    try:
        record = json.loads(storage.read_bytes(name))
        wrong = [key for key, value in sums.items() if record[key] != value]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return []  # check_tables names it
    reasons = [f"{key} is {record[key]}, the index has {sums[key]}" for key in wrong]
    return [Damage(name, None, None, "; ".join(reasons))] if wrong else []
