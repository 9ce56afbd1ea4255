"""`vitscale pack`: labelled images to a sharded dataset on storage."""

import sys

if __package__ in (None, ""):  # started by path: python data_prep/pack.py
    from pathlib import Path

    sys.path[0] = str(
        Path(__file__).resolve().parents[1]
    )  # the checkout's root instead of the script's folder

import argparse
import contextlib
import os
import re

from data_prep import comm, engine
from data_prep.images import ImagePolicy
from data_prep.plan import Settings
from data_prep.writer import ShardWork
from vitscale.config.errors import UserError, exit_code_of

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
DESCRIPTION = """\
Pack labelled images into WebDataset tar shards with indexes, a ledger of every input, a manifest.

The same inputs and settings give the same bytes, whoever does the work. A run that was stopped,
also by kill -9, goes on when the same command is given again. The manifest is written last: it says
that the dataset is complete.
"""
EXAMPLES = """\
sources:
  imagefolder:DIR   one sub-folder a class, sorted by name; every file at any depth below it is an
                    input, its format is found from its content. Not inputs: names that start with a
                    dot, Thumbs.db, desktop.ini, __MACOSX, and files beside the class folders.
  idx:DIR           MNIST or Fashion-MNIST files (*-idx?-ubyte, .gz or not); --split train takes the
                    train files, --split val or test the t10k files.
  digits:PART       scikit-learn's 1,797 digits; PART is train, test (every fifth) or all.

examples:
  vitscale pack --source imagefolder:/data/flowers/train --out /packed/flowers/train
  vitscale pack --source idx:/usr/share/datasets/fashion-mnist --split val --out s3://bucket/fashion
  mpiexec -n 64 vitscale pack --source imagefolder:/data/in21k --out s3://bucket/in21k --max-bad 1%

exit codes: 0 done, 2 wrong input, 3 more inputs failed than --max-bad allows, 1 else.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments; None takes the process's own.

    Returns:
        The exit code.
    """
    # Under MPI every rank would say the same about a wrong flag: only the first does.
    quiet = (comm.launcher_rank() or 0) > 0
    with open(os.devnull, "w") as silence, contextlib.ExitStack() as stack:
        if quiet:
            stack.enter_context(contextlib.redirect_stderr(silence))
            stack.enter_context(contextlib.redirect_stdout(silence))
        args = _parser().parse_args(argv)
    return exit_code_of(lambda: _run(args), quiet=quiet)


def _run(args: argparse.Namespace) -> int:
    settings = Settings(
        split=args.split,
        seed=args.seed,
        shard_bytes=args.shard_bytes,
        check=args.check,
        image=ImagePolicy(args.image, args.side, args.quality),
    )
    work = ShardWork(args.source, settings, args.out)

    def body(crew: comm.Crew) -> int:
        _refuse(args)
        return engine.pack(
            crew, work, args.max_bad, retry_failed=args.retry_failed, dry_run=args.dry_run
        )

    def follow() -> comm.Work:
        work.warm_up()
        return work

    return comm.run(body, follow, args.workers)


def _refuse(args: argparse.Namespace) -> None:
    """Name everything that is wrong with the arguments at once."""
    wrong = []
    if args.format != "tar":
        wrong.append(f"--format {args.format}: only tar is written so far; leave the flag out")
    if args.workers < 1:
        wrong.append(f"--workers {args.workers}: at least 1")
    if args.side < 1:
        wrong.append(f"--side {args.side}: at least 1 px")
    if not 1 <= args.quality <= 100:
        wrong.append(f"--quality {args.quality}: 1 to 100")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", args.split):
        wrong.append(f"--split {args.split!r}: letters, digits, - and _ only")
    if len(set(args.source)) != len(args.source):
        wrong.append("--source: the same source is given twice; each input would be packed twice")
    out = os.path.realpath(os.path.expanduser(args.out.removeprefix("file://")))
    for spec in args.source:
        kind, _, folder = spec.partition(":")
        inside = os.path.realpath(os.path.expanduser(folder.removeprefix("file://")))
        if (
            kind == "imagefolder"
            and not args.out.startswith("s3://")
            and os.path.commonpath([out, inside]) == inside
        ):
            wrong.append(
                f"--out {args.out} lies inside the source {folder}; its files would become inputs"
            )
    if wrong:
        raise UserError("; ".join(wrong))


def _num_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?|)B?", text.strip().upper())
    if not match or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 256MB, 1GiB or 1000000")
    return int(float(match[1]) * UNITS[match[2]])


def _limit(text: str) -> engine.Limit:
    match = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)%", text.strip())
    if not match or (match[2] and float(match[2]) > 100):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of inputs nor a share such as 1%"
        )
    return (
        engine.Limit(count=int(match[1])) if match[1] else engine.Limit(share=float(match[2]) / 100)
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vitscale pack",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    cpus = len(os.sched_getaffinity(0))
    add(
        "--source",
        action="append",
        required=True,
        metavar="KIND:URI",
        help="what to pack; may be repeated",
    )
    add(
        "--out",
        required=True,
        metavar="URI",
        help="where to: a path, file:///path or s3://bucket/prefix",
    )
    add("--split", default="train", help="name of the split (default: train)")
    add(
        "--format",
        default="tar",
        choices=["tar", "arrow"],
        help="kind of shard (default: tar; arrow is to come)",
    )
    add(
        "--shard-bytes",
        type=_num_bytes,
        default=256_000_000,
        metavar="SIZE",
        help="size to aim at (default: 256MB)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="seed of the shuffle that decides the stored order (default: 0)",
    )
    _add_image_flags(parser)
    add(
        "--workers",
        type=int,
        default=cpus,
        help=f"local processes (default: {cpus}, the CPUs); ranks do it under MPI",
    )
    add(
        "--max-bad",
        type=_limit,
        default=engine.Limit(),
        metavar="N|P%",
        help="failed inputs to accept (default: any)",
    )
    add(
        "--retry-failed",
        action="store_true",
        help="write shards with failed inputs anew (before completion)",
    )
    add("--dry-run", action="store_true", help="list the inputs and show the plan, write nothing")
    return parser


def _add_image_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--image",
        default="keep",
        choices=["keep", "resize"],
        help="keep: the input's bytes (default); resize: shorter side at most --side, as JPEG, "
        "EXIF orientation applied; images that are small enough keep their bytes",
    )
    add(
        "--side", type=int, default=512, help="shorter side in px for --image resize (default: 512)"
    )
    add("--quality", type=int, default=90, help="JPEG quality for --image resize (default: 90)")
    add(
        "--check",
        default="header",
        choices=["none", "header", "full"],
        help="none: format and size; header: also the end of the data and PNG checksums (default); "
        "full: decode",
    )


if __name__ == "__main__":
    raise SystemExit(main())
