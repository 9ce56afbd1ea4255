"""Every supported name of timm against timm: names, shapes and numbers of random weights."""

from functools import partial

import pytest
import timm
import torch
from timm.layers import StdConv2d
from timm.models.resnetv2 import ResNetV2

from vitscale.models import create_model

# The paper's, AugReg's, BiT's and DeiT's, and one of every other kind at the least.
# Numbers are compared at full depth, at the name's own image size and at another.
SMALL = {
    "vit_tiny_patch16_224": 96,
    "vit_tiny_patch16_384": 224,
    "vit_small_patch32_224": 128,
    "vit_small_patch16_224": 64,
    "vit_tiny_r_s16_p8_224": 128,
    "vit_tiny_r_s16_p8_384": 96,
    "vit_small_r26_s32_224": 96,
    "deit_tiny_patch16_224": 64,
    "deit3_small_patch16_224": 128,
    "vit_xsmall_patch16_clip_224": 128,
    "vit_pwee_patch16_reg1_gap_256": 128,
    "vit_little_patch16_reg4_gap_256": 128,
    "resnetv2_50x1_bit": 97,
}
# Names and shapes at full depth on the meta device, numbers with two blocks at a small size.
BIG = [
    "flexivit_small",
    "vit_wee_patch16_reg1_gap_256",
    "vit_small_patch32_384",
    "vit_small_patch14_dinov2",
    "vit_small_patch14_reg4_dinov2",
    "vit_small_patch16_384",
    "vit_small_patch8_224",
    "vit_base_patch32_224",
    "vit_base_patch32_384",
    "vit_base_patch16_224",
    "vit_base_patch16_384",
    "vit_base_patch8_224",
    "vit_large_patch32_224",
    "vit_large_patch32_384",
    "vit_large_patch16_224",
    "vit_large_patch16_384",
    "vit_large_patch14_224",
    "vit_huge_patch14_224",
    "vit_giant_patch14_224",
    "vit_gigantic_patch14_224",
    "vit_base_patch16_224_miil",
    "vit_medium_patch16_gap_240",
    "vit_base_patch16_gap_224",
    "vit_huge_patch14_gap_224",
    "vit_base_patch16_plus_240",
    "vit_base_patch16_clip_quickgelu_224",
    "vit_base_patch16_plus_clip_240",
    "vit_large_patch14_clip_336",
    "vit_base_patch16_xp_224",
    "vit_small_patch16_36x1_224",
    "vit_small_patch16_18x2_224",
    "vit_base_patch16_siglip_224",
    "vit_base_patch32_siglip_256",
    "vit_so400m_patch14_siglip_378",
    "vit_so400m_patch16_siglip_gap_256",
    "vit_giant_patch14_reg4_dinov2",
    "vit_base_patch16_reg4_gap_256",
    "vit_betwixt_patch16_reg4_gap_384",
    "vit_so150m_patch16_reg4_map_256",
    "vit_so150m_patch16_reg4_gap_256",
    "vit_so150m2_patch16_reg1_gap_448",
    "vit_intern300m_patch14_448",
    "eva_large_patch14_336",
    "deit_base_patch16_384",
    "deit3_base_patch16_384",
    "deit3_large_patch16_224",
    "deit3_huge_patch14_224",
]
BIG_CONVOLUTIONAL = [
    "vit_small_r26_s32_384",
    "vit_base_r26_s32_224",
    "vit_base_r50_s16_224",
    "vit_base_r50_s16_384",
    "vit_large_r50_s32_224",
    "vit_large_r50_s32_384",
    "resnetv2_50x3_bit",
    "resnetv2_101x1_bit",
    "resnetv2_101x3_bit",
    "resnetv2_152x2_bit",
    "resnetv2_152x4_bit",
]
# What timm has no name for: the paper's other hybrids and BiT's other ResNets.
UNNAMED = {
    "R50+ViT-B/32": ("vit_large_r50_s32_224", {"embed_dim": 768, "depth": 12, "num_heads": 12}),
    "R50+ViT-L/16": ("vit_base_r50_s16_224", {"embed_dim": 1024, "depth": 24, "num_heads": 16}),
}
UNNAMED_BIT = {
    "R26x1": ([2, 2, 2, 2], 1),
    "R50x2": ([3, 4, 6, 3], 2),
    "R152x1": ([3, 8, 36, 3], 1),
    "R200x3": ([3, 24, 36, 3], 3),
}


def shapes(model):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def meta_shapes(make):
    with torch.device("meta"):
        return shapes(make())


def randomised(model):
    """Give every parameter values that matter: fresh heads and scales are near zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.1 if parameter.ndim == 1 else 0.02)
    return model.eval()


def assert_equal_logits(ours, reference, side):
    ours.load_state_dict(randomised(reference).state_dict(), strict=True)
    images = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected, logits = reference(images), ours.eval()(images)
    # The same float32 kernels, in part in another order.
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", SMALL)
def test_small_models_equal_timm_at_two_sizes(name):
    own = timm.get_pretrained_cfg(name).input_size[-1]
    for side in (own, SMALL[name]):
        resize = {} if "resnetv2" in name or side == own else {"img_size": side}
        reference = timm.create_model(name, num_classes=7, **resize)

        ours = create_model(name, num_classes=7, **resize)

        assert_equal_logits(ours, reference, side)


@pytest.mark.parametrize("name", BIG)
def test_big_models_have_timms_names_and_shapes_and_numbers(name):
    side = timm.get_pretrained_cfg(name).input_size[-1]
    with torch.device("meta"):
        full = create_model(name, num_classes=7)

    assert shapes(full) == meta_shapes(lambda: timm.create_model(name, num_classes=7))
    assert full.config.img_size == side
    # Two patches a side, two narrow blocks: everything that is not a length is as in the name.
    small = 2 * full.shape.patch_size
    lengths = {"img_size": small, "embed_dim": 64, "depth": 2, "num_heads": 4}
    reference = timm.create_model(name, num_classes=7, mlp_ratio=4.0, **lengths)
    hidden = 128 if "giant_patch14_reg4" in name else 256
    narrow = create_model(name, num_classes=7, mlp_dim=hidden, **lengths)
    assert_equal_logits(narrow, reference, small)


@pytest.mark.parametrize("name", BIG_CONVOLUTIONAL)
def test_big_convolutional_models_have_timms_names_and_shapes(name):
    expected = meta_shapes(lambda: timm.create_model(name, num_classes=7))

    assert meta_shapes(lambda: create_model(name, num_classes=7)) == expected


def timm_bit(layers, width_factor):
    conv = partial(StdConv2d, eps=1e-8)
    sizes = {"layers": layers, "width_factor": width_factor, "num_classes": 7}
    return ResNetV2(stem_type="fixed", conv_layer=conv, **sizes)


@pytest.mark.parametrize("name", UNNAMED)
def test_hybrids_without_a_timm_name_are_timms_with_other_arguments(name):
    base, changes = UNNAMED[name]
    expected = meta_shapes(lambda: timm.create_model(base, num_classes=7, **changes))

    assert meta_shapes(lambda: create_model(name, num_classes=7)) == expected


@pytest.mark.parametrize("side", [64, 96])
def test_hybrid_with_the_last_stage_moved_equals_timm(side):
    changes = {"img_size": side, "embed_dim": 64, "depth": 1, "num_heads": 4}
    reference = timm.create_model("vit_base_r50_s16_224", num_classes=7, **changes)

    ours = create_model("R50+ViT-B/16", num_classes=7, mlp_dim=256, **changes)

    assert_equal_logits(ours, reference, side)


@pytest.mark.parametrize("name", UNNAMED_BIT)
def test_resnets_without_a_timm_name_are_timms_with_other_arguments(name):
    expected = meta_shapes(lambda: timm_bit(*UNNAMED_BIT[name]))

    assert meta_shapes(lambda: create_model(name, num_classes=7)) == expected
