"""`vitscale show`: look at a dataset and at single samples of it."""

import sys

if __package__ in (None, ""):  # started by path: python data_prep/show.py
    from pathlib import Path

    sys.path[0] = str(
        Path(__file__).resolve().parents[1]
    )  # the checkout's root instead of the script's folder

import argparse
import io
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vitscale.config.errors import EXIT_DONE, UserError, exit_code_of
from vitscale.data.dataset import Dataset, Sample, open_dataset
from vitscale.data.label_columns import LabelColumn
from vitscale.data.label_sidecar import list_sidecars
from vitscale.data.manifest import damaged, load_index

SHOWN_CLASSES = 5
# A look shall not read the tables of a large dataset: `vitscale stats` does.
COUNTED_SHARDS = 32
EPILOG = """\
examples:
  vitscale show /packed/flowers/train
  vitscale show s3://bucket/flowers/train --num 8 --save /tmp/look
  vitscale show /packed/flowers/train --key 000000042
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments; None takes the process's own.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="vitscale show",
        description="Show what a packed dataset is, and some of its samples.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "uri", metavar="URI", help="the dataset: a path, file:///path or s3://bucket/prefix"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--key", metavar="K", help="show the sample with this key")
    which.add_argument("--num", type=int, default=4, help="show the first N samples (default: 4)")
    parser.add_argument(
        "--label-column", metavar="NAME", help="take this column first, stored or added"
    )
    parser.add_argument(
        "--save", metavar="DIR", help="also write the shown images there, as KEY.jpg and so on"
    )
    args = parser.parse_args(argv)
    return exit_code_of(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if args.num < 0:
        raise UserError(f"--num {args.num}: 0 or more")
    dataset = open_dataset(args.uri, args.label_column)
    columns = dataset.label_columns
    manifest = dataset.manifest
    print(
        f"{args.uri} split={manifest.split} format={manifest.format} "
        f"num_samples={manifest.num_samples} "
        f"num_classes={manifest.num_classes} num_shards={manifest.num_shards} "
        f"mb={manifest.num_bytes / 1e6:.1f} "
        f"num_failed={manifest.num_failed} num_excluded={manifest.num_excluded} "
        f"image={manifest.image['policy']} digest={manifest.digest[:16]}"
    )
    for column in columns:
        kind = "several classes a sample" if column.multi else "one class a sample"
        print(f"label column={column.name} num_classes={len(column.names)} ({kind})")
    added = [name for name in list_sidecars(dataset.storage) if name not in _names(columns)]
    if added:
        print(f"added columns, for --label-column: {', '.join(added)}")
    if args.key is not None:
        samples = iter([_find(dataset, args.key)])
    else:
        _count(dataset, columns)
        samples = _first(dataset, args.num)
    for sample in samples:
        print(
            f"key={sample.key} {_labels(sample, columns)} shard={sample.shard} "
            f"offset={sample.offset} format={sample.image_format} num_bytes={len(sample.image)}"
        )
        if args.save:
            _save(sample, Path(args.save))
    return EXIT_DONE


def _names(columns: list[LabelColumn]) -> list[str]:
    return [column.name for column in columns]


def _count(dataset: Dataset, columns: list[LabelColumn]) -> None:
    """Count classes and formats of the first shards, and why inputs failed."""
    manifest = dataset.manifest
    counts = {column.name: np.zeros(len(column.names), np.int64) for column in columns}
    formats: Counter[str] = Counter()
    shown = min(manifest.num_shards, COUNTED_SHARDS)
    for shard_id in range(shown):
        index = load_index(dataset.storage, manifest, shard_id)
        formats.update(index.image_formats)
        for column in columns:
            values = index.columns[column.name]
            flat = (pc.list_flatten(values) if column.multi else values).to_numpy()
            counts[column.name] += np.bincount(flat[flat >= 0], minlength=len(column.names))
    which = "" if shown == manifest.num_shards else f" in the first {shown} shards (all: stats)"
    for column in columns:
        own = counts[column.name]
        order = np.argsort(-own, kind="stable")[:SHOWN_CLASSES]
        text = ", ".join(f"{column.names[at]} {own[at]}" for at in order)
        more = f", and {len(own) - SHOWN_CLASSES} more" if len(own) > SHOWN_CLASSES else ""
        print(f"classes of {column.name}{which}: {text}{more}")
    print(f"formats{which}: {', '.join(f'{name} {n}' for name, n in formats.most_common())}")
    if manifest.num_failed:
        _count_failures(dataset)


def _count_failures(dataset: Dataset) -> None:
    ledger = dataset.manifest.ledger[:COUNTED_SHARDS]
    words: Counter[str] = Counter()
    for entry in ledger:
        try:
            data = dataset.storage.read_bytes(entry["name"])
        except FileNotFoundError:
            raise damaged(dataset.storage.uri, entry["name"], "is missing") from None
        table = pq.read_table(io.BytesIO(data), columns=["status", "reason"], use_threads=False)
        failed = table.filter(pc.equal(table["status"], "failed"))["reason"].to_pylist()
        words.update(reason.partition(":")[0] for reason in failed)
    which = "" if len(ledger) == len(dataset.manifest.ledger) else f" of {len(ledger)} shards"
    counts = ", ".join(f"{word} {count}" for word, count in words.most_common())
    print(f"failed inputs{which}: {counts or 'none'}")


def _labels(sample: Sample, columns: list[LabelColumn]) -> str:
    """Write the labels of a sample in all columns, with the names of the classes."""
    parts = []
    for column in columns:
        value = sample.labels[column.name]
        several = value if isinstance(value, list) else [value]
        names = [column.names[label] if label >= 0 else None for label in several]
        shown: object = names if column.multi else names[0]
        parts.append(f"{column.name}={value} class={shown!r}")
    return " ".join(parts)


def _first(dataset: Dataset, num: int) -> Iterator[Sample]:
    return islice(dataset, num) if num > 0 else iter(())


def _find(dataset: Dataset, key: str) -> Sample:
    start = 0
    for shard_id in range(dataset.manifest.num_shards):
        keys = load_index(dataset.storage, dataset.manifest, shard_id).keys
        if key in keys:
            return dataset[start + keys.index(key)]
        start += len(keys)
    raise UserError(
        f"{dataset.storage.uri} has no sample {key!r}; keys look like {dataset[0].key!r}, and an "
        "input that failed "
        "has a row in the ledger only"
    )


def _save(sample: Sample, folder: Path) -> None:
    # Keys of others may hold folders.
    path = folder / f"{sample.key.lstrip('/')}.{sample.image_format}"
    if ".." in path.parts:
        raise UserError(f"key {sample.key!r} names a place outside {folder}; --save cannot take it")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(sample.image)


if __name__ == "__main__":
    raise SystemExit(main())
