import pytest
import torch

from vitscale.config.recipe import ModelConfig, OptimConfig
from vitscale.models.build import create_model
from vitscale.training.optim import build_optimizer, param_groups

TINY = ModelConfig(
    variant="Ti/4", img_size=8, num_classes=3, embed_dim=16, depth=1, num_heads=2, mlp_dim=32
)


def names_by_decay(model: torch.nn.Module) -> dict[float, set[str]]:
    name_of = {id(p): name for name, p in model.named_parameters()}
    groups = param_groups(model, 0.1)
    return {g["weight_decay"]: {name_of[id(p)] for p in g["params"]} for g in groups}


def test_param_groups_decay_kernels_alone():
    names = names_by_decay(create_model(TINY))

    assert names[0.1] == {
        "patch_embed.proj.weight",
        "blocks.0.attn.qkv.weight",
        "blocks.0.attn.proj.weight",
        "blocks.0.mlp.fc1.weight",
        "blocks.0.mlp.fc2.weight",
        "head.weight",
    }
    assert {"pos_embed", "cls_token", "norm.weight", "head.bias"} <= names[0.0]


def test_param_groups_hold_every_trained_parameter_once():
    model = create_model(TINY, pos_embed="sincos2d")

    grouped = [id(p) for group in param_groups(model, 0.1) for p in group["params"]]

    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.requires_grad)


def test_adamw_decay_is_multiplied_by_the_learning_rate():
    model = torch.nn.Linear(2, 2, bias=False)
    before = model.weight.detach().clone()
    optimizer = build_optimizer(model, OptimConfig(lr=0.5, weight_decay=0.1), fused=False)
    model.weight.grad = torch.zeros_like(model.weight)

    optimizer.step()

    torch.testing.assert_close(model.weight.detach(), before * (1 - 0.5 * 0.1))


def test_sgd_follows_the_momentum_rule():
    model = torch.nn.Linear(1, 1, bias=False)
    start = model.weight.item()
    config = OptimConfig(name="sgd", lr=0.1, momentum=0.9)
    optimizer = build_optimizer(model, config, fused=False)

    for _ in range(2):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()

    assert model.weight.item() == pytest.approx(start - 0.1 - 0.1 * 1.9)
