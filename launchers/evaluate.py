"""Measure a checkpoint: `vitscale evaluate --checkpoint RUN --data URI`."""

import sys

if __package__ in (None, ""):  # started by path: put the checkout, not this folder, on the path
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
from pathlib import Path
from typing import Any

from vitscale.config.errors import UserError, exit_code_of

EPILOG = """\
examples:
  vitscale evaluate --checkpoint runs/quickstart-zero2 --data data/digits/test
  vitscale evaluate --checkpoint model.safetensors --data s3://bucket/imagenet/val --out r.json
  vitscale evaluate --checkpoint runs/quickstart-zero2 --data data/digits/test --ema
  vitscale evaluate --checkpoint runs/b16 --data /packed/val --label-column cleaned

The model and the way its input is made come with the weights. Accuracies are fractions of 1.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="vitscale evaluate",
        description="Measure top-1, top-5 and loss of a checkpoint on a packed dataset.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--checkpoint", required=True, metavar="RUN|STEP_DIR|FILE", help="what is measured"
    )
    parser.add_argument("--data", required=True, metavar="URI", help="the packed dataset")
    parser.add_argument(
        "--label-column", metavar="NAME", help="stored or added label column; default: the first"
    )
    parser.add_argument(
        "--exclude", metavar="FILE", help="leave out the samples of this list (vitscale dedup)"
    )
    parser.add_argument("--ema", action="store_true", help="take the averaged weights")
    parser.add_argument(
        "--metrics", help="comma-separated names out of top1,top5,loss; all if absent"
    )
    parser.add_argument("--out", type=Path, metavar="R.json", help="also write the result there")
    parser.add_argument("--batch", type=int, default=64, help="pictures at a time")
    parser.add_argument("--num-workers", type=int, default=2, help="reader processes")
    parser.add_argument(
        "--any-classes", action="store_true", help="accept a dataset with another class list"
    )
    parser.add_argument("--device", help="cpu or cuda; the accelerator if there is one")
    options = parser.parse_args(argv)
    return exit_code_of(lambda: _evaluate(options))


METRICS = ("top1", "top5", "loss")


def _evaluate(options: argparse.Namespace) -> int:
    wanted = options.metrics.split(",") if options.metrics else list(METRICS)
    unknown = [name for name in wanted if name not in METRICS]
    if unknown:
        raise UserError(f"--metrics: no {', '.join(unknown)}; there are {', '.join(METRICS)}")
    if options.batch < 1 or options.num_workers < 0:
        raise UserError("--batch must be at least 1 and --num-workers at least 0")
    result = _measure(options)
    result = {name: result[name] for name in (*wanted, "num_samples")}
    for name, value in result.items():
        print(f"{name:<12}{value:>12,}" if isinstance(value, int) else f"{name:<12}{value:>12.4f}")
    print(json.dumps(result))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 0


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from vitscale.config.recipe import AugmentConfig, DataConfig, ModelConfig
    from vitscale.data.loader import build_eval_loader
    from vitscale.data.manifest import load_manifest
    from vitscale.data.normalise import Normalise
    from vitscale.data.storage import open_storage
    from vitscale.data.view import check_trainable, view_of
    from vitscale.evaluation.classification import evaluate_classification
    from vitscale.models.build import create_model
    from vitscale.models.weights import load_weights, read_safetensors
    from vitscale.observe.progress import Progress
    from vitscale.training.checkpoint_folder import find_weights

    path = find_weights(options.checkpoint, ema=options.ema)
    weights, metadata = read_safetensors(path)
    if metadata is None:
        raise UserError(f"{path} was not written by vitscale: it does not describe its model")
    storage = open_storage(options.data)
    manifest = view_of(storage, load_manifest(storage), options.label_column, options.exclude)
    check_trainable(options.data, manifest)
    model_config = ModelConfig.model_validate_json(json.dumps(metadata["model"]))
    if manifest.labels_sha256 != metadata["labels_sha256"]:
        text = f"{options.data} does not have the classes that the model was trained on"
        if not options.any_classes:
            raise UserError(f"{text}; if label numbers mean the same all the same: --any-classes")
        print(f"warning: {text}", file=sys.stderr)
    if manifest.num_classes > (model_config.num_classes or 0):
        raise UserError(
            f"{options.data} has {manifest.num_classes} classes, "
            f"the model {model_config.num_classes}"
        )
    augment = AugmentConfig.model_validate_json(json.dumps(metadata["input"]))
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = create_model(model_config).to(device).eval()
    load_weights(model, weights, new_head=False)
    normalise = Normalise(augment.mean, augment.std, model_config.in_chans, device, torch.float32)
    batches = build_eval_loader(
        DataConfig(train=options.data, num_workers=options.num_workers),
        augment,
        storage,
        manifest,
        img_size=model_config.img_size,
        in_chans=model_config.in_chans,
        rank=0,
        world_size=1,
        micro_batch=options.batch,
        pin_memory=device.type == "cuda",
    )
    progress = Progress(len(batches), "batches", "evaluate")

    def forward(images: torch.Tensor) -> torch.Tensor:
        progress.update()
        logits: torch.Tensor = model(normalise(images))
        return logits

    result = evaluate_classification(forward, batches, None)
    progress.close()
    return result


if __name__ == "__main__":
    raise SystemExit(main())
