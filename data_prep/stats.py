"""`vitscale stats`: classes, sizes, formats, mixing and doubles of a dataset, from its tables."""

import sys

if __package__ in (None, ""):  # started by path: python data_prep/stats.py
    from pathlib import Path

    sys.path[0] = str(
        Path(__file__).resolve().parents[1]
    )  # the checkout's root instead of the script's folder

import argparse
import io
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_prep.dataset_stats import Doubles, LabelStats, Spread
from vitscale.config.errors import EXIT_DONE, UserError, exit_code_of
from vitscale.data.manifest import (
    Manifest,
    damaged,
    load_index,
    load_label_columns,
    load_manifest,
    sha256_hex,
)
from vitscale.data.storage import Storage, open_storage
from vitscale.data.view import view_of
from vitscale.observe.dataset_figure import draw_dataset
from vitscale.observe.progress import Progress

T = TypeVar("T")
R = TypeVar("R")

# Threads: an index of a bucket is one round trip.
READERS = 16
# What is counted of every image, with the range of its histogram; px, bytes.
IMAGE_FIELDS = {"width": (1, 1 << 17), "height": (1, 1 << 17), "aspect": (1 / 256, 256),
                "num_bytes": (1, 1 << 34)}  # fmt: skip
EPILOG = """\
Only indexes and ledgers are read, no image. Entropies are in bits: of the labels of a shard, of a
batch as samples are stored, and of a batch of the first epoch's training order, each beside what as
many labels drawn at random have. Aspect is width / height.

examples:
  vitscale stats /packed/flowers/train
  vitscale stats s3://bucket/in21k/train --out stats/ --batch 4096
  vitscale stats /packed/web --label-column label --label-column cleaned

exit codes: 0 done, 2 no dataset there, 3 damaged tables, 1 else.
"""


def collect(
    storage: Storage, manifest: Manifest, batch: int, label_columns: list[str]
) -> dict[str, Any]:
    """Count what the tables of a dataset say.

    Args:
        storage: The dataset.
        manifest: Its manifest.
        batch: Samples in a batch, for the entropies.
        label_columns: Whose classes are counted, stored or added; empty takes the first one.

    Returns:
        What stats.json holds.
    """
    stored = {column.name: column for column in load_label_columns(storage, manifest)}
    names = label_columns or list(stored)[:1]
    labels = {
        name: LabelStats(stored[name], manifest.shards.starts, batch)
        for name in names
        if name in stored
    }
    for name in names:
        if name not in stored:
            labels[name] = _added_column(storage, manifest, batch, name)
    spreads = {name: Spread(*limits) for name, limits in IMAGE_FIELDS.items()}
    formats: Counter[str] = Counter()
    doubles = Doubles()
    progress = Progress(manifest.num_shards, "shards", "stats")
    shard_ids = range(manifest.num_shards)
    indexes = _ahead(lambda shard_id: load_index(storage, manifest, shard_id), shard_ids)
    for shard_id, index in enumerate(indexes):
        formats.update(index.image_formats)
        spreads["width"].add(index.widths)
        spreads["height"].add(index.heights)
        spreads["aspect"].add(index.widths / np.maximum(index.heights, 1))
        spreads["num_bytes"].add(index.num_bytes)
        doubles.add(index.xxh3)
        for name, values in index.columns.items():
            if name in labels:
                labels[name].add(shard_id, values)
        progress.update()
    progress.close()
    return {
        "num_samples": manifest.num_samples,
        "num_shards": manifest.num_shards,
        "num_bytes": manifest.num_bytes,
        "labels": {name: labels[name].describe() for name in names},
        "formats": dict(formats.most_common()),
        "images": {name: spread.describe() for name, spread in spreads.items()},
        "duplicates": _duplicates(storage, manifest, doubles),
        "ledger": _ledger(storage, manifest),
    }


def _added_column(storage: Storage, manifest: Manifest, batch: int, name: str) -> LabelStats:
    """Count the classes of a column that was added later; samples without a label are left out."""
    view = view_of(storage, manifest, name)
    stats = LabelStats(load_label_columns(storage, view)[0], view.shards.starts, batch)
    progress = Progress(view.num_shards, "shards", f"stats of {name}")
    indexes = _ahead(lambda shard_id: load_index(storage, view, shard_id), range(view.num_shards))
    for shard_id, index in enumerate(indexes):
        stats.add(shard_id, index.columns[name])
        progress.update()
    progress.close()
    return stats


def _ahead(work: Callable[[T], R], tasks: Iterable[T]) -> Iterator[R]:
    """Give the results in order, with some of the next ones already under way."""
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(READERS) as threads:
        for task in tasks:
            waiting.append(threads.submit(work, task))
            if len(waiting) > 2 * READERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _duplicates(storage: Storage, manifest: Manifest, doubles: Doubles) -> dict[str, Any]:
    counts, largest = doubles.describe()
    examples = []
    for count, samples in largest:
        places = [_place(storage, manifest, sample) for sample in samples]
        examples.append({"num_samples": count, "some": places})
    return {**counts, "largest": examples}


def _place(storage: Storage, manifest: Manifest, sample: int) -> str:
    starts = manifest.shards.starts
    shard_id = int(np.searchsorted(starts, sample, side="right")) - 1
    index = load_index(storage, manifest, shard_id)
    return f"{manifest.shards.names[shard_id]} {index.keys[sample - int(starts[shard_id])]}"


def _ledger(storage: Storage, manifest: Manifest) -> dict[str, dict[str, int]]:
    """Count ledger rows by status and the first word of the reason."""

    def count(entry: dict[str, str]) -> Counter[tuple[str, str]]:
        try:
            data = storage.read_bytes(entry["name"])
        except FileNotFoundError:
            raise damaged(storage.uri, entry["name"], "is missing") from None
        if sha256_hex(data) != entry["sha256"]:
            raise damaged(storage.uri, entry["name"], "has another sha256 than at pack time")
        columns = ["status", "reason"]
        table = pq.read_table(io.BytesIO(data), columns=columns, use_threads=False)
        words = pc.replace_substring_regex(table["reason"], ":.*", "")
        pairs = (
            table.set_column(1, "reason", words).group_by(columns).aggregate([([], "count_all")])
        )
        return Counter({(r["status"], r["reason"]): r["count_all"] for r in pairs.to_pylist()})

    total: Counter[tuple[str, str]] = Counter()
    for own in _ahead(count, manifest.ledger):
        total.update(own)
    found: dict[str, dict[str, int]] = {}
    for (status, word), number in total.most_common():
        found.setdefault(status, {})[word or "untouched"] = number
    return dict(sorted(found.items()))


def _show(uri: str, stats: dict[str, Any]) -> None:
    print(f"{uri} num_samples={stats['num_samples']} num_shards={stats['num_shards']} "
          f"mb={stats['num_bytes'] / 1e6:.1f}")  # fmt: skip
    for name, labels in stats["labels"].items():
        _show_labels(name, labels)
    print(f"formats: {', '.join(f'{name} {n}' for name, n in stats['formats'].items())}")
    words = ("min", "p01", "p10", "median", "p90", "p99", "max", "mean")
    print("images".ljust(10) + "".join(word.rjust(10) for word in words))
    for name, spread in stats["images"].items():
        print(f"  {name:<8}" + "".join(f"{spread[word]:10g}" for word in words))
    doubles = stats["duplicates"]
    print(
        f"doubles: {doubles['samples_to_spare']} samples hold bytes that another one holds too "
        f"({doubles['images_stored_more_than_once']} different images)"
    )
    for group in doubles["largest"]:
        print(f"  {group['num_samples']} times: {', '.join(group['some'])}")
    for status, reasons in stats["ledger"].items():
        print(f"{status}: {', '.join(f'{word} {n}' for word, n in reasons.items())}")


def _show_labels(name: str, labels: dict[str, Any]) -> None:
    print(
        f"classes of {name}: {labels['num_classes']}, of these {labels['empty']} empty; samples a "
        f"class {labels['min']} / {labels['median']:.0f} / {labels['max']} (min / median / max)"
        + (f"; {labels['unlabelled']} samples without one" if labels["unlabelled"] else "")
    )
    for kind in ("largest", "smallest"):
        text = ", ".join(f"{name} {count}" for name, count in labels[kind].items())
        print(f"  {kind}: {text}")
    bits = labels["entropy"]
    if bits:
        print(
            f"  entropy, bits: shard {bits['shard']:.3f} (at random {bits['shard_at_random']:.3f}),"
            f" batch of {bits['batch']} as stored {bits['batch_as_stored']:.3f}, in training "
            f"{bits['batch_in_training']:.3f} (at random {bits['batch_at_random']:.3f})"
        )


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments; None takes the process's own.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="vitscale stats",
        description="Count the classes, sizes and formats of a dataset, and measure its mixing.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "uri", metavar="URI", help="the dataset: a path, file:///path or s3://bucket/prefix"
    )
    parser.add_argument("--out", metavar="DIR", help="write stats.json and stats.png there")
    parser.add_argument(
        "--batch", type=int, default=256, help="samples a batch, for the entropies (default: 256)"
    )
    parser.add_argument(
        "--label-column", action="append", default=[], metavar="NAME",
        help="whose classes are counted, stored or added; may be repeated (default: the first one)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    return exit_code_of(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if args.batch < 1:
        raise UserError(f"--batch {args.batch}: at least 1")
    storage = open_storage(args.uri)
    stats = collect(storage, load_manifest(storage), args.batch, args.label_column)
    _show(args.uri, stats)
    if args.out:
        folder = Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(stats, indent=2, ensure_ascii=False)
        (folder / "stats.json").write_text(text + "\n", encoding="utf-8")
        draw_dataset(stats, folder / "stats.png")
        print(f"written: {folder / 'stats.json'}, {folder / 'stats.png'}")
    return EXIT_DONE


if __name__ == "__main__":
    raise SystemExit(main())
