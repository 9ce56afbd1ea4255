"""Prove from a run's folder what it was fed: `vitscale audit RUN_DIR`."""

import sys

if __package__ in (None, ""):  # started by path: put the checkout, not this folder, on the path
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from vitscale.config.errors import EXIT_DATA, EXIT_DONE, UserError, exit_code_of
from vitscale.config.recipe import RunConfig
from vitscale.data.dataset import Dataset
from vitscale.data.mixture import Mixture
from vitscale.data.quarantine import BadSample
from vitscale.data.replay import EpochCount, Replay, key_hashes
from vitscale.data.train_sets import build_order, open_train_sets
from vitscale.observe.metrics import read_metrics
from vitscale.observe.progress import Progress

EPILOG = """\
examples:
  vitscale audit runs/quickstart-zero2
  vitscale audit runs/h14 --out audit.json

The batches of all steps are built anew from the order and the indexes of the dataset, and compared
with the digests in metrics.jsonl, over all restarts: 8 bytes a sample and a look at every index.
An epoch's columns count samples: fed once, missing, fed twice or more, and in quarantine.
Exit code 0: every finished epoch fed each sample exactly once; 3: it did not, or a step cannot be
proven.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="vitscale audit",
        description="Say for every epoch of a run how often each sample was fed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run")
    parser.add_argument("--out", type=Path, metavar="R.json", help="also write the result there")
    options = parser.parse_args(argv)
    return exit_code_of(lambda: _audit(options))


def _audit(options: argparse.Namespace) -> int:
    config, rows = _run_of(options.run_dir)
    sets = open_train_sets(config.data)
    assert config.batch.global_batch is not None
    manifests = [one.manifest for one in sets]
    order = build_order(config.data, manifests, config.run.seed, config.batch.global_batch)
    if isinstance(order, Mixture):
        order.follow(_state_of(options.run_dir))
    digests = {row["step"]: row["data/digest"] for row in rows}
    replay = Replay(order, _hashes_of(sets), _quarantine_of(options.run_dir))
    wrong = _replayed(replay, digests)
    last = max(digests)
    absent = sorted(set(range(1, last + 1)) - digests.keys())
    counts = replay.counts(last * config.batch.global_batch)
    names = [str(one.name) for one in config.data.train_sets] if len(sets) > 1 else [""]
    _print(counts, names, last, wrong, absent)
    finished = [count for count in counts if count.is_complete]
    is_sound = not wrong and not absent and not any(c.missing or c.twice for c in finished)
    if options.out:
        result = {
            "exactly_once": is_sound,
            "steps": last,
            "wrong_steps": wrong,
            "absent_steps": absent,
            "epochs": [{**vars(count), "dataset": names[count.source]} for count in counts],
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return EXIT_DONE if is_sound else EXIT_DATA


def _run_of(run_dir: Path) -> tuple[RunConfig, list[dict[str, Any]]]:
    try:
        config = RunConfig.model_validate_json((run_dir / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{run_dir} is no run folder: it has no run.json; give the --run-dir of a pretrain or "
            "finetune"
        ) from None
    except ValueError as error:
        raise UserError(f"{run_dir / 'run.json'} is of another release: {error}") from error
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "data/digest" in row]
    if not rows:
        raise UserError(f"{run_dir}: metrics.jsonl has no step yet; there is nothing to audit")
    return config, rows


def _state_of(run_dir: Path) -> dict[str, Any]:
    """Read the order's state from the newest checkpoint: it knows when weights changed."""
    found = sorted(run_dir.glob("checkpoints/step-*/state.json"))
    if not found:
        raise UserError(
            f"{run_dir} mixes datasets and has no checkpoint: the stretches of its weights are not "
            "known; audit it after its first save"
        )
    state: dict[str, Any] = json.loads(found[-1].read_text(encoding="utf-8"))["order"]
    return state


def _quarantine_of(run_dir: Path) -> list[BadSample]:
    path = run_dir / "quarantine.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [BadSample(**json.loads(line)) for line in lines]


def _hashes_of(sets: list[Dataset]) -> Any:
    progress = Progress(sum(one.manifest.num_samples for one in sets), "keys", "audit")
    try:
        return np.concatenate([key_hashes(one, progress.update) for one in sets])
    finally:
        progress.close()


def _replayed(replay: Replay, digests: dict[int, str]) -> list[int]:
    progress = Progress(len(digests), "steps", "audit")
    wrong = []
    try:
        for step, is_right in replay.steps(digests):
            if not is_right:
                wrong.append(step)
            progress.update(1)
    finally:
        progress.close()
    return wrong


def _print(
    counts: list[EpochCount], names: list[str], last: int, wrong: list[int], absent: list[int]
) -> None:
    head = f"{'epoch':>6}{'once':>14}{'missing':>12}{'twice':>12}{'quarantined':>13}"
    print(("dataset  " if len(names) > 1 else "") + head)
    for count in counts:
        name = f"{names[count.source]:<9}" if len(names) > 1 else ""
        numbers = f"{count.epoch:>6}{count.once:>14,}{count.missing:>12,}{count.twice:>12,}"
        note = "" if count.is_complete else "  begun"
        print(f"{name}{numbers}{count.quarantined:>13,}{note}")
    print(f"steps {last}: {last - len(wrong) - len(absent)} proven by their digests")
    for text, steps in (("another batch than was due", wrong), ("no row", absent)):
        if steps:
            shown = ", ".join(map(str, steps[:10])) + (" ..." if len(steps) > 10 else "")
            print(f"  {text}: {len(steps)} steps: {shown}")


if __name__ == "__main__":
    raise SystemExit(main())
