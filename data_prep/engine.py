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
from typing import Any, Protocol

import pyarrow as pa

from data_prep.comm import Crew, LocalCrew
from data_prep.plan import Plan, changed_plan_message, make_plan
from data_prep.writer import Done, ShardWork, commit_name, is_done, load_commit
from vitscale.config.errors import EXIT_DONE, DataError, UserError
from vitscale.data.label_columns import LABELS_NAME, LabelColumn
from vitscale.data.lease import PREFIX as LEASES
from vitscale.data.lease import Lease
from vitscale.data.manifest import (
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
COMMIT_READERS = 32
SHOWN_CLASSES = 10


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
        _say_all(plan)
        _say("dry run: nothing was written")
        return EXIT_DONE
    storage = work.storage()
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
        if storage.list(LEASES):
            # Of a job that was killed between its last two steps.
            with Lease(storage, "vitscale pack"):
                storage.sweep_temps()
        return EXIT_DONE
    with Lease(storage, "vitscale pack") as lease:
        storage.sweep_temps()
        _claim(storage, plan)
        records = _finished(storage, plan, retry_failed)
        kept = len(records)
        if kept:
            _say(f"resuming: {kept} of {plan.num_shards} shards are done")
        _work(crew, work, plan, records, max_bad, lease)
        finish(storage, plan, [records[number] for number in range(plan.num_shards)])
    _summary(storage, plan, records, kept, time.monotonic() - start)
    return EXIT_DONE


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _describe(plan: Plan) -> str:
    record = plan.record
    return (
        f"plan num_inputs={plan.num_inputs} num_classes={len(plan.columns[0].names)} "
        f"num_shards={plan.num_shards} "
        f"input_mb={record['num_input_bytes'] / 1e6:.1f} digest={plan.digest[:16]}"
    )


def _say_all(plan: Plan) -> None:
    """Show sources, classes and shards of a plan."""
    record = plan.record
    for source in record["sources"]:
        counts = sorted(row["num_inputs"] for row in source["classes"].values())
        num_bytes = sum(row["num_bytes"] for row in source["classes"].values())
        _say(
            f"source kind={source['kind']} num_inputs={sum(counts)} mb={num_bytes / 1e6:.1f} "
            f"classes_with_inputs={len(counts)} inputs_a_class={counts[0]}/"
            f"{counts[len(counts) // 2]}/{counts[-1]} (min/median/max)"
        )
        for name, row in list(source["classes"].items())[:SHOWN_CLASSES]:
            _say(f"  {name} num_inputs={row['num_inputs']} mb={row['num_bytes'] / 1e6:.1f}")
        if len(source["classes"]) > SHOWN_CLASSES:
            _say(f"  and {len(source['classes']) - SHOWN_CLASSES} more classes")
    for column in plan.columns:
        kind = "several classes an image" if column.multi else "one class an image"
        _say(f"label column={column.name} num_classes={len(column.names)} ({kind})")
    sizes = plan.bounds[1:] - plan.bounds[:-1]
    _say(
        f"shards name={plan.shard_name(0)} num_shards={plan.num_shards} "
        f"inputs_a_shard={sizes.min()} to {sizes.max()}"
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
    if not storage.create_once(PLAN_NAME, json_bytes(plan.record)):
        old = _read_json(storage, PLAN_NAME)
        if old != plan.record:
            raise UserError(changed_plan_message(storage.uri, old, plan.record))
    # Before any shard: whoever writes one takes the label columns from there.
    storage.put(LABELS_NAME, plan.labels)


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


class _Tally:
    """What is known while shards come in: failures, and how fast everybody is."""

    def __init__(self, plan: Plan, records: dict[int, dict[str, Any]], max_bad: Limit) -> None:
        self._plan, self._records = plan, records
        self._allowed = max_bad.allowed(plan.num_inputs)
        self.failed = sum(record["num_failed"] for record in records.values())
        # worker -> inputs and seconds of work
        self._work: dict[str, list[float]] = {}
        self.check()

    def add(self, done: Done) -> None:
        """Count a finished shard."""
        self._records[done.record["number"]] = done.record
        self.failed += done.record["num_failed"]
        sums = self._work.setdefault(done.worker, [0, 0])
        sums[0] += done.record["num_inputs"]
        sums[1] += done.seconds
        self.check()

    def check(self) -> None:
        """End a job that goes wrong.

        Raises:
            DataError: More inputs failed than allowed.
        """
        if self.failed > self._allowed:
            raise DataError(
                f"{self.failed} inputs failed, --max-bad allows {self._allowed} of "
                f"{self._plan.num_inputs}; for example:{_examples(self._records)}\n"
                "Finished shards are kept; run again with a larger --max-bad to go on."
            )

    def slowest(self) -> str:
        """Name the worker with the lowest rate, in inputs a second."""
        rate, worker = min(
            (inputs / max(seconds, 1e-9), worker)
            for worker, (inputs, seconds) in self._work.items()
        )
        return f"{worker}:{rate:.3g}/s"


def _work(
    crew: Crew,
    work: ShardWork,
    plan: Plan,
    records: dict[int, dict[str, Any]],
    max_bad: Limit,
    lease: Lease,
) -> None:
    """Do what is missing; add its records to those that are there."""
    tally = _Tally(plan, records, max_bad)
    missing = [number for number in range(plan.num_shards) if number not in records]
    if not missing:
        return
    total = int(sum(plan.bounds[number + 1] - plan.bounds[number] for number in missing))
    if isinstance(crew, LocalCrew):
        work.warm_up()
    # What planning took and gave back must not be counted again in every process.
    pa.default_memory_pool().release_unused()
    # In this order: processes are forked by map, and must be before there is a thread.
    results = crew.map(work, (plan.task(number) for number in missing))
    lease.start()
    progress = Progress(total, "inputs", "pack")
    try:
        for done in results:
            lease.check()
            tally.add(done)
            progress.update(
                done.record["num_inputs"],
                shards=f"{len(records)}/{plan.num_shards}",
                failed=tally.failed,
                slowest=tally.slowest(),
            )
    finally:
        progress.close()


def _examples(records: dict[int, dict[str, Any]]) -> str:
    texts = [text for number in sorted(records) for text in records[number]["examples"]]
    return "".join(f"\n  {text}" for text in texts[:5])


def shards_bytes(records: list[dict[str, Any]]) -> bytes:
    """Write shards.parquet from the commit records of the shards that hold samples."""
    fields = {name: [record[name] for record in records] for name in SHARDS_SCHEMA.names[1:]}
    return parquet_bytes(pa.table({"shard_id": list(range(len(records))), **fields}, SHARDS_SCHEMA))


class Finishable(Protocol):
    """What the manifest takes from a plan."""

    columns: list[LabelColumn]
    # "settings" has the format, the split and the treatment of images
    record: dict[str, Any]
    digest: str

    @property
    def num_inputs(self) -> int:
        """Inputs, packed or not."""

    @property
    def labels(self) -> bytes:
        """The content of labels.json."""


def finish(storage: Storage, plan: Finishable, records: list[dict[str, Any]]) -> None:
    """Write tables and, last, the manifest.

    Args:
        storage: The dataset.
        plan: By which it was made.
        records: Commit records of all shards.

    Raises:
        DataError: There is not a single sample.
        UserError: Another dataset was finished there meanwhile.
    """
    filled = [record for record in records if record["num_samples"]]
    if not filled:
        numbered = dict(enumerate(records))
        raise DataError(
            f"none of {plan.num_inputs} inputs could be packed; for example:{_examples(numbered)}"
        )
    shards = shards_bytes(filled)
    manifest = {
        "version": MANIFEST_VERSION,
        "format": plan.record["settings"]["format"],
        "split": plan.record["settings"]["split"],
        "num_samples": sum(record["num_samples"] for record in filled),
        "num_bytes": sum(record["num_bytes"] for record in filled),
        "num_shards": len(filled),
        "num_failed": sum(record["num_failed"] for record in records),
        "num_excluded": sum(record["num_excluded"] for record in records),
        "columns": [column.summary() for column in plan.columns],
        "labels_sha256": sha256_hex(plan.labels),
        "shards_sha256": sha256_hex(shards),
        "plan_digest": plan.digest,
        "keys_sum64": sum(record["keys_sum64"] for record in filled) % 2**64,
        "samples_sha256": sha256_hex(
            "".join(record["samples_sha256"] for record in filled).encode()
        ),
        "image": plan.record["settings"]["image"],
        "ledger": [
            {"name": ledger_name(record["name"]), "sha256": record["ledger_sha256"]}
            for record in records
        ],
    }
    storage.put(SHARDS_NAME, shards)
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
