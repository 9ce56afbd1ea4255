"""Foretell how a run will read a dataset: `vitscale doctor URI --recipe R --nodes N --ranks R`."""

import sys

if __package__ in (None, ""):  # started by path: put the checkout, not this folder, on the path
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from launchers.doctor_checks import CHECKS, Finding, Plan, check_division
from vitscale.config.errors import EXIT_DATA, EXIT_DONE, EXIT_USER, UserError, exit_code_of
from vitscale.config.load import find_config, load_recipe
from vitscale.config.recipe import RunConfig
from vitscale.data.order import Order
from vitscale.data.train_sets import build_order, open_train_sets

EPILOG = """\
examples:
  vitscale doctor /packed/train
  vitscale doctor s3://bucket/imagenet/train --recipe configs/b16.toml --nodes 8 --ranks 64
  vitscale doctor s3://bucket/train --nodes 2 --ranks 16 --rate 20000 --set batch.global_batch=4096

Exit code 0: sound, or warnings only; 2: the run will fail; 3: data are missing or of another size.
"""
# Of the paper's pre-training (arXiv:2010.11929, B.1), where no recipe says anything else.
GLOBAL_BATCH = 4096


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="vitscale doctor",
        description="Foretell how a run will read a dataset, measure its shuffle, find what fails.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("uri", metavar="URI", help="the packed dataset to train on")
    parser.add_argument("--recipe", help="TOML: the settings of the run; default: the defaults")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="override a leaf of the recipe; may be repeated",
    )
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the run (default: 1)")
    parser.add_argument("--ranks", type=int, help="ranks on all nodes (default: one a node)")
    parser.add_argument(
        "--rate", type=float, metavar="IMAGES/S", help="images a second of the whole run"
    )
    parser.add_argument("--out", type=Path, metavar="R.json", help="also write the findings there")
    options = parser.parse_args(argv)
    return exit_code_of(lambda: _examine(options))


def _examine(options: argparse.Namespace) -> int:
    ranks = options.nodes if options.ranks is None else options.ranks
    if min(options.nodes, ranks) < 1 or (options.rate is not None and options.rate <= 0):
        raise UserError("--nodes and --ranks must be at least 1, and --rate above 0")
    config = _recipe(options)
    batch = config.batch.global_batch or GLOBAL_BATCH
    (dataset,) = open_train_sets(config.data)
    order = build_order(config.data, [dataset.manifest], config.run.seed, batch)
    assert isinstance(order, Order)
    manifest = dataset.manifest
    print(
        f"{options.uri}: {manifest.num_samples:,} samples, {len(manifest.shards):,} shards; "
        f"{options.nodes} nodes, {ranks} ranks, global_batch {batch}, {order.lanes} lanes, "
        f"shuffle_block {order.shuffle_block}",
        flush=True,
    )
    found = check_division(batch, config.batch.micro_batch, ranks, options.nodes)
    for finding in found:
        _say(finding)
    if not found:
        plan = Plan(config, dataset, order, options.nodes, ranks, options.rate)
        for check in CHECKS:
            for finding in check(plan):
                _say(finding)
                found.append(finding)
    if options.out:
        rows = [asdict(finding) for finding in found]
        options.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return _verdict(found)


def _recipe(options: argparse.Namespace) -> RunConfig:
    sets = list(options.set)
    if options.recipe is None:
        # What every recipe needs; it has no meaning here.
        sets = ["optim.lr=1.0", 'run.duration="1epochs"', *sets]
    path = None if options.recipe is None else find_config(options.recipe)
    config, problems = load_recipe(path, [*sets, f"data.train={json.dumps(options.uri)}"])
    if problems or config is None:
        raise UserError("\n  ".join(["the recipe cannot be used:", *problems]))
    return config


def _say(finding: Finding) -> None:
    print(f"{finding.level:<8} {finding.subject}: {finding.text}", flush=True)
    if finding.advice:
        print(f"{'':<8} -> {finding.advice}", flush=True)


def _verdict(found: Sequence[Finding]) -> int:
    levels = [finding.level for finding in found]
    if "damage" in levels:
        print("damaged: data are not there as they were packed")
        return EXIT_DATA
    if "failure" in levels:
        print("this run will fail")
        return EXIT_USER
    print("it will run, but see the warnings" if "warning" in levels else "sound")
    return EXIT_DONE


if __name__ == "__main__":
    raise SystemExit(main())
