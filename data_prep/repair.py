"""`vitscale verify --repair`: damaged shards are made again from the plan and the sources.

Only what is damaged is written, and only with the hashes that the manifest says.
"""

import argparse
import json
from typing import Any

from data_prep import comm
from data_prep.engine import PLAN_NAME, shards_bytes
from data_prep.images import ImagePolicy
from data_prep.label_map import load_label_map
from data_prep.pack_arguments import source_options
from data_prep.plan import Plan, Settings, changed_plan_message, make_plan
from data_prep.writer import ShardWork, commit_name, load_commit
from vitscale.config.errors import DataError, UserError
from vitscale.data.exclusion import load_exclusions
from vitscale.data.label_columns import LABELS_NAME
from vitscale.data.manifest import (
    MANIFEST_NAME,
    SHARDS_NAME,
    Manifest,
    index_name,
    ledger_name,
    sha256_hex,
)
from vitscale.data.storage import Storage
from vitscale.observe.progress import Progress


def make_work(args: argparse.Namespace, record: dict[str, Any]) -> ShardWork:
    """Build the job that a plan's record describes.

    Args:
        args: --source and how to read it, --exclude, --label-map; the dataset's URI.
        record: The plan's record.

    Raises:
        UserError: Something that the record names is not given.
    """
    said = record["settings"]
    if "exclude_sha256" in said and not args.exclude:
        raise UserError("the dataset was packed with a list of excluded images: give --exclude")
    excluded = load_exclusions(args.exclude) if args.exclude else None
    settings = Settings(
        split=said["split"],
        seed=said["seed"],
        shard_bytes=said["shard_bytes"],
        check=said["check"],
        image=ImagePolicy(**said["image"]),
        format=said["format"],
        stratify=said["stratify"],
        spread=said["spread"],
        label_map=load_label_map(args.label_map) if args.label_map else None,
        allow_case_twins=True,
        exclude_digest=excluded.digest if excluded else "",
        excluded=frozenset(excluded.xxh3_64.tolist()) if excluded else frozenset(),
    )
    return ShardWork(args.source, source_options(args, said["split"]), settings, args.uri)


def read_plan(storage: Storage) -> dict[str, Any]:
    """Read the record of the plan that a dataset was packed by.

    Raises:
        UserError: There is none.
    """
    try:
        record: dict[str, Any] = json.loads(storage.read_bytes(PLAN_NAME))
    except (FileNotFoundError, ValueError) as error:
        raise UserError(
            f"{storage.uri} has no sound {PLAN_NAME} ({error}); without the plan it can only be "
            "packed again"
        ) from error
    return record


def repair(
    crew: comm.Crew, work: ShardWork, storage: Storage, manifest: Manifest, damaged: set[str]
) -> int:
    """Write what is damaged anew.

    Args:
        crew: Who does the shards.
        work: The job, from the plan's record.
        storage: The dataset.
        manifest: Its manifest, which is sound.
        damaged: Names of the damaged objects.

    Returns:
        Shards that were written.

    Raises:
        UserError: The sources are not what was packed.
        DataError: The result is not what was packed.
    """
    plan = make_plan(work.sources(), work.settings)
    if plan.digest != manifest.plan_digest:
        raise UserError(
            f"the sources are not what {storage.uri} was packed from. "
            + changed_plan_message(storage.uri, read_plan(storage), plan.record)
        )
    if LABELS_NAME in damaged:
        storage.put(LABELS_NAME, plan.labels)
    numbers = _shards_of(plan, damaged)
    tasks = (plan.task(number) for number in numbers)
    crew.share(work)
    results = crew.map(work, tasks)
    progress = Progress(len(numbers), "shards", "repair")
    wanted = dict(zip(manifest.shards.names, manifest.shards.sha256, strict=True))
    for done in results:
        name, found = done.record["name"], done.record["sha256"]
        if done.record["num_samples"] and wanted.get(name) != found:
            raise DataError(
                f"{storage.uri}: {name} came out with sha256 {found}, the manifest says "
                f"{wanted.get(name)}: another version of a library? Nothing else was touched"
            )
        progress.update()
    progress.close()
    return len(numbers)


def _shards_of(plan: Plan, damaged: set[str]) -> list[int]:
    """Give the shards that damaged objects belong to."""
    found = []
    for number in range(plan.num_shards):
        name = plan.shard_name(number)
        if damaged & {name, index_name(name), ledger_name(name), commit_name(number)}:
            found.append(number)
    return found


def restore_shard_table(storage: Storage) -> bool:
    """Write shards.parquet from the commit records if it is damaged; True if it was.

    Raises:
        DataError: The manifest is damaged, or the records do not give the table of its hash.
    """
    try:
        wanted = json.loads(storage.read_bytes(MANIFEST_NAME))["shards_sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{storage.uri}/{MANIFEST_NAME} is damaged: {error!r}") from error
    try:
        if sha256_hex(storage.read_bytes(SHARDS_NAME)) == wanted:
            return False
    except FileNotFoundError:
        pass
    plan = read_plan(storage)
    found = (load_commit(storage, n, plan["plan_digest"]) for n in range(plan["num_shards"]))
    data = shards_bytes([record for record in found if record and record["num_samples"]])
    if sha256_hex(data) != wanted:
        raise DataError(
            f"{storage.uri}: {SHARDS_NAME} and commit records are damaged; pack again into an "
            "empty place"
        )
    storage.put(SHARDS_NAME, data)
    return True
