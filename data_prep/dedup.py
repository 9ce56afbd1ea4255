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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import comm
from data_prep.contact_sheet import write_sheets
from data_prep.fingerprint import Fingerprints, fingerprint_shard, join
from data_prep.near import Match, find_matches, find_pairs
from vitscale.config.errors import EXIT_DONE, UserError, exit_code_of
from vitscale.data.dataset import Dataset, open_dataset
from vitscale.data.exclusion import exclusions_bytes
from vitscale.data.manifest import load_index
from vitscale.data.storage import open_storage
from vitscale.observe.progress import Progress

NEAR_BITS = 6
COSINE = 0.6  # SPEC: copy detection of DINOv2's data, arXiv:2304.07193 appendix A
EPILOG = """\
kinds of match:
  exact      the decoded pixels are the same, whatever the file format
  near       two perceptual hashes differ in few bits, also for the mirror image: re-encoded,
             resized and slightly changed copies
  embedding  features of a model of ours point the same way (--embed): crops, other changes

Nothing is rewritten: --out lists the samples, `vitscale pack --exclude` and the recipe leaf
data.exclude leave them out.

examples:
  vitscale dedup --train s3://bucket/in21k/train --against s3://bucket/in1k/val --out x.parquet
  vitscale dedup --train /packed/web --self --near 4 --out twice.parquet --sheet pairs
  vitscale dedup --train /packed/web --against /packed/val --out x.parquet --embed runs/b16

exit codes: 0 done, 2 wrong input, 3 a picture is damaged, 1 else.
"""


@dataclass
class FingerprintWork:
    """Takes fingerprints of shards, and matches them where there is something to match.

    Args:
        uri: The dataset.
        others: Fingerprints of the sets to compare with; None gives the shard's own back.
        bits: Of a near match; None for exact ones only.
    """

    uri: str
    others: Fingerprints | None = None
    bits: int | None = None

    def __call__(self, shard_id: int) -> tuple[int, Any]:
        """Give the shard's number with its fingerprints or matches."""
        own = fingerprint_shard(self.uri, shard_id)
        if self.others is None:
            return shard_id, own
        return shard_id, find_matches(own, self.others, self.bits)


@dataclass
class Found:
    """Excluded samples of the training set, the first reason for each."""

    train: Dataset
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, sample: int, reason: str, distance: float, against: str, key: str) -> None:
        """Exclude a sample, unless it is already."""
        self.rows.setdefault(
            sample,
            {"reason": reason, "distance": distance, "against": against, "against_key": key},
        )

    def complete(self) -> list[dict[str, Any]]:
        """Give the rows of the list, with what the indexes know of the samples."""
        manifest = self.train.manifest
        starts = manifest.shards.starts
        by_shard: dict[int, list[int]] = {}
        for sample in sorted(self.rows):
            shard_id = int(np.searchsorted(starts, sample, side="right")) - 1
            by_shard.setdefault(shard_id, []).append(sample)
        rows = []
        for shard_id, samples in by_shard.items():
            index = load_index(self.train.storage, manifest, shard_id)
            for sample in samples:
                at = sample - int(starts[shard_id])
                place = {
                    "shard": manifest.shards.names[shard_id],
                    "key": index.keys[at],
                    "xxh3_64": int(index.xxh3[at]),
                }
                rows.append({**place, **self.rows[sample]})
        return rows


def dedup(crew: comm.Crew, args: argparse.Namespace) -> int:
    """Compare the datasets and write the list.

    Args:
        crew: Who decodes.
        args: Of the command.

    Returns:
        The exit code.
    """
    found = Found(open_dataset(args.train))
    bits = None if args.exact else args.near
    against = [(uri, open_dataset(uri)) for uri in args.against]
    if against:
        _match_against(crew, args, found, against, bits)
    if args.self:
        _match_self(crew, args, found, bits)
    if args.embed:
        _match_features(args, found, against)
    rows = found.complete()
    about = {"near_bits": bits, "self": args.self, "embed": bool(args.embed)}
    data = exclusions_bytes(rows, found.train.manifest.digest, about)
    folder, _, name = args.out.rpartition("/")
    open_storage(folder or ".").put(name, data)
    counts = Counter(row["reason"] for row in rows)
    text = " ".join(f"{reason}={count}" for reason, count in sorted(counts.items()))
    print(f"excluded {len(rows)} of {len(found.train)} samples {text} out={args.out}")
    if args.sheet and rows:
        written = write_sheets(Path(args.sheet), args.train, rows)
        print(f"pairs to look at: {', '.join(map(str, written))}")
    return EXIT_DONE


def _take(crew: comm.Crew, work: FingerprintWork, num_shards: int, label: str) -> list[Any]:
    """Run the work on all shards; give the results in the order of the shards."""
    crew.share(work)
    results = crew.map(work, range(num_shards))
    progress = Progress(num_shards, "shards", label)
    parts: list[Any] = [None] * num_shards
    for shard_id, part in results:
        parts[shard_id] = part
        progress.update()
    progress.close()
    return parts


def _match_against(
    crew: comm.Crew,
    args: argparse.Namespace,
    found: Found,
    against: list[tuple[str, Dataset]],
    bits: int | None,
) -> None:
    parts, origins = [], []
    for number, (uri, dataset) in enumerate(against):
        work = FingerprintWork(uri)
        parts += _take(crew, work, dataset.manifest.num_shards, f"look at {uri}")
        origins += [(number, sample) for sample in range(len(dataset))]
    work = FingerprintWork(args.train, join(parts), bits)
    matches = _take(crew, work, found.train.manifest.num_shards, "compare")
    starts = found.train.manifest.shards.starts
    for shard_id, own in enumerate(matches):
        for match in own:
            number, sample = origins[match.other]
            uri, dataset = against[number]
            at = int(starts[shard_id]) + match.row
            found.add(at, match.reason, match.distance, uri, dataset[sample].key)


def _match_self(crew: comm.Crew, args: argparse.Namespace, found: Found, bits: int | None) -> None:
    work = FingerprintWork(args.train)
    parts = _take(crew, work, found.train.manifest.num_shards, "look at train")
    for match in first_of_groups(find_pairs(join(parts), bits)):
        key = found.train[match.other].key
        found.add(match.row, f"self_{match.reason}", match.distance, args.train, key)


def first_of_groups(pairs: list[Match]) -> list[Match]:
    """Let every pair point to the first member of its group: only that one is kept."""
    parent: dict[int, int] = {}

    def root(row: int) -> int:
        while parent.get(row, row) != row:
            row = parent[row]
        return row

    for pair in pairs:
        one, other = sorted((root(pair.row), root(pair.other)))
        parent[other] = one
    return [pair._replace(other=root(pair.row)) for pair in pairs]


def _match_features(
    args: argparse.Namespace, found: Found, against: list[tuple[str, Dataset]]
) -> None:
    try:
        from vitscale.evaluation.features import closest, load_embedder
        from vitscale.training.checkpoint_folder import find_weights
    except ImportError as error:
        raise UserError(f"--embed needs torch: {error}") from error
    embedder = load_embedder(str(find_weights(args.embed, ema=False)))
    progress = Progress(len(found.train), "pictures", "embed")
    for sample, number, other, cosine in closest(embedder, args.train, args.against):
        if cosine >= args.cosine:
            uri, dataset = against[number]
            found.add(sample, "embedding", 1 - cosine, uri, dataset[other].key)
        progress.update()
    progress.close()


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
    add("--sheet", metavar="DIR", help="write pictures of the pairs, the farthest first")
    add("--workers", type=int, default=cpus, help=f"local processes (default: {cpus}, the CPUs)")
    args = parser.parse_args(argv)
    return exit_code_of(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if not args.against and not args.self:
        raise UserError("nothing to compare with: give --against URI, or --self")
    if args.workers < 1 or not 0 <= args.near <= 32:
        raise UserError("--workers must be at least 1, --near 0 to 32 bits")
    if args.embed and not args.against:
        raise UserError("--embed compares with --against: give one")
    # The first work of the others is shared before any task.
    return comm.run(lambda crew: dedup(crew, args), lambda: FingerprintWork(""), args.workers)


if __name__ == "__main__":
    raise SystemExit(main())
