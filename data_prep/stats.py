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
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from vitscale.config.errors import EXIT_DONE, UserError, exit_code_of
from vitscale.data.manifest import Manifest, load_index, load_label_columns, load_manifest
from vitscale.data.order import Order
from vitscale.data.storage import Storage, open_storage
from vitscale.observe.dataset_figure import draw_dataset
from vitscale.observe.progress import Progress

SHOWN = 5
# Bins of the distributions: a factor of 2 each, px and bytes.
SIDE_BINS = 2 ** np.arange(4, 15)
BYTE_BINS = 2 ** np.arange(8, 27)
# Batches of the training order that are drawn for the entropy.
DRAWN_BATCHES = 200
EPILOG = """\
Only indexes and ledgers are read, no image. Entropies are in bits: of the labels of a shard, of a
batch as samples are stored, and of a batch of the training order, each beside what batches drawn at
random would have.

examples:
  vitscale stats /packed/flowers/train
  vitscale stats s3://bucket/in21k/train --out stats/ --batch 4096

exit codes: 0 done, 2 no dataset there, 3 damaged tables, 1 else.
"""


def entropy(labels: npt.NDArray[np.int64]) -> float:
    """Entropy of the labels, bits."""
    counts = np.unique(labels, return_counts=True)[1]
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def collect(storage: Storage, manifest: Manifest, batch: int) -> dict[str, Any]:
    """Count what the tables of a dataset say.

    Args:
        storage: The dataset.
        manifest: Its manifest.
        batch: Samples in a batch, for the entropies.

    Returns:
        What stats.json holds.
    """
    column = load_label_columns(storage, manifest)[0]
    # 16 bytes a sample are held; all else is counted shard by shard.
    labels = np.empty(manifest.num_samples, np.int64)
    hashes = np.empty(manifest.num_samples, np.uint64)
    formats: Counter[str] = Counter()
    sides = {name: np.zeros(len(SIDE_BINS) + 1, np.int64) for name in ("width", "height")}
    sizes = np.zeros(len(BYTE_BINS) + 1, np.int64)
    shard_bits = []
    progress = Progress(manifest.num_shards, "shards", "stats")
    for shard_id in range(manifest.num_shards):
        index = load_index(storage, manifest, shard_id)
        first, last = (int(n) for n in manifest.shards.starts[shard_id : shard_id + 2])
        labels[first:last], hashes[first:last] = index.labels, index.xxh3
        formats.update(index.image_formats)
        for name, values in (("width", index.widths), ("height", index.heights)):
            sides[name] += _histogram(values, SIDE_BINS)
        sizes += _histogram(index.num_bytes, BYTE_BINS)
        if last > first:
            shard_bits.append(entropy(index.labels))
        progress.update()
    progress.close()
    counts = np.bincount(labels + 1, minlength=len(column.names) + 1)
    return {
        "num_samples": manifest.num_samples,
        "num_shards": manifest.num_shards,
        "num_bytes": manifest.num_bytes,
        "label_column": column.name,
        "classes": _classes(counts, column.names),
        "unlabelled": int(counts[0]),
        "formats": dict(formats.most_common()),
        "width": _bins(SIDE_BINS, sides["width"]),
        "height": _bins(SIDE_BINS, sides["height"]),
        "image_bytes": _bins(BYTE_BINS, sizes),
        "label_entropy": _entropies(manifest, labels, shard_bits, batch),
        "duplicates": _duplicates(hashes),
        "ledger": _ledger(storage, manifest),
    }


def _histogram(values: npt.NDArray[Any], bins: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    at = np.searchsorted(bins, values, side="right")
    return np.bincount(at, minlength=len(bins) + 1)


def _bins(bins: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> dict[str, int]:
    names = [f"<{bins[0]}", *(f">={edge}" for edge in bins)]
    return {name: int(count) for name, count in zip(names, counts, strict=True) if count}


def _classes(counts: npt.NDArray[np.int64], names: tuple[str, ...]) -> dict[str, Any]:
    own = counts[1:]
    order = np.argsort(own, kind="stable")
    return {
        "num_classes": len(names),
        "empty": int((own == 0).sum()),
        "min": int(own.min(initial=0)),
        "median": float(np.median(own)) if len(own) else 0.0,
        "max": int(own.max(initial=0)),
        "smallest": {names[at]: int(own[at]) for at in order[:SHOWN]},
        "largest": {names[at]: int(own[at]) for at in order[::-1][:SHOWN]},
        "counts": own.tolist(),
    }


def _entropies(
    manifest: Manifest, labels: npt.NDArray[np.int64], shard_bits: list[float], batch: int
) -> dict[str, float]:
    batch = min(batch, len(labels))
    rng = np.random.default_rng(0)
    step = max(1, len(labels) // batch // DRAWN_BATCHES) * batch
    starts = range(0, len(labels) - batch + 1, step)
    stored = [entropy(labels[start : start + batch]) for start in starts]
    drawn = [entropy(rng.choice(labels, batch, replace=False)) for _ in range(DRAWN_BATCHES)]
    order = Order(manifest.shards.num_samples, seed=0, global_batch=batch)
    steps = range(0, len(labels) // batch, max(1, len(labels) // batch // DRAWN_BATCHES))
    trained = [entropy(labels[order.samples(order.step_positions(k)).sample_index]) for k in steps]
    return {
        "batch": batch,
        "shard": float(np.mean(shard_bits)),
        "batch_as_stored": float(np.mean(stored)),
        "batch_in_training": float(np.mean(trained)),
        "batch_at_random": float(np.mean(drawn)),
    }


def _duplicates(hashes: npt.NDArray[np.uint64]) -> dict[str, int]:
    counts = np.unique(hashes, return_counts=True)[1]
    return {
        "images_stored_more_than_once": int((counts > 1).sum()),
        "samples_to_spare": int((counts - 1).sum()),
    }


def _ledger(storage: Storage, manifest: Manifest) -> dict[str, dict[str, int]]:
    """Count ledger rows by status and reason."""
    found: dict[str, Counter[str]] = {}
    for entry in manifest.ledger:
        data = io.BytesIO(storage.read_bytes(entry["name"]))
        table = pq.read_table(data, columns=["status", "reason"])
        pairs = zip(table["status"].to_pylist(), table["reason"].to_pylist(), strict=True)
        for status, reason in pairs:
            found.setdefault(status, Counter())[reason.partition(":")[0] or "untouched"] += 1
    return {status: dict(counts.most_common()) for status, counts in sorted(found.items())}


def _show(uri: str, stats: dict[str, Any]) -> None:
    classes, bits = stats["classes"], stats["label_entropy"]
    print(f"{uri} num_samples={stats['num_samples']} num_shards={stats['num_shards']} "
          f"mb={stats['num_bytes'] / 1e6:.1f}")  # fmt: skip
    print(
        f"classes of {stats['label_column']}: {classes['num_classes']}, of these "
        f"{classes['empty']} empty; samples a class {classes['min']} / {classes['median']:.0f} / "
        f"{classes['max']} (min / median / max)"
    )
    for kind in ("largest", "smallest"):
        text = ", ".join(f"{name} {count}" for name, count in classes[kind].items())
        print(f"  {kind}: {text}")
    print(f"formats: {', '.join(f'{name} {n}' for name, n in stats['formats'].items())}")
    for name in ("width", "height", "image_bytes"):
        print(f"{name}: {'  '.join(f'{edge}: {n}' for edge, n in stats[name].items())}")
    print(
        f"label entropy, bits: shard {bits['shard']:.3f}, batch of {bits['batch']} as stored "
        f"{bits['batch_as_stored']:.3f}, in training {bits['batch_in_training']:.3f}, at random "
        f"{bits['batch_at_random']:.3f}"
    )
    spare = stats["duplicates"]["samples_to_spare"]
    print(f"doubles: {spare} samples hold bytes that another one holds too")
    for status, reasons in stats["ledger"].items():
        print(f"{status}: {', '.join(f'{word} {n}' for word, n in reasons.items())}")


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
    args = parser.parse_args(argv)
    return exit_code_of(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if args.batch < 1:
        raise UserError(f"--batch {args.batch}: at least 1")
    storage = open_storage(args.uri)
    stats = collect(storage, load_manifest(storage), args.batch)
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
