"""`vitscale dedup`: training pictures that are also in a test set, or twice in the training set."""

import sys

if __package__ in (None, ""):  # started by path: python data_prep/dedup.py
    from pathlib import Path

    sys.path[0] = str(
        Path(__file__).resolve().parents[1]
    )  # the checkout's root instead of the script's folder

import argparse
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np

from data_prep import comm
from data_prep.contact_sheet import write_sheets
from data_prep.copies import Copies, Copy
from data_prep.fingerprint import Fingerprints, FingerprintWork
from data_prep.fingerprint_cache import FingerprintCache
from data_prep.groups import Groups
from data_prep.near import ExactIndex, NearIndex, Pairs
from vitscale.config.errors import EXIT_DONE, UserError, exit_code_of
from vitscale.data.dataset import open_dataset
from vitscale.data.exclusion import split_place, write_exclusions
from vitscale.observe.progress import Progress

NEAR_BITS = 8  # chosen with benchmarks/dedup.py
MAX_NEAR_BITS = 32
COSINE = 0.6  # SPEC: copy detection of DINOv2's data, arXiv:2304.07193 appendix A
EPILOG = """\
kinds of match:
  exact      the decoded pixels are the same, whatever the file format
  near       perceptual hashes and colours differ little, also for the mirror image: re-encoded,
             resized and slightly changed copies; never between pictures of one colour
  embedding  features of a model of ours point the same way (--embed): crops, other changes

Nothing is rewritten: --out lists the samples, `vitscale pack --exclude` and the recipe leaf
data.exclude leave them out. With --self, samples that any chain of matches joins are a group, and
the first in stored order is kept; unless it is a copy of a sample of --against: then none is. A
job that was killed goes on from OUT.fingerprints/, which is removed when OUT is written.

examples:
  vitscale dedup --train s3://bucket/in21k/train --against s3://bucket/in1k/val --out x.parquet
  vitscale dedup --train /packed/web --self --near 4 --out twice.parquet --sheet pairs
  vitscale dedup --train /packed/web --against /packed/val --out x.parquet --embed runs/b16
  mpiexec -n 32 vitscale dedup --train /packed/web --against /packed/val --out x.parquet

exit codes: 0 done, 2 wrong input, 3 a picture is damaged, 1 else.
"""


class Comparison:
    """Compares a training set with others and with itself.

    Args:
        crew: Who decodes.
        args: Of the command.
    """

    def __init__(self, crew: comm.Crew, args: argparse.Namespace) -> None:
        self._crew, self._args = crew, args
        uris = [args.train, *args.against]
        self.copies = Copies(uris, [open_dataset(uri) for uri in uris])
        self.train, *self._against = self.copies.datasets
        for uri, dataset in zip(args.against, self._against, strict=True):
            if dataset.manifest.digest == self.train.manifest.digest:
                raise UserError(
                    f"--against {uri} is the training set itself: all of it would be listed; "
                    "--self finds what is in it twice"
                )
        self.bits: int | None = None if args.exact else args.near
        # First sample of every --against set when they are laid end to end, and the total.
        self._bounds = np.cumsum([0, *(len(dataset) for dataset in self._against)])
        self.cache = FingerprintCache(*split_place(args.out))
        # All that is known of the training set: its pixel hashes; everything for --self.
        self.pixels = np.empty((len(self.train), 2), np.uint64)
        self._table = Fingerprints.empty(len(self.train) if args.self else 0)

    def run(self) -> None:
        """Find all copies."""
        others = Fingerprints.empty(int(self._bounds[-1]))
        for number, dataset in enumerate(self._against):
            starts = dataset.manifest.shards.starts + self._bounds[number]
            for shard_id, own in self._fingerprints(number + 1):
                others.put(int(starts[shard_id]), own)
        self._match_against(others)
        groups = Groups()
        if self._args.self:
            self._match_self(groups)
        if self._args.embed:
            self._match_features(groups)

    def _fingerprints(self, number: int) -> Iterator[tuple[int, Fingerprints]]:
        """Give shard_id and fingerprints of a dataset, as they come."""
        manifest = self.copies.datasets[number].manifest
        uri = self.copies.uris[number]
        progress = Progress(manifest.num_samples, "pictures", f"look at {uri}")
        missing = []
        for shard_id in range(manifest.num_shards):
            array = self.cache.load(manifest, shard_id)
            if array is None:
                missing.append(shard_id)
                continue
            progress.update(len(array))
            yield shard_id, Fingerprints.from_array(array)
        if missing:
            work = FingerprintWork(uri)
            self._crew.share(work)
            for shard_id, array in self._crew.map(work, missing):
                self.cache.keep(manifest, shard_id, array)
                progress.update(len(array), copies=len(self.copies))
                yield shard_id, Fingerprints.from_array(array)
        progress.close()

    def _match_against(self, others: Fingerprints) -> None:
        exact = ExactIndex(others.pixels)
        near = None if self.bits is None else NearIndex(others, self.bits)
        starts = self.train.manifest.shards.starts
        for shard_id, own in self._fingerprints(0):
            start = int(starts[shard_id])
            self.pixels[start : start + len(own)] = own.pixels
            if len(self._table):
                self._table.put(start, own)
            self._add("exact", start, exact.search(own.pixels))
            if near is not None:
                self._add("near", start, near.closest(own))

    def _add(self, reason: str, start: int, pairs: Pairs) -> None:
        for row, other, distance in zip(*(array.tolist() for array in pairs), strict=True):
            self._add_one(reason, start + row, other, distance)

    def _add_one(self, reason: str, sample: int, other: int, distance: float) -> None:
        number = int(np.searchsorted(self._bounds, other, side="right"))
        other -= int(self._bounds[number - 1])
        self.copies.add(Copy(sample, reason, distance, number, other))

    def _match_self(self, groups: Groups) -> None:
        table = self._table
        same = ExactIndex(table.pixels).search(table.pixels)
        for sample, first in groups.join(_numbers([same])).items():
            self.copies.add(Copy(sample, "self_exact", 0.0, 0, first))
        if self.bits is None:
            return
        lost = groups.join(_numbers(self._close_pairs(self.bits)))
        rows, firsts = list(lost), list(lost.values())
        views = table.phash[rows, :1] ^ table.phash[firsts]
        distances = np.bitwise_count(views).min(axis=1, initial=64)
        for sample, first, distance in zip(rows, firsts, distances.tolist(), strict=True):
            self.copies.add(Copy(sample, "self_near", distance, 0, first))

    def _close_pairs(self, bits: int) -> Iterator[Pairs]:
        index = NearIndex(self._table, bits)
        yield index.same()
        progress = Progress(len(self._table), "pictures", "compare")
        yield from index.search(self._table, progress.update)
        progress.close()

    def _match_features(self, groups: Groups) -> None:
        args = self._args
        try:
            from vitscale.evaluation.features import FeatureTable, load_embedder
            from vitscale.training.checkpoint_folder import find_weights
        except ImportError as error:
            raise UserError(f"--embed needs torch: {error}; pip install torch") from error
        embedder = load_embedder(str(find_weights(args.embed, ema=False)))
        workers = args.workers if args.workers > 1 else 0
        others = FeatureTable(embedder, int(self._bounds[-1]))
        for number, dataset in enumerate(self._against):
            for samples, features in embedder.embed(dataset, num_workers=workers):
                others.put(samples + int(self._bounds[number]), features)
        table = FeatureTable(embedder, len(self._table))
        progress = Progress(len(self.train), "pictures", "embed")
        for samples, features in embedder.embed(self.train, num_workers=workers):
            found = others.closest(features, args.cosine)
            for row, other, cosine in found:
                self._add_one("embedding", int(samples[row]), other, max(0.0, 1 - cosine))
            if args.self:
                table.put(samples, features)
            progress.update(len(samples), copies=len(self.copies))
        progress.close()
        if args.self:
            lost = groups.join(table.close_pairs(args.cosine))
            for sample, first in lost.items():
                distance = max(0.0, 1 - table.cosine(sample, first))
                self.copies.add(Copy(sample, "self_embedding", distance, 0, first))


def _numbers(pieces: Iterable[Pairs]) -> Iterator[tuple[int, int]]:
    lists = (zip(pairs.row.tolist(), pairs.other.tolist(), strict=True) for pairs in pieces)
    return chain.from_iterable(lists)


def dedup(crew: comm.Crew, args: argparse.Namespace) -> int:
    """Compare the datasets and write the list.

    Args:
        crew: Who decodes.
        args: Of the command.

    Returns:
        The exit code.
    """
    comparison = Comparison(crew, args)
    comparison.run()
    copies = comparison.copies
    about = {
        "near_bits": comparison.bits,
        "self": args.self,
        "cosine": args.cosine if args.embed else None,
        "embed": args.embed,
        "against": {
            uri: dataset.manifest.digest
            for uri, dataset in zip(copies.uris[1:], copies.datasets[1:], strict=True)
        },
    }
    rows = copies.rows(comparison.pixels)
    write_exclusions(args.out, rows, comparison.train.manifest.digest, about)
    comparison.cache.clear()
    for number, counts in copies.counts().items():
        # The training set is named where it was compared with itself.
        if number > 0 or args.self:
            text = " ".join(f"{reason}={count}" for reason, count in sorted(counts.items()))
            print(f"copies of {copies.uris[number]}: {text or 'none'}")
    total = sum(copies.counts().values(), start=Counter())
    text = "".join(f" {reason}={count}" for reason, count in sorted(total.items()))
    print(f"excluded {len(copies)} of {len(comparison.train)} samples{text} out={args.out}")
    if args.sheet and len(copies):
        print(f"pairs to look at: {', '.join(write_sheets(args.sheet, copies))}")
    return EXIT_DONE


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments; None takes the process's own.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="vitscale dedup",
        description="List the samples of a training set that are copies of others.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    cpus = len(os.sched_getaffinity(0))
    add("--train", required=True, metavar="URI", help="the dataset whose samples are listed")
    add(
        "--against",
        action="append",
        default=[],
        metavar="URI",
        help="a dataset that must not occur in it; may be repeated",
    )
    add("--self", action="store_true", help="also copies within the training set; one is kept")
    add("--out", required=True, metavar="FILE", help="the list: a path or s3://bucket/name")
    add("--exact", action="store_true", help="equal pixels only")
    add(
        "--near",
        type=int,
        default=NEAR_BITS,
        metavar="BITS",
        help=f"differing bits of 64 that still are near (default: {NEAR_BITS})",
    )
    add("--embed", metavar="RUN|FILE", help="also compare features of this model")
    add(
        "--cosine",
        type=float,
        default=COSINE,
        help=f"least cosine of a match by features (default: {COSINE})",
    )
    add(
        "--sheet",
        metavar="DIR|FILE.png",
        help="write pictures of the pairs, the farthest first, 180 at most",
    )
    add("--workers", type=int, default=cpus, help=f"local processes (default: {cpus}, the CPUs)")
    args = parser.parse_args(argv)
    return exit_code_of(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if not args.against and not args.self:
        raise UserError("nothing to compare with: give --against URI, or --self")
    if args.workers < 1 or not 0 <= args.near <= MAX_NEAR_BITS:
        raise UserError(f"--workers must be at least 1, --near 0 to {MAX_NEAR_BITS} bits")
    if not 0 < args.cosine <= 1:
        raise UserError(f"--cosine {args.cosine}: above 0, 1 at most")
    # The work of the others is shared before any task.
    return comm.run(lambda crew: dedup(crew, args), lambda: FingerprintWork(""), args.workers)


if __name__ == "__main__":
    raise SystemExit(main())
