from itertools import pairwise

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay

from vitscale.config.errors import UserError
from vitscale.config.recipe import LossConfig, ModelConfig, OptimConfig
from vitscale.models.build import create_model
from vitscale.training.layout import Fragment, Layout
from vitscale.training.muon import orthogonalised
from vitscale.training.optim import build_optimizer, check_offload, layer_scales, param_groups

TINY = ModelConfig(
    variant="Ti/4", img_size=8, num_classes=3, embed_dim=16, depth=1, num_heads=2, mlp_dim=32
)
KERNELS = {
    "patch_embed.proj.weight",
    "blocks.0.attn.qkv.weight",
    "blocks.0.attn.proj.weight",
    "blocks.0.mlp.fc1.weight",
    "blocks.0.mlp.fc2.weight",
    "head.weight",
}


def tiny(**leaves) -> torch.nn.Module:
    return create_model(TINY.model_copy(update=leaves))


def names_by(key: str, model: torch.nn.Module, config: OptimConfig) -> dict[float, set[str]]:
    name_of = {id(p): name for name, p in model.named_parameters()}
    found: dict[float, set[str]] = {}
    for group in param_groups(model, config):
        found.setdefault(group[key], set()).update(name_of[id(p)] for p in group["params"])
    return found


def test_param_groups_decay_kernels_alone():
    names = names_by("weight_decay", tiny(), OptimConfig(lr=1.0, weight_decay=0.1))

    assert names[0.1] == KERNELS
    assert {"pos_embed", "cls_token", "norm.weight", "head.bias"} <= names[0.0]


@pytest.mark.parametrize(
    "leaves",
    [
        {"pos_embed": "learned2d", "pos_embed_at": "every"},
        {"pos_embed": "relative", "pos_embed_at": "every"},
        {"reg_tokens": 2, "init_values": 1e-4, "qk_norm": True},
    ],
)
def test_param_groups_decay_no_table_token_or_scale(leaves: dict):
    assert names_by("weight_decay", tiny(**leaves), OptimConfig(lr=1.0, weight_decay=0.1))[0.1] == (
        KERNELS
    )


def test_param_groups_give_the_head_its_own_decay():
    config = OptimConfig(lr=1.0, weight_decay=0.03, weight_decay_head=3.0)

    names = names_by("weight_decay", tiny(global_pool="map"), config)

    assert names[3.0] == {"head.weight"}
    assert {"attn_pool.kv.weight", "blocks.0.mlp.fc1.weight"} <= names[0.03]
    assert {"attn_pool.latent", "head.bias"} <= names[0.0]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_param_groups_hold_every_trained_parameter_once(name: str):
    model = tiny(pos_embed="sincos2d")
    config = OptimConfig(name=name, lr=1.0, weight_decay_head=1.0, layer_decay=0.5)

    grouped = [id(p) for group in param_groups(model, config) for p in group["params"]]

    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.requires_grad)


def test_layer_scales_are_timms():
    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=3, embed_dim=16, num_heads=2, num_classes=3
    )
    name_of = {id(p): name for name, p in theirs.named_parameters()}
    wanted = {
        name_of[id(param)]: group["lr_scale"]
        for group in param_groups_layer_decay(theirs, layer_decay=0.65)
        for param in group["params"]
    }

    assert layer_scales(tiny(depth=3), 0.65) == pytest.approx(wanted)


def test_layer_scales_place_what_timm_has_not():
    model = tiny(
        depth=2, reg_tokens=1, pos_embed="learned2d", pos_embed_at="every", global_pool="map"
    )
    scales = layer_scales(model, 0.5)

    assert scales["reg_token"] == 0.5**3
    assert scales["block_positions.1.pos_embed_x"] == scales["blocks.1.norm1.bias"] == 0.5
    assert scales["attn_pool.latent"] == scales["head.bias"] == 1.0


def test_muon_takes_the_matrices_of_the_blocks():
    names = names_by("use_muon", tiny(), OptimConfig(name="muon", lr=1.0))

    assert names[True] == {name for name in KERNELS if name.startswith("blocks.")}
    assert {"head.weight", "patch_embed.proj.weight", "cls_token"} <= names[False]


@pytest.mark.parametrize("config", [{"name": "muon"}, {"layer_decay": 0.5}])
def test_a_model_without_blocks_is_refused(config: dict):
    model = torch.nn.Linear(2, 2)

    with pytest.raises(UserError, match="blocks"):
        param_groups(model, OptimConfig(lr=1.0, **config))


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


@pytest.mark.parametrize("shape", [(8, 8), (48, 16), (16, 64)])
def test_orthogonalised_brings_singular_values_near_one(shape: tuple[int, int]):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    values = torch.linalg.svdvals(orthogonalised(matrix).float())

    assert values.min() > 0.5
    assert values.max() < 1.3
    torch.testing.assert_close(orthogonalised(matrix), orthogonalised(matrix * 1024))


def test_fragments_put_a_weight_together():
    weight, sums = torch.arange(10.0), torch.zeros(2, 5)
    for start, end in pairwise((0, 3, 3, 10)):
        flat = torch.cat([torch.full((2,), 7.0), weight[start:end]])
        fragment = Fragment((2, 5), start, 2, end - start)
        layout = Layout({flat: [fragment]})
        (part,) = layout.parts(flat, flat)
        sums += layout.spread(part, fragment)
        assert torch.equal(layout.take(weight.view(2, 5), fragment), part)

    assert torch.equal(sums, weight.view(2, 5))


@pytest.mark.parametrize("name", ["lamb", "adafactor", "muon"])
def test_optimizers_of_whole_weights_refuse_offloading(name: str):
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}

    with pytest.raises(UserError, match=r'"%s".*leave offload_optimizer out' % name):  # noqa: UP031
        check_offload(name, {"zero_optimization": zero})
    check_offload("lion", {"zero_optimization": zero})
    check_offload(name, {"zero_optimization": {"stage": 2}})


@pytest.mark.parametrize(
    ("leaves", "text"),
    [
        ({"schedule": "wsd"}, 'needs optim.cooldown, such as "20%"'),
        ({"schedule": "step"}, "needs optim.drop_at"),
        ({"schedule": "cosine", "cooldown": "5%"}, 'no meaning with optim.schedule = "cosine"'),
        ({"schedule": "linear", "timescale": "5steps"}, "it is for rsqrt"),
        ({"schedule": "step", "drop_at": ["1epochs"], "min_lr": 0.1}, "optim.min_lr = 0.1"),
    ],
)
def test_leaves_of_another_schedule_are_refused(leaves: dict, text: str):
    (problem,) = OptimConfig(lr=1.0, **leaves).problems()

    assert text in problem


def test_leaves_of_the_sigmoid_loss_are_refused_with_softmax():
    (problem,) = LossConfig(multi_hot=True).problems()

    assert "loss.multi_hot = true" in problem
