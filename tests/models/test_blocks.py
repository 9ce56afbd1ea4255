"""The transformer's options: what each one does, beside being timm's."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vitscale.config.errors import UserError
from vitscale.config.recipe import ModelConfig
from vitscale.models import create_model
from vitscale.models.blocks import Attention
from vitscale.models.layers import DropPath, PatchDropout
from vitscale.training.loop import seed_stochastic_layers

EVERY = {"pos_embed_at": "every"}
# Every option at least once, for what must hold with all of them.
OPTIONS = {
    "registers": {"reg_tokens": 2, "no_embed_class": True},
    "map": {"class_token": False, "global_pool": "map", "head": "mlp"},
    "clip": {"pre_norm": True, "final_norm": False, "act": "quick_gelu"},
    "swiglu": {"mlp": "swiglu", "qk_norm": True, "norm": "rmsnorm", "init_values": 0.1},
    "parallel": {"block": "parallel", "qkv_bias": False, "qk_norm": True, "init_values": 0.1},
    "pairs": {"block": "pairs", "init_values": 0.1},
    "learned-every": EVERY,
    "learned-shared": {"pos_embed_at": "shared"},
    "learned2d": {"pos_embed": "learned2d", "reg_tokens": 1},
    "learned2d-every": {"pos_embed": "learned2d"} | EVERY,
    "learned2d-shared": {"pos_embed": "learned2d", "pos_embed_at": "shared"},
    "relative": {"pos_embed": "relative", "global_pool": "avg"} | EVERY,
    "none": {"pos_embed": "none"},
    "sincos2d": {"pos_embed": "sincos2d", "no_embed_class": True},
    "hybrid": {"variant": "R26+mu/32", "img_size": 64},
    "stem": {"variant": "R+mu/16", "img_size": 64},
    "resnet": {"variant": "R26x1", "img_size": 33},
}


def tiny(**changes):
    fields = {"variant": "mu/4", "img_size": 16, "num_classes": 5, "depth": 3} | changes
    if fields["variant"] == "R26x1":
        del fields["depth"]
    return create_model(ModelConfig(**fields))


def randomised(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.1 if parameter.ndim == 1 else 0.02)
    return model


def pictures(model, count=2):
    side = model.config.img_size
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", OPTIONS)
def test_options_init_reaches_every_number(name):
    model = tiny(**OPTIONS[name])
    before = model.state_dict()
    wanted = {key: value.clone() for key, value in before.items()}
    assert [key for key, value in wanted.items() if not value.isfinite().all()] == []
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(float("nan"))

    model.init_weights()

    for key, value in model.state_dict().items():
        assert value.isfinite().all(), key
        # Constants come back; random ones come back with the deviation that they had.
        torch.testing.assert_close(
            value.std(correction=0), wanted[key].std(correction=0), rtol=0.6, atol=1e-6
        )


@pytest.mark.parametrize("name", OPTIONS)
def test_options_grad_checkpointing_gives_equal_gradients(name):
    drops = {} if name == "resnet" else {"drop_rate": 0.2, "drop_path_rate": 0.3}
    model = randomised(tiny(**OPTIONS[name], **drops)).train()
    images = pictures(model)
    gradients = {}
    for enabled in (False, True):
        model.set_grad_checkpointing(enabled)
        model.zero_grad()
        torch.manual_seed(4)
        model(images).square().sum().backward()
        gradients[enabled] = {key: p.grad.clone() for key, p in model.named_parameters()}

    for key, gradient in gradients[False].items():
        assert torch.equal(gradient, gradients[True][key]), key


@pytest.mark.parametrize("name", OPTIONS)
def test_options_every_parameter_gets_a_gradient(name):
    model = randomised(tiny(**OPTIONS[name])).train()

    model(pictures(model)).square().sum().backward()

    idle = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert idle == []


@pytest.mark.parametrize(
    "name", ["registers", "map", "swiglu", "parallel", "learned2d-every", "relative", "stem"]
)
def test_options_are_captured_whole_by_the_compiler(name):
    drops = {"drop_rate": 0.2, "drop_path_rate": 0.3, "drop_path_growth": "constant"}
    model = randomised(tiny(**OPTIONS[name], **drops, depth=1)).train()
    images = pictures(model)
    seed_stochastic_layers(1)
    expected = model(images)

    # Without code generation, which needs a minute a model; a graph break would be an error.
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    seed_stochastic_layers(1)
    torch.testing.assert_close(compiled(images), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", OPTIONS)
def test_options_run_in_bfloat16(name):
    model = randomised(tiny(**OPTIONS[name]))
    images = pictures(model)
    expected = model(images)

    logits = model.bfloat16()(images.bfloat16())

    assert logits.dtype == torch.bfloat16
    # Three significant digits a number, over a few layers.
    assert (logits.float() - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"pos_embed": "relative"}, ['pos_embed_at = "stem"', "every"]),
        ({"pos_embed": "none"} | EVERY, ['pos_embed_at = "every"', "stem"]),
        ({"pos_embed": "relative", "block": "parallel"} | EVERY, ["relative", "serial"]),
        ({"mlp": "swiglu", "block": "parallel"}, ["plain MLP"]),
        ({"patch_drop_rate": 0.5} | EVERY, ["patch_drop_rate = 0.5", "stem"]),
        ({"embed_dim": 33, "num_heads": 3, "pos_embed": "learned2d"}, ["even embed_dim", "33"]),
        ({"variant": "R50+mu/14"}, ["R50+mu/14", "R50+SIZE/16"]),
        ({"variant": "R34+mu/16"}, ["R34+mu/16", "R26+SIZE/32"]),
        ({"variant": "R50+mu/16", "img_size": 40}, ["40", "32 or 48"]),
        ({"variant": "R+mu/16", "img_size": 48}, ["48", "32 or 64"]),
        ({"variant": "R34x1", "depth": None}, ["R34x1", "26, 50"]),
        ({"variant": "R50x1"}, ["model.depth = 3", "ResNet"]),
        ({"variant": "R50x1", "depth": None, "drop_rate": 0.1, "mlp": "swiglu"},
         ["model.drop_rate = 0.1", "model.mlp"]),
        ({"variant": "R50x1", "depth": None, "global_pool": "map"}, ["averages"]),
    ],
)  # fmt: skip
def test_options_that_contradict_are_refused_with_a_way_out(changes, parts):
    fields = {"variant": "mu/4", "img_size": 16, "num_classes": 5, "depth": 3} | changes

    with pytest.raises(UserError) as caught:
        create_model(ModelConfig(**fields))

    for part in parts:
        assert part in str(caught.value)


def shuffled_patches(images, patch_size):
    """The same patches in another order."""
    patches = F.unfold(images, patch_size, stride=patch_size)
    order = torch.randperm(patches.shape[-1], generator=torch.Generator().manual_seed(5))
    return F.fold(patches[..., order], images.shape[-2:], patch_size, stride=patch_size)


@pytest.mark.parametrize(
    ("name", "blind"),
    [("none", True), ("relative", False), ("learned2d", False), ("learned-every", False),
     ("learned2d-every", False), ("learned2d-shared", False), ("learned-shared", False)],
)  # fmt: skip
def test_positions_make_the_order_of_patches_matter(name, blind):
    model = randomised(tiny(**OPTIONS[name])).eval()
    images = pictures(model)

    difference = (model(images) - model(shuffled_patches(images, 4))).abs().max().item()

    assert (difference < 1e-5) == blind


def test_positions_every_layer_and_shared_enter_before_every_block():
    images = pictures(tiny())
    tokens = {}
    for place in ("every", "shared"):
        model = randomised(tiny(pos_embed_at=place)).eval()
        x = torch.cat([model.cls_token.expand(2, -1, -1), model.patch_embed(images)], dim=1)
        for index, block in enumerate(model.blocks):
            table = model.pos_embed if place == "shared" else model.block_positions[index].pos_embed
            x = block(x + table)
        tokens[place] = x

        torch.testing.assert_close(model.forward_features(images), model.norm(x))

    assert not torch.equal(tokens["every"], tokens["shared"])


def test_positions_2d_are_a_column_and_a_row_side_by_side():
    model = randomised(tiny(pos_embed="learned2d", reg_tokens=1)).eval()
    table = model.pos_embed_2d
    zeros = torch.zeros(1, 2 + 16, 32)

    rows = table(zeros)[0]

    assert not rows[:2].any()
    for row, column in itertools.product(range(4), range(4)):
        expected = torch.cat([table.pos_embed_x[column], table.pos_embed_y[row]])
        assert torch.equal(rows[2 + 4 * row + column], expected)


def test_positions_relative_are_scores_of_query_and_distance():
    torch.manual_seed(0)
    model = tiny(pos_embed="relative", pos_embed_at="every", reg_tokens=1, depth=1)
    attention: Attention = model.blocks[0].attn
    with torch.no_grad():
        attention.relative.pos_embed_rel.normal_()
        attention.qkv.weight.mul_(5)
    x = torch.randn(1, 2 + 16, 32)

    q, k, v = attention.qkv(x).view(1, 18, 3, 2, 16).unbind(2)
    expected = torch.zeros(1, 18, 2, 16)
    for head, i in itertools.product(range(2), range(18)):
        scores = torch.zeros(18)
        for j in range(18):
            key = k[0, j, head]
            if i >= 2 and j >= 2:
                # The distance i - j counts from -(16 - 1).
                key = key + attention.relative.pos_embed_rel[i - j + 15]
            scores[j] = q[0, i, head] @ key / math.sqrt(16)
        expected[0, i, head] = scores.softmax(0) @ v[0, :, head]
    expected = attention.proj(expected.reshape(1, 18, 32))

    torch.testing.assert_close(attention(x), expected)


def test_drop_path_skips_whole_examples_and_keeps_the_mean():
    layer = DropPath(0.25).train()
    torch.manual_seed(0)

    out = layer(torch.ones(20_000, 2, 3))

    values = out.flatten(1)
    assert torch.equal(values, values[:, :1].expand_as(values))
    assert sorted(values.unique().tolist()) == pytest.approx([0, 4 / 3])
    # Deviation of the mean: 0.004.
    assert out.mean().item() == pytest.approx(1, abs=0.015)
    assert torch.equal(layer.eval()(out), out)


def test_drop_path_grows_linearly_or_stays():
    def rates(**changes):
        layers = [m for m in tiny(**changes).modules() if isinstance(m, DropPath)]
        return [layer.drop_prob for layer in layers]

    assert rates(depth=3, drop_path_rate=0.2) == pytest.approx([0.1, 0.1, 0.2, 0.2])
    growth = {"drop_path_growth": "constant"}
    assert rates(depth=2, drop_path_rate=0.2, **growth) == pytest.approx([0.2] * 4)
    assert rates(depth=1, drop_path_rate=0.2) == []
    assert rates(depth=2) == []


def test_drop_path_and_patch_dropout_follow_the_seed_of_the_step():
    model = randomised(tiny(drop_path_rate=0.5, patch_drop_rate=0.5)).train()
    images = pictures(model, 8)
    logits = []
    for key in (11, 11, 12):
        seed_stochastic_layers(key)
        logits.append(model(images))

    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


def test_patch_dropout_keeps_the_prefix_and_the_order():
    layer = PatchDropout(0.25, num_prefix_tokens=2).train()
    x = torch.arange(10.0).view(1, 10, 1).expand(64, -1, 3)
    torch.manual_seed(0)

    out = layer(x)

    assert out.shape == (64, 2 + 6, 3)
    assert (out[:, :2] == x[:, :2]).all()
    assert (out[:, 1:] > out[:, :-1]).all()
    # Every patch is left out of some example, and no two patterns need to be one.
    assert set(out[:, 2:].flatten().tolist()) == set(range(2, 10))
    assert len({tuple(row) for row in out[..., 0].tolist()}) > 10
    assert torch.equal(layer.eval()(x), x)


def test_patch_dropout_leaves_one_patch_at_least():
    assert PatchDropout(0.99, 1).train()(torch.zeros(2, 5, 3)).shape == (2, 2, 3)


def test_layer_scale_starts_every_branch_at_its_value():
    model = tiny(init_values=1e-4, block="pairs")

    gammas = [p for name, p in model.named_parameters() if name.endswith("gamma")]

    assert len(gammas) == 4 * 3
    assert all((gamma == 1e-4).all() for gamma in gammas)


def test_swiglu_starts_as_two_layers_side_by_side():
    torch.manual_seed(0)
    model = create_model("S/16", num_classes=0, depth=1, mlp="swiglu", mlp_dim=1024)

    weight = model.blocks[0].mlp.fc1.weight

    assert weight.shape == (2048, 384)
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (384 + 1024)), rel=0.01)


def test_register_tokens_do_not_start_alike():
    token = tiny(reg_tokens=2).reg_token

    assert 0 < (token[:, 0] - token[:, 1]).abs().max() < 1e-4


def test_hybrid_units_start_as_their_shortcut():
    model = tiny(**OPTIONS["hybrid"])
    unit = model.patch_embed.backbone.stages[0].blocks[1]
    x = torch.rand(1, 256, 4, 4)

    assert torch.equal(unit(x), x)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
