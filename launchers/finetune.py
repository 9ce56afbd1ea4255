"""Fine-tune trained weights: `deepspeed launchers/finetune.py --ds-config configs/zero2.json`."""

import sys

if __package__ in (None, ""):  # started by path: put the checkout, not this folder, on the path
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

from launchers.training_command import TrainingCommand

EPILOG = """\
examples:
  # after the pre-training quick start: the same digits at a higher resolution
  deepspeed launchers/finetune.py --ds-config configs/zero2.json

  # from any run, checkpoint folder or safetensors file, at 512 px
  vitscale finetune --recipe my.toml --init runs/pretrained --set model.img_size=512

The head is replaced by a new one of zeros for the new classes, and the position table is resized to
the new grid. 512 px fits patches of 16 and 32; for patch 14 take 504 or 518.

exit codes: 0 done, 2 wrong input, 3 damaged data, 4 broken numbers, 75 stopped and resumable
"""

COMMAND = TrainingCommand(
    verb="finetune",
    summary="Fine-tune trained weights with a new head, at any image size the patch divides.",
    epilog=EPILOG,
    default_recipe="configs/quickstart_finetune.toml",
    new_head=True,
)


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return COMMAND.main(argv)


if __name__ == "__main__":
    raise SystemExit(main())
