"""`vitscale verify --repair`: damaged shards are made again from the plan and the sources.

Only what is damaged is written, and only with the hashes that the manifest says.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass, field
from typing import Any

from data_prep import comm
from data_prep.engine import PLAN_NAME, shards_bytes
from data_prep.images import ImagePolicy
from data_prep.label_map import load_label_map
from data_prep.pack_arguments import source_options
from data_prep.plan import Plan, Settings, Task, changed_plan_message, make_plan
from data_prep.writer import Done, ShardWork, commit_name, load_commit
from vitscale.config.errors import DataError, UserError
from vitscale.data.exclusion import load_exclusions
from vitscale.data.label_columns import LABELS_NAME
from vitscale.data.lease import Lease
from vitscale.data.manifest import (
    MANIFEST_NAME,
    SHARDS_NAME,
    Manifest,
    index_name,
    ledger_name,
    load_manifest,
    sha256_hex,
)
from vitscale.data.storage import Storage, open_storage
from vitscale.observe.progress import Progress

PURPOSE = "vitscale verify --repair"


@dataclass
class RepairWork(ShardWork):
    """Makes shards anew in a folder of its own, then publishes what is damaged of them.

    Args:
        damaged: Names of the damaged objects of the dataset.
    """

    damaged: frozenset[str] = frozenset()
    _dataset: tuple[Storage, Manifest] | None = field(default=None, init=False)

    def __call__(self, task: Task) -> Done:
        """Repair one shard.

        Raises:
            DataError: It comes out otherwise than it was; nothing of it is published then.
        """
        if self._dataset is None:
            storage = open_storage(self.out)
            self._dataset = storage, load_manifest(storage)
        storage, manifest = self._dataset
        with tempfile.TemporaryDirectory(prefix="vitscale-repair-") as folder:
            # The place that shards are written to.
            self._storage = staged = open_storage(folder)
            staged.put(LABELS_NAME, storage.read_bytes(LABELS_NAME))
            done = super().__call__(task)
            _refuse_other(storage, manifest, done.record)
            for name in staged.list():
                if name in self.damaged and name != LABELS_NAME:
                    path = staged.local_path(name)
                    assert path is not None
                    storage.put_file(name, path)
        return done


def _refuse_other(storage: Storage, manifest: Manifest, record: dict[str, Any]) -> None:
    """Make sure that a shard came out as it was."""
    name, shards = record["name"], manifest.shards
    ledgers = {entry["name"]: entry["sha256"] for entry in manifest.ledger}
    pairs = {ledger_name(name): (record["ledger_sha256"], ledgers.get(ledger_name(name)))}
    if name in shards.names:
        shard_id = shards.names.index(name)
        pairs[name] = (record["sha256"], shards.sha256[shard_id])
        pairs[index_name(name)] = (record["index_sha256"], shards.index_sha256[shard_id])
    for object_name, (found, wanted) in pairs.items():
        if found != wanted:
            raise DataError(
                f"{storage.uri}: {object_name} came out with sha256 {found}, it was {wanted} when "
                "it was packed, so nothing of this shard was touched; use the versions of vitscale "
                "and its libraries that packed it, or pack again into an empty place"
            )


def make_work(
    args: argparse.Namespace, record: dict[str, Any], damaged: frozenset[str]
) -> RepairWork:
    """Build the job that a plan's record describes.

    Args:
        args: --source and how to read it, --exclude, --label-map; the dataset's URI.
        record: The plan's record.
        damaged: Names of the damaged objects.

    Raises:
        UserError: Something that the record names is not given.
    """
    said = record["settings"]
    if "seed" not in said:
        raise UserError(
            f"{args.uri} was made by `vitscale index`, from files that others packed: fetch "
            f"damaged ones again; for the rest remove {MANIFEST_NAME} and run `vitscale index`"
        )
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
    options = source_options(args, said["split"])
    return RepairWork(args.source, options, settings, args.uri, damaged=damaged)


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


def repair(crew: comm.Crew, work: RepairWork, storage: Storage, manifest: Manifest) -> int:
    """Write what is damaged anew.

    Args:
        crew: Who does the shards.
        work: The job, from the plan's record.
        storage: The dataset.
        manifest: Its manifest, which is sound.

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
    if LABELS_NAME in work.damaged:
        storage.put(LABELS_NAME, plan.labels)
    numbers = _shards_of(plan, work.damaged)
    crew.share(work)
    results = crew.map(work, (plan.task(number) for number in numbers))
    progress = Progress(len(numbers), "shards", "repair")
    for _ in results:
        progress.update()
    progress.close()
    return len(numbers)


def _shards_of(plan: Plan, damaged: frozenset[str]) -> list[int]:
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
    except FileNotFoundError:
        return False  # whoever reads the manifest says what to do
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{storage.uri}/{MANIFEST_NAME} is damaged: {error!r}; remove it and give the "
            "`vitscale pack` that made the dataset again: it keeps all shards that are whole"
        ) from error
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
    with Lease(storage, PURPOSE):
        storage.put(SHARDS_NAME, data)
    return True
