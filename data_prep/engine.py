"""The run of a pack: plan, work, commit. Rank 0 alone executes this; others only do shards.

At every instant what is published is whole, so a run may be killed anywhere and started again:
shards with a valid commit record are kept, all others are written anew with the same bytes, and the
manifest comes last.
"""

import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from data_prep.comm import Crew, LocalCrew
from data_prep.plan import Plan, changed_plan_message, make_plan
from data_prep.writer import ShardWork, commit_name, is_done, load_commit
from vitscale.config.errors import EXIT_DONE, DataError, UserError
from vitscale.data.manifest import (
    LABELS_NAME,
    LABELS_VERSION,
    MANIFEST_NAME,
    MANIFEST_VERSION,
    SHARDS_NAME,
    SHARDS_SCHEMA,
    json_bytes,
    ledger_name,
    parquet_bytes,
    sha256_hex,
)
from vitscale.data.storage import Storage, StorageError
from vitscale.observe.progress import Progress

PLAN_NAME = "_commit/plan.json"
COMMIT_READERS = 16


@dataclass(frozen=True)
class Limit:
    """How many inputs may fail: a share of all (0..1), a count, or any when both are None."""

    share: float | None = None
    count: int | None = None

    def allowed(self, num_inputs: int) -> int:
        """Give the number of failed inputs that is still accepted."""
        if self.count is not None:
            return self.count
        return num_inputs if self.share is None else int(self.share * num_inputs)


def pack(crew: Crew, work: ShardWork, max_bad: Limit, *, retry_failed: bool, dry_run: bool) -> int:
    """Pack a dataset, or what is missing of it.

    Args:
        crew: Who does the shards.
        work: The job.
        max_bad: More failed inputs than this end the run.
        retry_failed: Write shards with failed inputs anew.
        dry_run: Show the plan, write nothing.

    Returns:
        The exit code.

    Raises:
        UserError: The inputs or settings are not those that the dataset was begun with.
        DataError: More inputs failed than allowed, or all.
    """
    start = time.monotonic()
    plan = make_plan(work.sources(), work.settings)
    _say(_describe(plan))
    if dry_run:
        _say("dry run: nothing was written")
        return EXIT_DONE
    storage = work.storage()
    storage.sweep_temps()
    if _is_complete(storage, plan):
        if retry_failed:
            raise UserError(
                f"{storage.uri} is complete, and a complete dataset never changes; pack into an "
                "empty --out"
            )
        _say(
            f"already complete: {storage.uri} num_inputs={plan.num_inputs} "
            f"num_shards={plan.num_shards}"
        )
        return EXIT_DONE
    _claim(storage, plan)
    records = _finished(storage, plan, retry_failed)
    kept = len(records)
    if kept:
        _say(f"resuming: {kept} of {plan.num_shards} shards are done")
    _work(crew, work, plan, records, max_bad)
    _finish(storage, plan, [records[number] for number in range(plan.num_shards)])
    _summary(storage, plan, records, kept, time.monotonic() - start)
    return EXIT_DONE


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _describe(plan: Plan) -> str:
    record = plan.record
    return (
        f"plan num_inputs={plan.num_inputs} num_classes={len(plan.classes)} "
        f"num_shards={plan.num_shards} "
        f"input_mb={record['num_input_bytes'] / 1e6:.1f} digest={plan.digest[:16]}"
    )


def _read_json(storage: Storage, name: str) -> Any:
    try:
        return json.loads(storage.read_bytes(name))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(f"{storage.uri}/{name} is damaged: {error}") from error


def _is_complete(storage: Storage, plan: Plan) -> bool:
    manifest = _read_json(storage, MANIFEST_NAME)
    if manifest is None:
        return False
    if manifest.get("plan_digest") != plan.digest:
        old = _read_json(storage, PLAN_NAME) or {"plan_digest": manifest.get("plan_digest")}
        raise UserError(changed_plan_message(storage.uri, old, plan.record))
    return True


def _claim(storage: Storage, plan: Plan) -> None:
    """Write the plan, or find the same one there."""
    if storage.create_once(PLAN_NAME, json_bytes(plan.record)):
        return
    old = _read_json(storage, PLAN_NAME)
    if old != plan.record:
        raise UserError(changed_plan_message(storage.uri, old, plan.record))


def _finished(storage: Storage, plan: Plan, retry_failed: bool) -> dict[int, dict[str, Any]]:
    """Read the commit records of shards that are done."""
    sizes = storage.sizes()
    numbers = [number for number in range(plan.num_shards) if commit_name(number) in sizes]
    # Threads: one record is one round trip to a bucket. They end here, before any process is
    # forked.
    with ThreadPoolExecutor(COMMIT_READERS) as threads:
        found = list(threads.map(lambda number: load_commit(storage, number, plan.digest), numbers))
    records = {record["number"]: record for record in found if record and is_done(record, sizes)}
    if retry_failed:
        records = {number: record for number, record in records.items() if not record["num_failed"]}
    return records


def _work(
    crew: Crew, work: ShardWork, plan: Plan, records: dict[int, dict[str, Any]], max_bad: Limit
) -> None:
    """Do what is missing; add its records to those that are there."""
    allowed = max_bad.allowed(plan.num_inputs)
    _check_failures(records, plan, allowed)
    missing = [number for number in range(plan.num_shards) if number not in records]
    total = int(sum(plan.bounds[number + 1] - plan.bounds[number] for number in missing))
    if not missing:
        return
    if isinstance(crew, LocalCrew):
        work.warm_up()
    # In this order: a bar on a terminal starts a thread, and processes must be forked before that.
    results = crew.map(work, (plan.task(number) for number in missing))
    progress = Progress(total, "inputs", "pack")
    try:
        for record in results:
            records[record["number"]] = record
            failed = _check_failures(records, plan, allowed)
            progress.update(
                record["num_inputs"], shards=f"{len(records)}/{plan.num_shards}", failed=failed
            )
    finally:
        progress.close()


def _check_failures(records: dict[int, dict[str, Any]], plan: Plan, allowed: int) -> int:
    failed = sum(record["num_failed"] for record in records.values())
    if failed > allowed:
        raise DataError(
            f"{failed} inputs failed, --max-bad allows {allowed} of {plan.num_inputs}; for example:"
            f"{_examples(records)}\nFinished shards are kept; run again with a larger --max-bad "
            "to go on."
        )
    return failed


def _examples(records: dict[int, dict[str, Any]]) -> str:
    texts = [text for number in sorted(records) for text in records[number]["examples"]]
    return "".join(f"\n  {text}" for text in texts[:5])


def _finish(storage: Storage, plan: Plan, records: list[dict[str, Any]]) -> None:
    """Write tables and, last, the manifest."""
    filled = [record for record in records if record["num_samples"]]
    if not filled:
        numbered = dict(enumerate(records))
        raise DataError(
            f"none of {plan.num_inputs} inputs could be packed; for example:{_examples(numbered)}"
        )
    shards = parquet_bytes(
        pa.table(
            {
                "shard_id": list(range(len(filled))),
                **{
                    field: [record[field] for record in filled] for field in SHARDS_SCHEMA.names[1:]
                },
            },
            SHARDS_SCHEMA,
        )
    )
    labels = json_bytes({"version": LABELS_VERSION, "names": plan.classes})
    manifest = {
        "version": MANIFEST_VERSION,
        "format": "tar",
        "split": plan.record["settings"]["split"],
        "num_samples": sum(record["num_samples"] for record in filled),
        "num_bytes": sum(record["num_bytes"] for record in filled),
        "num_shards": len(filled),
        "num_failed": sum(record["num_failed"] for record in records),
        "num_classes": len(plan.classes),
        "labels_sha256": sha256_hex(labels),
        "shards_sha256": sha256_hex(shards),
        "plan_digest": plan.digest,
        "keys_sum64": sum(record["keys_sum64"] for record in filled) % 2**64,
        "image": plan.record["settings"]["image"],
        "ledger": [
            {"name": ledger_name(record["name"]), "sha256": record["ledger_sha256"]}
            for record in records
        ],
    }
    storage.put(SHARDS_NAME, shards)
    storage.put(LABELS_NAME, labels)
    try:
        storage.abort_uploads()
    except StorageError as error:
        _say(f"warning: unfinished uploads of dead runs, if any, stay: {error}")
    data = json_bytes(manifest)
    if not storage.create_once(MANIFEST_NAME, data) and storage.read_bytes(MANIFEST_NAME) != data:
        raise UserError(
            f"{storage.uri}: another run finished this dataset with other content; use an empty "
            "--out"
        )


def _summary(
    storage: Storage, plan: Plan, records: dict[int, dict[str, Any]], kept: int, seconds: float
) -> None:
    packed = sum(record["num_samples"] for record in records.values())
    num_bytes = sum(record["num_bytes"] for record in records.values())
    reasons: Counter[str] = Counter()
    for record in records.values():
        reasons.update(record["failed"])
    failed = sum(reasons.values())
    _say(
        f"packed {storage.uri} num_samples={packed} num_failed={failed} "
        f"num_shards={plan.num_shards} "
        f"(kept {kept}) mb={num_bytes / 1e6:.1f} seconds={seconds:.1f} "
        f"inputs_per_s={plan.num_inputs / seconds:.0f}"
    )
    if failed:
        counts = " ".join(f"{word}={count}" for word, count in sorted(reasons.items()))
        _say(
            f"failed inputs are in {storage.uri}/ledger with their reasons: {counts}; for "
            f"example:{_examples(records)}"
        )
