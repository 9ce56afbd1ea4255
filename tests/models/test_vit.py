import math

import pytest
import timm
import torch
from torch import nn

from vitscale.config.errors import UserError
from vitscale.config.recipe import ModelConfig
from vitscale.models import create_model
from vitscale.models.vit import VisionTransformer

# Logits of the same weights; both sides run the same kernels in float32.
TOLERANCE = 1e-5


def randomised(model):
    """Give every parameter values that matter: fresh heads and class tokens are near zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return model.eval()


@pytest.mark.parametrize(
    ("name", "timm_args", "changes"),
    [
        ("vit_tiny_patch16_224", {}, {}),
        ("vit_small_patch32_224", {}, {}),
        ("vit_base_patch16_224", {}, {}),
        ("vit_tiny_patch16_384", {}, {}),
        (
            "vit_tiny_patch16_224",
            {"global_pool": "avg", "class_token": False, "in_chans": 1},
            {"global_pool": "avg", "class_token": False, "in_chans": 1},
        ),
        (
            "vit_tiny_patch16_224",
            {"global_pool": "avg", "qkv_bias": False, "num_classes": 7},
            {"global_pool": "avg", "qkv_bias": False, "num_classes": 7},
        ),
        ("vit_tiny_patch16_224", {"num_classes": 0}, {"num_classes": 0}),
        (
            "vit_tiny_patch16_224",
            {"act_layer": lambda: nn.GELU(approximate="tanh")},
            {"act": "gelu_tanh"},
        ),
    ],
    ids=["Ti16", "S32", "B16", "Ti16-384", "avg-no-cls", "avg-no-qkv-bias", "headless", "tanh"],
)
def test_vit_equals_timm_both_ways(name, timm_args, changes):
    reference = randomised(timm.create_model(name, **timm_args))
    ours = create_model(name, **({"num_classes": 1000} | changes)).eval()
    generator = torch.Generator().manual_seed(2)
    side = ours.config.img_size
    images = torch.randn(1, ours.config.in_chans, side, side, generator=generator)

    ours.load_state_dict(reference.state_dict(), strict=True)

    with torch.no_grad():
        expected = reference(images)
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(ours(images), expected, atol=TOLERANCE, rtol=0)
        features = ours.forward_features(images)
        torch.testing.assert_close(features, reference.forward_features(images), atol=1e-4, rtol=0)
        torch.testing.assert_close(
            ours.forward_head(features, pre_logits=True),
            reference.forward_head(features, pre_logits=True),
            atol=TOLERANCE,
            rtol=0,
        )
        reference.load_state_dict(randomised(ours).state_dict(), strict=True)
        torch.testing.assert_close(reference(images), ours(images), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "name",
    ["vit_huge_patch14_224", "vit_giant_patch14_224", "vit_gigantic_patch14_224"],
)
def test_vit_names_and_shapes_equal_timm(name):
    with torch.device("meta"):
        ours = create_model(name, num_classes=1000).state_dict()
        reference = timm.create_model(name, num_classes=1000).state_dict()

    assert [(k, v.shape) for k, v in ours.items()] == [(k, v.shape) for k, v in reference.items()]


def tiny(**changes):
    fields = {"variant": "mu/4", "img_size": 16, "num_classes": 5, "depth": 2}
    return VisionTransformer(ModelConfig(**(fields | changes)))


@pytest.mark.parametrize("patch", [1, 3, 7, 20])
def test_vit_takes_any_patch(patch):
    model = tiny(variant=f"mu/{patch}", img_size=3 * patch)

    assert model(torch.zeros(2, 3, 3 * patch, 3 * patch)).shape == (2, 5)


def test_vit_refuses_512_with_patch_14():
    with pytest.raises(UserError, match="504 or 518"):
        create_model("vit_huge_patch14_224", num_classes=1000, img_size=512)


def test_vit_refuses_images_of_another_size():
    with pytest.raises(ValueError, match="20 x 16 px given to a model for 16 x 16"):
        tiny()(torch.zeros(1, 3, 20, 16))


def test_vit_refuses_an_open_number_of_classes():
    with pytest.raises(UserError, match="num_classes is not set"):
        VisionTransformer(ModelConfig())


def test_init_reaches_every_number():
    model = tiny(head="mlp", pos_embed="sincos2d")
    wanted = model.pos_embed.clone()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(float("nan"))

    model.init_weights()

    left = [name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()]
    assert left == []
    assert torch.equal(model.pos_embed, wanted)


def test_init_is_repeated_by_the_seed():
    torch.manual_seed(7)
    first = tiny(head="mlp").state_dict()
    torch.manual_seed(7)
    second = tiny(head="mlp").state_dict()

    assert all(torch.equal(first[name], second[name]) for name in first)


def test_init_materialises_a_meta_model():
    with torch.device("meta"):
        model = tiny(pos_embed="sincos2d")

    model.to_empty(device="cpu").init_weights()

    assert torch.equal(model.pos_embed, tiny(pos_embed="sincos2d").pos_embed)
    assert model(torch.zeros(1, 3, 16, 16)).isfinite().all()


def test_init_has_the_papers_distributions():
    torch.manual_seed(0)
    model = create_model("S/16", num_classes=10, depth=2, head="mlp", head_bias=-10.0)
    state = model.state_dict()

    def has_std(tensor, std):
        # 3 percent: at least 75,000 numbers each.
        assert tensor.std().item() == pytest.approx(std, rel=0.03)
        assert abs(tensor.mean().item()) < 0.02 * std

    has_std(state["pos_embed"], 0.02)
    has_std(state["patch_embed.proj.weight"], math.sqrt(1 / 768))
    cut = 2 * math.sqrt(1 / 768) / 0.8796
    assert 0.95 * cut < state["patch_embed.proj.weight"].abs().max() <= cut
    has_std(state["pre_logits.fc.weight"], math.sqrt(1 / 384))
    for part in state["blocks.0.attn.qkv.weight"].chunk(3):
        has_std(part, math.sqrt(2 / (384 + 384)))
        assert part.abs().max() <= math.sqrt(6 / (384 + 384))
    has_std(state["blocks.0.attn.proj.weight"], math.sqrt(2 / (384 + 384)))
    has_std(state["blocks.0.mlp.fc1.weight"], math.sqrt(2 / (384 + 1536)))
    has_std(state["blocks.0.mlp.fc2.weight"], math.sqrt(2 / (384 + 1536)))
    for name in ("blocks.0.mlp.fc1.bias", "blocks.0.mlp.fc2.bias"):
        assert state[name].std().item() == pytest.approx(1e-6, rel=0.2)
    for name in ("cls_token", "head.weight", "patch_embed.proj.bias", "pre_logits.fc.bias",
                 "blocks.0.attn.qkv.bias", "blocks.0.attn.proj.bias", "norm.bias"):  # fmt: skip
        assert not state[name].any(), name
    assert (state["head.bias"] == -10).all()
    assert (state["blocks.1.norm2.weight"] == 1).all()
    assert not torch.equal(state["blocks.0.attn.qkv.weight"], state["blocks.1.attn.qkv.weight"])


def test_dropout_sits_where_the_paper_has_it():
    model = tiny(drop_rate=0.1, depth=1)
    calls = []
    for name, module in model.named_modules():
        if not list(module.children()) and not isinstance(module, nn.Identity):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))

    model(torch.zeros(1, 3, 16, 16))

    block = ["norm1", "attn.qkv", "attn.proj", "attn.proj_drop", "norm2",
             "mlp.fc1", "mlp.act", "mlp.drop1", "mlp.fc2", "mlp.drop2"]  # fmt: skip
    expected = ["patch_embed.proj", "pos_drop", *(f"blocks.0.{name}" for name in block)]
    assert calls[: len(expected)] == expected
    assert calls[len(expected) :] == ["norm", "head"]
    drops = {name for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    assert drops == {name for name in calls if "drop" in name}


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    model = randomised(tiny(drop_rate=0.5))
    images = torch.randn(1, 3, 16, 16)

    quiet = (model(images), model(images))
    model.train()
    noisy = (model(images), model(images))

    assert torch.equal(*quiet)
    assert not torch.equal(*noisy)


def test_no_dropout_module_without_a_rate():
    assert not any(isinstance(module, nn.Dropout) for module in tiny().modules())


@pytest.mark.parametrize("drop_rate", [0.0, 0.5])
def test_grad_checkpointing_gives_equal_gradients(drop_rate):
    model = randomised(tiny(drop_rate=drop_rate)).train()
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    calls = []
    model.blocks[0].mlp.fc1.register_forward_hook(lambda *_: calls.append(1))
    gradients = {}
    for enabled in (False, True):
        model.set_grad_checkpointing(enabled)
        model.zero_grad()
        torch.manual_seed(4)
        model(images).square().sum().backward()
        gradients[enabled] = {name: p.grad.clone() for name, p in model.named_parameters()}

    assert len(calls) == 3  # the second backward pass ran the block again
    for name, gradient in gradients[False].items():
        assert torch.equal(gradient, gradients[True][name]), name


def test_sincos2d_table_is_stored_but_not_trained():
    model = tiny(pos_embed="sincos2d")

    assert "pos_embed" in model.state_dict()
    assert "pos_embed" not in dict(model.named_parameters())
    images = torch.zeros(1, 3, 16, 16)
    plain = model.forward_features(images)
    model.pos_embed.zero_()
    assert not torch.equal(plain, model.forward_features(images))


def test_pre_logits_is_a_tanh_layer_before_the_head():
    model = randomised(tiny(head="mlp"))
    bare = randomised(tiny())
    bare.load_state_dict(
        {k: v for k, v in model.state_dict().items() if not k.startswith("pre_logits")}
    )
    images = torch.randn(2, 3, 16, 16)

    pooled = bare.forward_head(bare.forward_features(images), pre_logits=True)
    expected = model.head(torch.tanh(model.pre_logits.fc(pooled)))

    torch.testing.assert_close(model(images), expected)
