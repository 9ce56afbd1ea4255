"""`vitscale index`: shards of somebody else become a dataset, without being rewritten."""

import sys

if __package__ in (None, ""):  # started by path: python data_prep/index.py
    from pathlib import Path

    sys.path[0] = str(
        Path(__file__).resolve().parents[1]
    )  # the checkout's root instead of the script's folder

import argparse
import os
from collections import Counter
from typing import Any

from data_prep import comm
from data_prep.engine import PLAN_NAME, Limit, finish
from data_prep.foreign_shards import Reading, find_image_column, find_shards
from data_prep.index_work import IndexPlan, IndexWork
from data_prep.label_map import load_label_map
from data_prep.listing import class_names, name_of
from data_prep.pack_arguments import limit
from data_prep.sources.build import Column, printable
from data_prep.survey import Doubles, Survey, SurveyWork
from data_prep.writer import is_done, load_commit
from vitscale.config.errors import EXIT_DONE, DataError, UserError, exit_code_of
from vitscale.data.label_columns import LABELS_NAME, LabelColumn, labels_json
from vitscale.data.lease import Lease
from vitscale.data.manifest import MANIFEST_NAME, json_bytes, sha256_hex
from vitscale.data.storage import Storage, open_storage
from vitscale.observe.progress import Progress

SHOWN_DAMAGED, SHOWN_FAILURES = 10, 5
DESCRIPTION = """\
Give WebDataset tars or Parquet files that lie in a folder or below a prefix a manifest, indexes
with hashes and a ledger, so that they can be verified and trained on. They are not touched. A run
that was stopped goes on when the same command is given again.
"""
EPILOG = """\
Tars: keys are those that webdataset gives; the label is the content of KEY.cls, a number in
KEY.txt, or the field "label" of KEY.json; other fields with --label-column. Compressed tars are for
packing: vitscale pack --source webdataset:URI.

Parquet files: keys are the file's name and the number of the row; the label is the one label
column, or --label-column. A row group can only be read as a whole, so training that jumps between
many is slow: for long runs pack them (vitscale pack --source parquet:URI).

What cannot be used (no image, no label, not an image) is in the ledger with the reason.

examples:
  vitscale index s3://bucket/laion/train --label-column class
  vitscale index /data/beans --format parquet
  mpiexec -n 32 vitscale index /data/in1k-wds --label-map imagenet_classes.txt

exit codes: 0 done, 2 wrong input, 3 a shard is damaged or too many samples failed (--max-bad).
"""


def index(crew: comm.Crew, args: argparse.Namespace) -> int:
    """Index all shards below a prefix.

    Args:
        crew: Who reads.
        args: Of the command.

    Returns:
        The exit code.

    Raises:
        UserError: There is nothing to index, or a dataset already.
        DataError: A shard is damaged, keys come twice, or too many samples failed.
    """
    storage = open_storage(args.uri)
    if storage.size(MANIFEST_NAME) is not None:
        raise UserError(f"{args.uri} has a {MANIFEST_NAME}: it is a dataset already")
    sizes = storage.sizes()
    kind, names = find_shards(sizes, args.format, args.uri)
    column = find_image_column(args.uri, names, args.image_column) if kind == "parquet" else ""
    reading = Reading(args.uri, kind, tuple(args.label_column), column)
    with Lease(storage, "vitscale index"):
        plan = _survey(crew, args, reading, {name: sizes[name] for name in names})
        storage.put(PLAN_NAME, json_bytes({**plan.record, "plan_digest": plan.digest}))
        storage.put(LABELS_NAME, plan.labels)
        records = _index_all(crew, args, storage, reading, plan)
    finish(storage, plan, [records[number] for number in range(len(names))])
    _show(args.uri, plan, [records[number] for number in range(len(names))])
    return EXIT_DONE


def _show(uri: str, plan: IndexPlan, records: list[dict[str, Any]]) -> None:
    """Say what became of the samples."""
    failed = sum(record["num_failed"] for record in records)
    print(
        f"indexed {uri} num_samples={plan.num_inputs - failed} num_failed={failed} "
        f"num_shards={len(records)} num_classes={len(plan.columns[0].names)}"
    )
    if failed:
        words: Counter[str] = Counter()
        for record in records:
            words.update(record["failed"])
        examples = [text for record in records for text in record["examples"]]
        shown = "".join(f"\n  {text}" for text in examples[:SHOWN_FAILURES])
        counts = " ".join(f"{word}={count}" for word, count in sorted(words.items()))
        print(f"failed samples are in {uri}/ledger with their reasons: {counts}; such as:{shown}")


def _survey(
    crew: comm.Crew, args: argparse.Namespace, reading: Reading, sizes: dict[str, int]
) -> IndexPlan:
    """Learn the classes, and that no key comes twice and no shard is damaged."""
    names = list(sizes)
    work = SurveyWork(reading)
    crew.share(work)
    results = crew.map(work, enumerate(names))
    progress = Progress(len(names), "shards", "look at labels")
    doubles = Doubles()
    surveys: dict[int, Survey] = {}
    for survey in results:
        doubles.add(survey)
        # Keys are many, all else is little.
        surveys[survey.number] = survey._replace(key_hashes=survey.key_hashes[:0])
        progress.update()
    progress.close()
    ordered = [surveys[number] for number in range(len(names))]
    damaged = {names[own.number]: own.damage for own in ordered if own.damage}
    if damaged and not args.skip_damaged:
        shown = "".join(f"\n  {text}" for text in list(damaged.values())[:SHOWN_DAMAGED])
        raise DataError(
            f"{len(damaged)} of {len(names)} shards in {args.uri} are damaged:{shown}\nFetch them "
            "again, or leave them out as a whole with --skip-damaged"
        )
    doubles.refuse(reading, names)
    whole = [own for own in ordered if not own.damage]
    columns, classes = _classes(args, whole)
    settings = {"format": reading.format, "split": args.split, "check": args.check}
    image = {"policy": "keep"}
    if reading.image_column:
        image["column"] = reading.image_column
    record = {
        "made_by": "vitscale index",
        "settings": {**settings, "image": image},
        "shards": sizes,
        "damaged": sorted(damaged),
        "columns": [column.summary() for column in columns],
        "labels_sha256": sha256_hex(json_bytes(labels_json(columns))),
    }
    num_inputs = sum(survey.num_samples for survey in whole) + len(damaged)
    return IndexPlan(names, columns, classes, damaged, num_inputs, record)


def _classes(
    args: argparse.Namespace, surveys: list[Survey]
) -> tuple[list[LabelColumn], list[dict[str | int, int]]]:
    """Agree on the classes of every column; give also label -> class."""
    if not surveys:
        raise DataError(f"{args.uri} holds no shard that is whole")
    label_map = load_label_map(args.label_map) if args.label_map else None
    columns, classes = [], []
    # A shard without samples has nothing to say.
    surveys = [own for own in surveys if own.num_samples] or surveys
    for at, first in enumerate(surveys[0].columns):
        lists = {survey.columns[at].names for survey in surveys}
        if len(lists) > 1:
            raise UserError(
                f"{args.uri}: the shards have different lists of classes in column {first.name!r}; "
                "pack them as several sources, which merges the lists"
            )
        values = set().union(*(survey.values[at] for survey in surveys))
        given = label_map if at == 0 else None
        multi = any(survey.columns[at].multi for survey in surveys)
        known = (
            list(given) if given else class_names(Column(first.name, multi, first.names), values)
        )
        order = first.names or given
        numbers = {text: number for number, text in enumerate(known)}
        found = {value: numbers.get(name_of(value, order) or "", -1) for value in values}
        columns.append(LabelColumn(first.name, multi, tuple(map(printable, known))))
        classes.append(found)
    return columns, classes


def _index_all(
    crew: comm.Crew,
    args: argparse.Namespace,
    storage: Storage,
    reading: Reading,
    plan: IndexPlan,
) -> dict[int, dict[str, Any]]:
    """Index what is missing; give all commit records."""
    sizes = storage.sizes()
    found = (load_commit(storage, n, plan.digest) for n in range(len(plan.names)))
    records = {record["number"]: record for record in found if record and is_done(record, sizes)}
    missing = [number for number in range(len(plan.names)) if number not in records]
    work = IndexWork(reading, plan, args.check)
    crew.share(work)
    results = crew.map(work, missing)
    progress = Progress(len(missing), "shards", "index")
    allowed = args.max_bad.allowed(plan.num_inputs)
    failed = sum(record["num_failed"] for record in records.values())
    for record in results:
        records[record["number"]] = record
        failed += record["num_failed"]
        if failed > allowed:
            raise DataError(
                f"{failed} samples failed, --max-bad allows {allowed}; for example: "
                f"{'; '.join(record['examples'])}"
            )
        progress.update(1, failed=failed)
    progress.close()
    return records


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments; None takes the process's own.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="vitscale index",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    cpus = len(os.sched_getaffinity(0))
    add(
        "uri",
        metavar="URI",
        help="where the shards are: a path, file:///path or s3://bucket/prefix",
    )
    add("--format", choices=["tar", "parquet"], help="kind of shard (default: what there is)")
    add("--split", default="train", help="name of the split (default: train)")
    add("--label-column", action="append", default=[], metavar="NAME",
        help="member, JSON field or column with the label; may be repeated")  # fmt: skip
    add("--image-column", metavar="NAME", help="parquet: column with the image")
    add("--label-map", metavar="FILE|URI", help="order of the classes, as for `vitscale pack`")
    add("--check", default="header", choices=["none", "header", "full"],
        help="none: format and size; header: also the end of the data and PNG checksums (default); "
        "full: decode")  # fmt: skip
    add("--max-bad", type=limit, default=Limit(), metavar="N|P%",
        help="failed samples to accept (default: any)")  # fmt: skip
    add("--skip-damaged", action="store_true",
        help="leave damaged shards out as a whole, each with a row in the ledger")  # fmt: skip
    add("--workers", type=int, default=cpus, help=f"local processes (default: {cpus}, the CPUs)")
    args = parser.parse_args(argv)
    args.uri = args.uri.removeprefix("file://").rstrip("/")
    return exit_code_of(lambda: _run(args), quiet=(comm.launcher_rank() or 0) > 0)


def _run(args: argparse.Namespace) -> int:
    # What the others do is shared before any task.
    work = SurveyWork(Reading(args.uri, "tar", ()))

    def body(crew: comm.Crew) -> int:
        if args.workers < 1:
            raise UserError(f"--workers {args.workers}: at least 1")
        return index(crew, args)

    return comm.run(body, lambda: work, args.workers)


if __name__ == "__main__":
    raise SystemExit(main())
