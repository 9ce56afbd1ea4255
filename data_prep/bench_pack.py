"""`vitscale bench pack`: the packer's speed beside that of other writers, in the same run."""

import sys

if __package__ in (None, ""):  # started by path: python data_prep/bench_pack.py
    from pathlib import Path

    sys.path[0] = str(
        Path(__file__).resolve().parents[1]
    )  # the checkout's root instead of the script's folder

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from data_prep.bench.corpus import MADE, make_images, make_originals
from data_prep.bench.pack_cases import CASES, PEERS, Bench, Folder
from data_prep.bench.pack_report import make_report, text_of
from vitscale.config.errors import EXIT_DONE, UserError, exit_code_of
from vitscale.observe.rounds import measure

DESCRIPTION = """\
Measure the packer and its references side by side.

Every case is a process of its own that first imports and then works under the clock; all cases run
once a round, in random order. Inputs are in memory before, outputs are removed outside the clock.
Rates are images a second, median [min-max]; ratios are medians of the ratios within a round.
"""
EPILOG = """\
examples:
  vitscale bench pack --only keep --rounds 9
  vitscale bench pack --images /data/train --originals /data/photos --out report.json
  python3 -m venv /tmp/mosaic && /tmp/mosaic/bin/pip install mosaicml-streaming
  vitscale bench pack --peer mosaic=/tmp/mosaic/bin/python
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments; None takes the process's own.

    Returns:
        The exit code; 0 also where a target was missed.
    """
    args = _parser().parse_args(argv)
    return exit_code_of(lambda: _run(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vitscale bench pack",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--images", metavar="DIR", help="class folders of JPEGs to keep (default: made ones)")
    add("--originals", metavar="DIR", help="class folders of large JPEGs to make smaller")
    add("--num-images", type=int, default=2000, help="images to make (default: 2000)")
    add("--num-originals", type=int, default=400, help="originals to make (default: 400)")
    add(
        "--memory-images",
        type=int,
        nargs=2,
        default=[2000, 40_000],
        metavar=("FEW", "MANY"),
        help="inputs of the two packs whose memory is compared (default: 2000 40000)",
    )
    add("--rounds", type=int, default=5, help="(default: 5)")
    add(
        "--wait",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long to wait before a case for others to leave the machine (default: 10)",
    )
    add("--seed", type=int, default=0, help="of the order of cases (default: 0)")
    add("--work", metavar="DIR", help="where to write, on the disk to measure (default: temporary)")
    add("--out", metavar="FILE", help="write all figures as JSON")
    add(
        "--only",
        action="append",
        choices=list(CASES),
        help="measure this part; may be repeated (default: all)",
    )
    add(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help=f"interpreter that has one of {', '.join(PEERS)}; may be repeated",
    )
    return parser


def _run(args: argparse.Namespace) -> int:
    peers = _peers(args.peer)
    if min(args.rounds, args.num_images, args.num_originals, *args.memory_images) < 1:
        raise UserError("--rounds and all numbers of images must be at least 1")
    parts = [part for part in CASES if not args.only or part in args.only]
    if args.work:
        Path(args.work).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vitscale-bench-", dir=args.work) as name:
        work = Path(name)
        images, originals = (Folder(work, []) for _ in range(2))
        if set(parts) & {"keep", "scaling", "memory"}:
            images = _folder(args.images, work / "images", make_images, args.num_images)
        if set(parts) & {"resize", "scaling"}:
            made = work / "originals"
            originals = _folder(args.originals, made, make_originals, args.num_originals)
        few, many = args.memory_images
        bench = Bench(work, peers, images, originals, (few, many))
        # A case may belong to two parts.
        cases = {case.name: case for part in parts for case in CASES[part](bench)}
        outcomes = measure(list(cases.values()), args.rounds, work, args.seed, args.wait)
        inputs = {
            "images": _described(args.images, images),
            "originals": _described(args.originals, originals),
        }
        report = make_report(outcomes, list(cases.values()), inputs)
    print(text_of(report))
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"all figures: {args.out}")
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


def _folder(
    given: str | None, place: Path, make: Callable[[Path, int], None], count: int
) -> Folder:
    """Give the user's folder, or make one."""
    if given:
        return Folder.at(Path(given))
    print(f"making {count} {place.name}", flush=True)
    make(place, count)
    return Folder.at(place)


def _described(given: str | None, folder: Folder) -> str:
    if not folder.inputs:
        return "not used"
    text = f"{len(folder.inputs)} files, mean {folder.num_bytes / len(folder.inputs) / 1e3:.0f} kB"
    return f"{text}, {f'of {given}' if given else MADE}"


if __name__ == "__main__":
    raise SystemExit(main())
