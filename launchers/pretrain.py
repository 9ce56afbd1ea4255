"""Pre-train a model: `deepspeed launchers/pretrain.py --ds-config configs/zero2.json`."""

import sys

if __package__ in (None, ""):  # started by path: put the checkout, not this folder, on the path
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

from launchers.training_command import TrainingCommand

EPILOG = """\
examples:
  # the quick start: real handwritten digits, trained in minutes on a CPU
  deepspeed launchers/pretrain.py --ds-config configs/zero2.json

  # two ranks on this machine, a shorter run, another folder
  deepspeed --num_gpus 2 launchers/pretrain.py --ds-config configs/zero1.json \\
      --set run.duration=5epochs --run-dir runs/short

  # what would be run: the resolved recipe, batch arithmetic, parameters, memory
  vitscale pretrain --recipe configs/quickstart.toml --dry-run

exit codes: 0 done, 2 wrong input, 3 damaged data, 4 broken numbers, 75 stopped and resumable
"""

COMMAND = TrainingCommand(
    verb="pretrain",
    summary="Train a Vision Transformer from a recipe; the same command resumes it.",
    epilog=EPILOG,
    default_recipe="configs/quickstart.toml",
    new_head=False,
)


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return COMMAND.main(argv)


if __name__ == "__main__":
    raise SystemExit(main())
