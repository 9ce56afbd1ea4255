"""Runs that start from other programs' weights, and DeepSpeed's own folders of every stage."""

import numpy as np
import pytest
import torch

from tests.helpers.runs import CHECKOUT, Commands
from tests.helpers.weight_layouts import google_vit
from vitscale.models.weight_files import is_foreign_folder, read_weights
from vitscale.models.weights import read_safetensors

pytestmark = [pytest.mark.dist, pytest.mark.e2e, pytest.mark.slow]


def pretrain(commands: Commands, recipe: str, stage: int, *leaves: str, **options):
    words = [word for leaf in ("run.duration=2steps", *leaves) for word in ("--set", leaf)]
    ds_config = str(CHECKOUT / "configs" / f"zero{stage}.json")
    run_dir = str(commands.folder / f"zero{stage}")
    return commands.run(
        "pretrain", "--recipe", recipe, "--ds-config", ds_config, "--run-dir", run_dir, *words,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_deepspeeds_own_folder_has_the_weights_of_the_run(
    commands: Commands, tiny_recipe: str, stage: int
):
    precision = "bf16" if stage == 1 else "fp32"
    pretrain(commands, tiny_recipe, stage, f"run.precision={precision}", ranks=2)
    step = commands.folder / f"zero{stage}" / "checkpoints" / "step-00000002"

    found = read_weights(step / "engine").tensors

    assert is_foreign_folder(step / "engine")
    wanted, _ = read_safetensors(step / "weights.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name].float(), tensor) for name, tensor in wanted.items())


def test_a_run_starts_from_googles_file(commands: Commands, tiny_recipe: str):
    np.savez(commands.folder / "w.npz", **google_vit())
    model = [
        "img_size=16",
        "in_chans=3",
        "variant=B/4",
        "embed_dim=32",
        "depth=3",
        "num_heads=4",
        "mlp_dim=64",
    ]
    leaves = [f"model.{leaf}" for leaf in model] + [f"init.source={commands.folder}/w.npz"]

    refused = pretrain(commands, tiny_recipe, 0, *leaves, code=2)
    text = pretrain(commands, tiny_recipe, 0, *leaves, "model.act=gelu_tanh")

    assert 'model.act = "gelu", "gelu_tanh" in the file' in refused
    assert "loaded=44 resized=0 new=0 dropped=0" in text
