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
from data_prep.label_map import load_label_map
from data_prep.pack_arguments import make_parser, source_options
from data_prep.plan import Settings
from data_prep.writer import ShardWork
from vitscale.config.errors import UserError, exit_code_of
from vitscale.data.exclusion import load_exclusions

# Threads that hide the time a remote store takes to answer, in each process.
REMOTE_THREADS = 8


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
        args = make_parser().parse_args(argv)
    return exit_code_of(lambda: _run(args), quiet=quiet)


def _run(args: argparse.Namespace) -> int:
    work = make_work(args)

    def body(crew: comm.Crew) -> int:
        _refuse(args)
        return engine.pack(
            crew, work, args.max_bad, retry_failed=args.retry_failed, dry_run=args.dry_run
        )

    def follow() -> comm.Work:
        work.warm_up()
        return work

    return comm.run(body, follow, args.workers)


def make_work(args: argparse.Namespace) -> ShardWork:
    """Build the job that the arguments describe.

    Raises:
        UserError: The label map or the list of excluded images cannot be read.
    """
    excluded = load_exclusions(args.exclude) if args.exclude else None
    settings = Settings(
        split=args.split,
        seed=args.seed,
        shard_bytes=args.shard_bytes,
        check=args.check,
        image=_image_policy(args),
        format=args.format,
        stratify=args.stratify,
        spread=args.spread,
        label_map=load_label_map(args.label_map) if args.label_map else None,
        allow_case_twins=args.allow_case_twins,
        exclude_digest=excluded.digest if excluded else "",
        excluded=frozenset(excluded.xxh3_64.tolist()) if excluded else frozenset(),
    )
    remote = any("://" in spec or spec.startswith("list:") for spec in args.source)
    threads = args.threads or (REMOTE_THREADS if remote else 1)
    options = source_options(args, args.split)
    return ShardWork(args.source, options, settings, args.out, threads)


def _image_policy(args: argparse.Namespace) -> ImagePolicy:
    return ImagePolicy(
        policy=args.image,
        side=args.side,
        edge=args.edge,
        quality=args.quality,
        encoding=args.encoding,
        background=args.background,
        animated=args.animated,
        max_pixels=args.max_pixels,
        max_bytes=args.max_bytes,
        min_side=args.min_side,
        max_aspect=args.max_aspect,
    )


def _refuse(args: argparse.Namespace) -> None:
    """Name everything that is wrong with the arguments at once."""
    wrong = []
    if args.workers < 1:
        wrong.append(f"--workers {args.workers}: at least 1")
    if args.threads < 0:
        wrong.append(f"--threads {args.threads}: at least 0")
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


if __name__ == "__main__":
    raise SystemExit(main())
