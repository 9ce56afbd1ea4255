"""Every optimizer against its reference in one process, and every ZeRO stage against no ZeRO."""

import pytest
import timm.optim
import torch
from safetensors.torch import load_file
from torch import nn

from tests.helpers.optimizer_steps import (
    GLOBAL_BATCH,
    MODEL,
    RANKS,
    RUNS,
    SETTINGS,
    STEPS,
    batch_of,
    lr_of,
    new_model,
    optim_config,
)
from tests.helpers.runs import CHECKOUT, Commands
from vitscale.data.normalise import Normalise
from vitscale.training.losses import sigmoid_loss
from vitscale.training.optim import SHAPED, param_groups

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Weights at the end of all runs; see tests/helpers/optimizer_steps.py."""
    commands = Commands(tmp_path_factory.mktemp("optimizers"))
    script = "../tests/helpers/optimizer_steps"
    try:
        commands.run(script, str(commands.folder), ranks=RANKS, PYTHONPATH=str(CHECKOUT))
    finally:
        commands.close()
    return load_file(commands.folder / "weights.safetensors")


def weights_of(trained: Weights, run: str) -> Weights:
    return {key.removeprefix(run): w for key, w in trained.items() if key.startswith(run)}


def reference_optimizers(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Build the optimizer of torch or timm; several where each takes a part of the model."""
    config = optim_config(name)
    groups = param_groups(model, config)
    if name == "adamw":
        return [torch.optim.AdamW(groups, config.lr, config.betas, config.eps, foreach=False)]
    if name == "sgd":
        return [torch.optim.SGD(groups, config.lr, config.momentum, foreach=False)]
    if name == "lamb":
        return [
            timm.optim.Lamb(
                groups, config.lr, betas=config.betas, eps=config.eps, max_grad_norm=None
            )
        ]
    if name == "lion":
        return [timm.optim.Lion(groups, config.lr, config.betas)]
    if name == "adafactor":
        return [timm.optim.AdafactorBigVision(groups, config.lr, min_dim_size_to_factor=32)]
    matrices = [group for group in groups if group["use_muon"]]
    others = [group for group in groups if not group["use_muon"]]
    return [
        torch.optim.Muon(
            matrices, config.lr, momentum=config.momentum, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, config.lr, config.betas, config.eps),
    ]


def reference_weights(name: str) -> Weights:
    """Train in this process, with the gradients averaged over the same parts of the batch."""
    model = new_model()
    normalise = Normalise((0.5,) * 3, (0.5,) * 3, MODEL.in_chans, "cpu", torch.float32)
    optimizers = reference_optimizers(name, model)
    for step in range(STEPS):
        images, labels = batch_of(step)
        model.zero_grad()
        for part in range(RANKS):
            own = slice(part * GLOBAL_BATCH // RANKS, (part + 1) * GLOBAL_BATCH // RANKS)
            (sigmoid_loss(model(normalise(images[own])), labels[own]) / RANKS).backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr_of(step, optim_config(name)) * group["lr_scale"]
            optimizer.step()
    return {key: param.detach() for key, param in model.named_parameters()}


def assert_equal(found: Weights, wanted: Weights, atol: float) -> None:
    assert found.keys() == wanted.keys()
    for key, weight in wanted.items():
        torch.testing.assert_close(
            found[key], weight, rtol=0, atol=atol, msg=lambda text, key=key: f"{key}: {text}"
        )


def atol_of(name: str) -> float:
    # Adafactor's first moment is in bfloat16, which makes more of a difference in rounding.
    return 3e-5 if name == "adafactor" else 1e-6


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_steps_without_zero_equal_the_reference(name: str, trained: Weights):
    start, found = new_model().state_dict(), weights_of(trained, f"fp32-0/end/{name}/")

    assert_equal(found, reference_weights(name), atol_of(name))
    assert not any(torch.equal(weight, start[key]) for key, weight in found.items())


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_steps_under_zero_equal_those_without(name: str, stage: int, trained: Weights):
    found = weights_of(trained, f"fp32-{stage}/end/{name}/")

    assert_equal(found, weights_of(trained, f"fp32-0/end/{name}/"), atol_of(name))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPED)
def test_steps_in_bfloat16_are_those_of_the_other_class(name: str, trained: Weights):
    found = weights_of(trained, f"bf16-1/end/{name}/")

    assert_equal(found, weights_of(trained, f"bf16-2/end/{name}/"), atol_of(name))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("precision", "stage", "name"), RUNS)
def test_resumed_steps_equal_the_uninterrupted(
    precision: str, stage: int, name: str, trained: Weights
):
    ends = [weights_of(trained, f"{precision}-{stage}/{end}/{name}/") for end in ("resumed", "end")]

    assert_equal(*ends, atol=0.0)
