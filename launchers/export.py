"""Write a checkpoint's weights as one file: `vitscale export --checkpoint RUN --out FILE`."""

import sys

if __package__ in (None, ""):  # started by path: put the checkout, not this folder, on the path
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
from pathlib import Path

from vitscale.config.errors import UserError, exit_code_of

EPILOG = """\
examples:
  vitscale export --checkpoint runs/quickstart-zero2 --out vit.safetensors
  vitscale export --checkpoint runs/quickstart-zero2 --ema --out averaged.safetensors

The file holds float32 tensors under timm's names, and the model's description as metadata. The same
weights give the same bytes: sha256sum tells whether two runs ended in the same place.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="vitscale export",
        description="Write a checkpoint's fp32 weights as one safetensors file.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--checkpoint", required=True, metavar="RUN|STEP_DIR", help="the newest of a run, or one"
    )
    parser.add_argument("--out", required=True, type=Path, help="FILE.safetensors")
    parser.add_argument("--ema", action="store_true", help="the averaged weights")
    parser.add_argument("--to", choices=["timm"], default="timm", help="names of the tensors")
    options = parser.parse_args(argv)
    return exit_code_of(lambda: _export(options.checkpoint, options.out, ema=options.ema))


def _export(source: str, out: Path, *, ema: bool) -> int:
    from vitscale.models.weights import read_safetensors, write_safetensors
    from vitscale.training.checkpoint_folder import find_weights

    if out.suffix != ".safetensors":
        raise UserError(f"--out {out}: the name must end in .safetensors")
    path = find_weights(source, ema=ema)
    weights, metadata = read_safetensors(path)
    if metadata is None:
        raise UserError(f"{path} was not written by vitscale: it does not describe its model")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_safetensors(out, weights, metadata)
    numbers = sum(tensor.numel() for tensor in weights.values())
    print(f"wrote {out}: {len(weights)} tensors, {numbers:,} numbers, from {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
