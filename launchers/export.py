"""Write weights for timm, transformers or Google's loaders: `vitscale export --checkpoint RUN`."""

import sys

if __package__ in (None, ""):  # started by path: put the checkout, not this folder, on the path
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitscale.config.errors import UserError, exit_code_of

if TYPE_CHECKING:
    from vitscale.models.weight_files import WeightsFile

EPILOG = """\
examples:
  vitscale export --checkpoint runs/quickstart-zero2 --out vit.safetensors
  vitscale export --checkpoint runs/quickstart-zero2 --ema --out averaged.safetensors
  vitscale export --checkpoint runs/quickstart-zero2 --to hf --out vit-folder
  vitscale export --checkpoint ViT-B_16.npz --out vit.safetensors

--to timm: one safetensors file of float32 tensors under timm's names, and the model's description
as metadata. --to hf: a folder for transformers' ViTForImageClassification. --to npz: Google's
names and layouts. The same weights give the same bytes: sha256sum tells whether two runs ended in
the same place.
"""
# What --out ends in, by --to; hf's is a folder.
SUFFIXES = {"timm": ".safetensors", "npz": ".npz"}


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="vitscale export",
        description="Write a checkpoint's fp32 weights for other programs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="RUN|STEP_DIR|FILE",
        help="the newest of a run, or one; or Google's .npz, or a folder of Hugging Face",
    )
    parser.add_argument(
        "--out", required=True, type=Path, help="FILE.safetensors, FILE.npz, or a new folder for hf"
    )
    parser.add_argument("--ema", action="store_true", help="the averaged weights")
    parser.add_argument(
        "--to", choices=["timm", "hf", "npz"], default="timm", help="names and kind of file"
    )
    options = parser.parse_args(argv)
    return exit_code_of(
        lambda: _export(options.checkpoint, options.out, options.to, ema=options.ema)
    )


def _export(source: str, out: Path, to: str, *, ema: bool) -> int:
    from vitscale.models.build import create_model
    from vitscale.models.weight_files import load_file
    from vitscale.training.init_source import read_source

    suffix = SUFFIXES.get(to)
    if suffix is not None and out.suffix != suffix:
        raise UserError(f"--out {out}: the name must end in {suffix}")
    if to == "hf" and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: is there already; give the name of a new folder")
    path, file = read_source(source, ema=ema)
    if file.model is None:
        raise UserError(
            f"{path} ({file.kind}) does not describe its model; train from it with --init, then "
            "export the run"
        )
    # Through the model, so that every tensor is known to be there, of its shape and finite.
    model = create_model(file.model)
    report = load_file(model, file, new_head=False)
    _write(model.state_dict(), file, out, to)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    print(f"wrote {out}: {numbers:,} parameters, from {path} ({file.kind})\n{report}")
    return 0


def _write(tensors: dict[str, Any], file: "WeightsFile", out: Path, to: str) -> None:
    import json

    from vitscale.config.augment import AugmentConfig
    from vitscale.models.google_names import to_google
    from vitscale.models.hf_names import preprocessor_json, to_hf
    from vitscale.models.npz import write_npz
    from vitscale.models.weights import write_safetensors, write_tensors

    assert file.model is not None
    # Where a file does not say it: the range of transformers' ViT, -1 to 1, which is the default.
    augment = file.augment or AugmentConfig()
    card = file.metadata or _card(file, augment)
    if to == "timm":
        out.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(out, tensors, card)
    elif to == "npz":
        arrays = to_google(tensors, file.model)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_npz(out, arrays)
    else:
        tensors, config = to_hf(tensors, file.model)
        documents = {
            "config.json": config | {"vitscale": card},
            "preprocessor_config.json": preprocessor_json(file.model, augment),
        }
        out.mkdir(parents=True, exist_ok=True)
        for name, document in documents.items():
            (out / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        # The entry that transformers asks for; a second one would have no fixed place.
        write_tensors(out / "model.safetensors", tensors, ("format", "pt"))


def _card(file: "WeightsFile", augment: Any) -> dict[str, Any]:
    """Describe the model of a file that is not ours; its classes are not known."""
    assert file.model is not None
    fields = ("mean", "std", "eval_crop", "eval_crop_ratio", "antialias")
    return {
        "version": 1,
        "model": file.model.model_dump(mode="json"),
        "input": augment.model_dump(mode="json", include=set(fields)),
        "labels_sha256": None,
        "origin": file.kind,
    }


if __name__ == "__main__":
    raise SystemExit(main())
