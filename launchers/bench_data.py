"""`vitscale bench data`: the loader's speed beside its limit and other loaders, in the same run."""

import sys

if __package__ in (None, ""):  # started by path: put the checkout, not this folder, on the path
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from launchers.bench import order_simulation
from launchers.bench.loader_parts import PARTS, PEERS, TAIL_BATCHES, WARM_BATCHES, Bench
from launchers.bench.loader_report import make_report, text_of
from launchers.bench.pictures import from_dataset, from_folder
from vitscale.config.errors import EXIT_DONE, UserError, exit_code_of
from vitscale.observe.rounds import measure

DESCRIPTION = """\
Measure the training loader, its limit and other loaders side by side.

Every case is a process of its own that first starts and then gives batches under the clock; all
cases run once a round, in random order. Rates are images a second, median [min-max]; ratios are
medians of the ratios within a round. With --order-only, the order of a run of any size is checked
and measured, without data.
"""
EPILOG = """\
examples:
  vitscale bench data --images /data/train
  vitscale bench data --data s3://bucket/train --only breakdown --rounds 1
  python3 -m venv /tmp/dali && /tmp/dali/bin/pip install nvidia-dali-cuda130
  vitscale bench data --images /data/train --peer dali=/tmp/dali/bin/python --out report.json
  vitscale bench data --images /data/train --only memory
  vitscale bench data --order-only --samples 1000000000 --shards 400000 --ranks 4096 --workers 8
"""
# What is measured when nothing is asked for.
USUAL = ("speed", "fidelity", "breakdown", "resume")


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments; None takes the process's own.

    Returns:
        The exit code; 0 also where a target was missed.
    """
    args = _parser().parse_args(argv)
    return exit_code_of(lambda: _order(args) if args.order_only else _loader(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vitscale bench data",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    inputs = parser.add_mutually_exclusive_group()
    inputs.add_argument("--images", metavar="DIR", help="class folders of JPEGs; packed here")
    inputs.add_argument("--data", metavar="URI", help="a packed dataset of JPEGs")
    add("--num-images", type=int, default=4000, help="of an epoch (default: 4000)")
    add("--workers", type=int, default=2, help="processes of every loader (default: 2)")
    add("--batch", type=int, default=64, help="(default: 64)")
    add("--rounds", type=int, default=5, help="(default: 5)")
    add(
        "--wait",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long to wait before a case for others to leave the machine (default: 10)",
    )
    add("--seed", type=int, default=0, help="of the order of cases, and of --order-only")
    add("--work", metavar="DIR", help="where to write (default: temporary)")
    add("--out", metavar="FILE", help="write all figures as JSON")
    add(
        "--only",
        action="append",
        choices=list(PARTS),
        help=f"measure this part; may be repeated (default: {', '.join(USUAL)})",
    )
    add(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help=f"interpreter that has one of {', '.join(PEERS)}; may be repeated",
    )
    add(
        "--small-samples",
        type=int,
        default=100_000,
        metavar="N",
        help="small pictures packed for resume and memory (default: 100000)",
    )
    add(
        "--memory-batches",
        type=int,
        default=100_000,
        metavar="N",
        help="batches over which memory is watched (default: 100000)",
    )
    _add_order(parser)
    return parser


def _add_order(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the order alone").add_argument
    add("--order-only", action="store_true", help="check and measure the order, without data")
    add("--samples", type=int, default=1_000_000_000, help="(default: 1000000000)")
    add("--shards", type=int, default=400_000, help="of uneven size (default: 400000)")
    add("--ranks", type=int, default=4096, help="(default: 4096)")
    add("--ranks-per-node", type=int, default=8, help="(default: 8)")
    add("--global-batch", type=int, help="(default: eight a rank)")
    add("--lanes", type=int, help="data.lanes (default: as many as nodes)")


def _order(args: argparse.Namespace) -> int:
    setting = order_simulation.Setting(
        samples=args.samples,
        shards=args.shards,
        ranks=args.ranks,
        ranks_per_node=args.ranks_per_node,
        workers=args.workers,
        global_batch=args.global_batch,
        lanes=args.lanes,
        seed=args.seed,
    )
    report = order_simulation.simulate(setting.resolved())
    print(order_simulation.text_of(report))
    _write(args.out, report)
    return EXIT_DONE


def _loader(args: argparse.Namespace) -> int:
    parts = args.only or USUAL
    counts = (args.rounds, args.workers, args.batch, args.small_samples, args.memory_batches)
    if min(counts) < 1:
        raise UserError(
            "--rounds, --workers, --batch, --small-samples and --memory-batches must be at least 1"
        )
    least = (WARM_BATCHES + TAIL_BATCHES + 1) * args.batch
    if args.num_images < least:
        raise UserError(
            f"--num-images {args.num_images} with --batch {args.batch}: {WARM_BATCHES} batches "
            f"before the clock starts and {TAIL_BATCHES} after it stops need {least} at least"
        )
    if not args.images and not args.data:
        raise UserError("give --images DIR, --data URI, or --order-only")
    peers = _peers(args.peer)
    if args.work:
        Path(args.work).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vitscale-bench-", dir=args.work) as name:
        work = Path(name)
        take, given = (from_folder, args.images) if args.images else (from_dataset, args.data)
        pictures = take(given, args.num_images, work)
        bench = Bench(
            work,
            pictures,
            peers,
            args.workers,
            args.batch,
            args.small_samples,
            args.memory_batches,
        )
        cases = [case for part in PARTS if part in parts for case in PARTS[part](bench)]
        outcomes = measure(cases, args.rounds, work, args.seed, args.wait)
        report = make_report(outcomes, cases, {"pictures": pictures.described})
    print(text_of(report))
    _write(args.out, report)
    return EXIT_DONE


def _peers(texts: list[str]) -> dict[str, str]:
    peers = {}
    for text in texts:
        name, mark, python = text.partition("=")
        if name not in PEERS or not mark:
            raise UserError(f"--peer {text!r}: write NAME=PYTHON with NAME one of {list(PEERS)}")
        if shutil.which(python) is None:
            raise UserError(f"--peer {text!r}: there is no program {python!r}")
        peers[name] = python
    return peers


def _write(path: str | None, report: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"all figures: {path}")


if __name__ == "__main__":
    raise SystemExit(main())
