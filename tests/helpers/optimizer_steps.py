"""Trains a tiny model with every optimizer under every ZeRO stage: started as the ranks of a run.

`optimizer_steps.py FOLDER` writes FOLDER/weights.safetensors with the weights at the end of each
run, uninterrupted and resumed: "PRECISION-STAGE/end|resumed/OPTIMIZER/NAME".
"""

import gc
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from vitscale.config.ds_json import resolve
from vitscale.config.recipe import (
    BatchConfig,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    RunSection,
)
from vitscale.distributed import world_from_env
from vitscale.models.build import create_model
from vitscale.training.engine import Engine, init_distributed
from vitscale.training.losses import build_loss
from vitscale.training.optim import SHAPED

STEPS, SAVED, GLOBAL_BATCH, RANKS = 20, 18, 8, 2
# Sides are 32 and more, so that Adafactor factors, and uneven, so that the ranks' halves cut
# through matrices. No bias of the keys: its gradient is nothing but rounding, of which these
# optimizers make steps of full length.
MODEL = ModelConfig(
    variant="Ti/4", img_size=16, in_chans=1, num_classes=5, embed_dim=32, depth=1, num_heads=2,
    mlp_dim=96, qkv_bias=False,
)  # fmt: skip
SETTINGS = {
    "adamw": {"lr": 1e-3},
    "sgd": {"lr": 0.03},
    "lamb": {"lr": 3e-3, "eps": 1e-6},
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99)},
    "adafactor": {"lr": 1e-3},
    "muon": {"lr": 1e-3, "momentum": 0.95},
}
# Precision, ZeRO stage, optimizer. In bfloat16, stage 1 is a class of DeepSpeed's of its own.
RUNS = [("fp32", stage, name) for stage in range(4) for name in SETTINGS]
RUNS += [("bf16", stage, name) for stage in (0, 1, 2) for name in SHAPED]


def optim_config(name: str) -> OptimConfig:
    """Return an optimizer table; the head decays on its own, and with AdamW the layers differ."""
    layers = {"layer_decay": 0.75} if name == "adamw" else {}
    return OptimConfig(
        name=name, weight_decay=0.05, weight_decay_head=0.5, **layers, **SETTINGS[name]
    )


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pictures and classes of a step's global batch."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randint(256, (GLOBAL_BATCH, 1, 16, 16), generator=generator, dtype=torch.uint8)
    return images, torch.randint(5, (GLOBAL_BATCH,), generator=generator)


def lr_of(step: int, config: OptimConfig) -> float:
    """Return the learning rate of a step: falling, so that setting it is tested, too."""
    return config.lr * (1 - step / STEPS)


def new_model() -> torch.nn.Module:
    """Return the model that every optimizer begins with."""
    torch.manual_seed(0)
    return create_model(MODEL)


def new_engine(name: str, stage: int, precision: str) -> Engine:
    """Return a model under DeepSpeed that has not made a step."""
    world = world_from_env()
    config = RunConfig(
        model=MODEL,
        data=DataConfig(train="unused"),
        loss=LossConfig(name="sigmoid"),
        optim=optim_config(name),
        batch=BatchConfig(global_batch=GLOBAL_BATCH),
        run=RunSection(duration=f"{STEPS}steps", precision=precision),
    )
    ds = {"zero_optimization": {"stage": stage}}
    resolved, problems = resolve(config, ds, world.world_size, "recipe", "json")
    assert resolved is not None, problems
    return Engine(new_model(), resolved, build_loss(config.loss), world)


def train(engine: Engine, steps: range) -> None:
    """Make some steps."""
    share = GLOBAL_BATCH // engine.world.world_size
    own = slice(engine.world.rank * share, (engine.world.rank + 1) * share)
    for step in steps:
        engine.set_lr(lr_of(step, engine.config.optim))
        images, labels = batch_of(step)
        engine.micro_step(images[own], labels[own], torch.arange(GLOBAL_BATCH)[own])


def main() -> None:
    """Run this rank."""
    out = Path(sys.argv[1])
    world = world_from_env()
    init_distributed(world, build_shm_op=False)
    gc.freeze()  # DeepSpeed collects garbage twice a run, through everything that was imported
    found: dict[str, torch.Tensor] = {}
    for precision, stage, name in RUNS:
        engine = new_engine(name, stage, precision)
        train(engine, range(SAVED))
        folder = out / f"{precision}-{stage}-{name}"
        engine.save(folder)
        train(engine, range(SAVED, STEPS))
        again = new_engine(name, stage, precision)
        again.load(folder)
        train(again, range(SAVED, STEPS))
        for key, end in {"end": engine, "resumed": again}.items():
            weights = end.gather_weights()
            found |= {f"{precision}-{stage}/{key}/{name}/{k}": weight for k, weight in weights}
    if world.is_first:
        save_file(found, out / "weights.safetensors")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
