"""`vitscale index`: somebody else's WebDataset tars become a dataset, without rewriting them."""

import sys

if __package__ in (None, ""):  # started by path: python data_prep/index.py
    from pathlib import Path

    sys.path[0] = str(
        Path(__file__).resolve().parents[1]
    )  # the checkout's root instead of the script's folder

import argparse
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from data_prep import comm
from data_prep.engine import Limit, finish
from data_prep.images import Check, ImagePolicy, Prepared, decode_fully, read_header
from data_prep.label_map import load_label_map
from data_prep.ledger import Ready, Rows
from data_prep.listing import class_names, name_of
from data_prep.pack_arguments import limit
from data_prep.sources.build import Column, LabelValue, printable
from data_prep.sources.files import RandomFile
from data_prep.sources.foreign_tars import DEFAULT_COLUMN, scan_samples
from data_prep.survey import Survey, SurveyWork, refuse_doubles
from data_prep.verdict import BadInputError
from data_prep.writer import COMMIT_VERSION, commit_name, is_done, load_commit
from vitscale.config.errors import EXIT_DONE, DataError, UserError, exit_code_of
from vitscale.data.label_columns import LABELS_NAME, LabelColumn, labels_json
from vitscale.data.lease import Lease
from vitscale.data.manifest import (
    MANIFEST_NAME,
    index_name,
    json_bytes,
    ledger_name,
    sha256_hex,
)
from vitscale.data.storage import Storage, open_storage
from vitscale.observe.progress import Progress

READ_BYTES = 16 << 20
SHARD_ENDING = ".tar"
DESCRIPTION = """\
Give WebDataset tars that lie in a folder or below a prefix a manifest, indexes with hashes and a
ledger, so that they can be verified and trained on. The tars are not touched; keys are those that
webdataset gives. A run that was stopped goes on when the same command is given again.
"""
EPILOG = """\
The label is the content of KEY.cls, a number in KEY.txt, or the field "label" of KEY.json; other
fields with --label-column. What cannot be used (no image, no label, not an image) is in the ledger
with the reason. Compressed tars, and images that only `vitscale pack` can bring to a common form,
are for packing: vitscale pack --source webdataset:URI.

examples:
  vitscale index s3://bucket/laion/train --label-column class
  mpiexec -n 32 vitscale index /data/in1k-wds --label-map imagenet_classes.txt

exit codes: 0 done, 2 wrong input, 3 a tar is damaged or more samples failed than --max-bad allows.
"""


@dataclass
class IndexPlan:
    """What is to be indexed, and how its labels count."""

    names: list[str]
    columns: list[LabelColumn]
    # by column: label -> class
    classes: list[dict[str | int, int]]
    num_inputs: int
    record: dict[str, Any]
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        self.digest = sha256_hex(json_bytes(self.record))

    @property
    def labels(self) -> bytes:
        """The content of labels.json."""
        return json_bytes(labels_json(self.columns))


@dataclass(frozen=True)
class IndexWork:
    """Writes index, ledger and commit record of shards.

    Args:
        uri: Where the shards are.
        label_columns: Members or fields with labels.
        plan: How labels count.
        check: How far images are looked at.
    """

    uri: str
    label_columns: tuple[str, ...]
    plan: IndexPlan
    check: Check

    def __call__(self, number: int) -> dict[str, Any]:
        """Index one shard; give its commit record."""
        storage = open_storage(self.uri)
        name = self.plan.names[number]
        file = RandomFile(f"{self.uri}/{name}")
        rows = Rows(self.plan.columns)
        offsets = []
        for sample in scan_samples(file, self.label_columns):
            key = printable(sample.key)
            origin = f"webdataset:{printable(name)}/{key}"
            labels, problem = self._labels(sample.labels)
            problem = sample.problem or problem
            data = b""
            if sample.image is not None:
                data = file.read(sample.image.offset, sample.image.num_bytes)
            digest = xxhash.xxh3_64_intdigest(data)
            image: Prepared | BadInputError
            try:
                if problem or sample.image is None:
                    raise BadInputError(problem)
                image = self._look(data)
            except BadInputError as error:
                image = error
            ready = Ready(labels, len(data), digest if data else None, image, digest)
            if isinstance(image, BadInputError):
                rows.add_failed(origin, key, ready)
            else:
                assert sample.image is not None
                rows.add_packed(origin, key, ready, image)
                offsets.append(sample.image.offset)
        return self._publish(storage, number, rows, offsets, _sha256_of(file), file.num_bytes)

    def _look(self, data: bytes) -> Prepared:
        header = read_header(data, ImagePolicy("keep"), self.check)
        if self.check == "header" and not header.whole:
            decode_fully(data)
        kind, width, height = header.image_format, header.width, header.height
        return Prepared(data, kind, width, height, kind, width, height, "")

    def _labels(self, values: Sequence[LabelValue]) -> tuple[tuple[tuple[int, ...], ...], str]:
        found: list[tuple[int, ...]] = []
        problem = ""
        for value, classes, column in zip(
            values, self.plan.classes, self.plan.columns, strict=True
        ):
            several = value if isinstance(value, tuple) else (value,)
            own = tuple(sorted({classes.get(label, -1) for label in several}))
            if -1 in own:
                problem = f"bad_label: {value!r} is no class of {column.name!r}"
            found.append(own)
        return tuple(found), problem

    def _publish(
        self,
        storage: Storage,
        number: int,
        rows: Rows,
        offsets: list[int],
        sha256: str,
        num_bytes: int,
    ) -> dict[str, Any]:
        name = self.plan.names[number]
        index, ledger = rows.index_bytes(offsets), rows.ledger_bytes()
        counts = rows.counts()
        if index:
            storage.put(index_name(name), index)
        storage.put(ledger_name(name), ledger)
        record = {
            "version": COMMIT_VERSION,
            "plan_digest": self.plan.digest,
            "number": number,
            "name": name,
            "num_inputs": counts["num_samples"] + counts["num_failed"],
            **counts,
            "num_bytes": num_bytes,
            "sha256": sha256,
            "index_bytes": len(index),
            "index_sha256": sha256_hex(index),
            "ledger_bytes": len(ledger),
            "ledger_sha256": sha256_hex(ledger),
        }
        storage.put(commit_name(number), json_bytes(record))
        return record


def _sha256_of(file: RandomFile) -> str:
    digest = hashlib.sha256()
    for offset in range(0, file.num_bytes, READ_BYTES):
        digest.update(file.read(offset, READ_BYTES))
    return digest.hexdigest()


def index(crew: comm.Crew, args: argparse.Namespace) -> int:
    """Index all shards below a prefix.

    Args:
        crew: Who reads.
        args: Of the command.

    Returns:
        The exit code.

    Raises:
        UserError: There is nothing to index, or a dataset already.
        DataError: A tar is damaged, keys come twice, or too many samples failed.
    """
    storage = open_storage(args.uri)
    if storage.size(MANIFEST_NAME) is not None:
        raise UserError(f"{args.uri} has a {MANIFEST_NAME}: it is a dataset already")
    sizes = storage.sizes()
    names = sorted(name for name in sizes if name.endswith(SHARD_ENDING))
    if not names:
        raise UserError(f"{args.uri} has no {SHARD_ENDING} files; compressed ones are for packing")
    with Lease(storage, "vitscale index"):
        plan = _survey(crew, args, names, [sizes[name] for name in names])
        storage.put(LABELS_NAME, plan.labels)
        records = _index_all(crew, args, storage, plan)
    finish(storage, plan, [records[number] for number in range(len(names))])
    failed = sum(record["num_failed"] for record in records.values())
    print(
        f"indexed {args.uri} num_samples={plan.num_inputs - failed} num_failed={failed} "
        f"num_shards={len(names)} num_classes={len(plan.columns[0].names)}"
    )
    return EXIT_DONE


def _survey(
    crew: comm.Crew, args: argparse.Namespace, names: list[str], sizes: list[int]
) -> IndexPlan:
    """Learn the classes, and that no key comes twice."""
    work = SurveyWork(args.uri, tuple(args.label_column))
    crew.share(work)
    results = crew.map(work, enumerate(names))
    progress = Progress(len(names), "shards", "look at labels")
    surveys: dict[int, Survey] = {}
    for survey in results:
        surveys[survey.number] = survey
        progress.update()
    progress.close()
    ordered = [surveys[number] for number in range(len(names))]
    refuse_doubles(work, names, ordered)
    label_map = load_label_map(args.label_map) if args.label_map else None
    columns, classes = [], []
    for at, name in enumerate(args.label_column or [DEFAULT_COLUMN]):
        values = set().union(*(survey.values[at] for survey in ordered))
        given = label_map if at == 0 else None
        multi = any(survey.multi[at] for survey in ordered)
        known = list(given) if given else class_names(Column(name, multi), values)
        numbers = {text: number for number, text in enumerate(known)}
        found = {value: numbers.get(name_of(value, given) or "", -1) for value in values}
        columns.append(LabelColumn(name, multi, tuple(map(printable, known))))
        classes.append(found)
    record = {
        "settings": {
            "format": "tar",
            "split": args.split,
            "image": {"policy": "keep"},
            "check": args.check,
        },
        "shards": dict(zip(names, sizes, strict=True)),
        "columns": [column.summary() for column in columns],
        "labels_sha256": sha256_hex(json_bytes(labels_json(columns))),
    }
    num_inputs = sum(survey.num_samples for survey in ordered)
    return IndexPlan(names, columns, classes, num_inputs, record)


def _index_all(
    crew: comm.Crew, args: argparse.Namespace, storage: Storage, plan: IndexPlan
) -> dict[int, dict[str, Any]]:
    """Index what is missing; give all commit records."""
    sizes = storage.sizes()
    found = (load_commit(storage, n, plan.digest) for n in range(len(plan.names)))
    records = {record["number"]: record for record in found if record and is_done(record, sizes)}
    missing = [number for number in range(len(plan.names)) if number not in records]
    work = IndexWork(args.uri, tuple(args.label_column), plan, args.check)
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
    add("uri", metavar="URI", help="where the tars are: a path, file:///path or s3://bucket/prefix")
    add("--split", default="train", help="name of the split (default: train)")
    add("--label-column", action="append", default=[], metavar="NAME",
        help="member or JSON field with the label; may be repeated")  # fmt: skip
    add("--label-map", metavar="FILE|URI", help="order of the classes, as for `vitscale pack`")
    add("--check", default="header", choices=["none", "header"],
        help="none: format and size; header: also PNG checksums (default)")  # fmt: skip
    add("--max-bad", type=limit, default=Limit(), metavar="N|P%",
        help="failed samples to accept (default: any)")  # fmt: skip
    add("--workers", type=int, default=cpus, help=f"local processes (default: {cpus}, the CPUs)")
    args = parser.parse_args(argv)
    args.uri = args.uri.removeprefix("file://").rstrip("/")
    return exit_code_of(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if args.workers < 1:
        raise UserError(f"--workers {args.workers}: at least 1")
    # What the others do is shared before any task.
    work = SurveyWork(args.uri, tuple(args.label_column))
    return comm.run(lambda crew: index(crew, args), lambda: work, args.workers)


if __name__ == "__main__":
    raise SystemExit(main())
