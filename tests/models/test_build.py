import subprocess
import sys

import pytest
import torch

from vitscale.config.errors import UserError
from vitscale.config.recipe import ModelConfig
from vitscale.models import create_model


@pytest.mark.parametrize(
    ("name", "variant", "img_size"),
    [
        ("vit_tiny_patch16_384", "Ti/16", 384),
        ("vit_small_patch8_224", "S/8", 224),
        ("vit_medium_patch16_224", "M/16", 224),
        ("vit_base_patch32_448", "B/32", 448),
        ("vit_large_patch14_518", "L/14", 518),
        ("vit_huge_patch14_224", "H/14", 224),
        ("vit_so400m_patch14_224", "So400m/14", 224),
        ("vit_giant_patch14_224", "g/14", 224),
        ("vit_gigantic_patch14_224", "G/14", 224),
        ("B/16", "B/16", 224),
        ("ViT-L/32", "L/32", 224),
    ],
)
def test_create_model_knows_both_sets_of_names(name, variant, img_size):
    with torch.device("meta"):
        model = create_model(name, num_classes=10)

    assert model.config == ModelConfig(variant=variant, img_size=img_size, num_classes=10)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("vit_tiny_r_s16_p8_384", {"variant": "R+Ti/16", "img_size": 384}),
        ("vit_small_r26_s32_224", {"variant": "R26+S/32"}),
        ("vit_base_r50_s16_384", {"variant": "R50+B/16", "img_size": 384}),
        ("R50+ViT-L/32", {"variant": "R50+L/32"}),
        ("R50+L/16", {"variant": "R50+L/16"}),
        ("resnetv2_152x4_bit", {"variant": "R152x4"}),
        ("R26x1", {"variant": "R26x1"}),
        ("deit3_small_patch16_384", {"variant": "S/16", "img_size": 384, "no_embed_class": True,
                                     "init_values": 1e-6}),
        ("vit_base_patch16_siglip_512", {"variant": "B/16", "img_size": 512, "class_token": False,
                                         "global_pool": "map"}),
        ("vit_base_patch14_dinov2", {"variant": "B/14", "img_size": 518, "init_values": 1e-5}),
        ("vit_base_patch14_dinov2_224", {"variant": "B/14", "init_values": 1e-5}),
    ],
)  # fmt: skip
def test_create_model_knows_the_names_of_other_families(name, fields):
    with torch.device("meta"):
        model = create_model(name, num_classes=10)

    assert model.config == ModelConfig(num_classes=10, **fields)


def test_create_model_defaults_are_timms_numerics():
    config = create_model("Ti/16", 1, depth=1).config

    assert (config.act, config.norm_eps) == ("gelu", 1e-6)


def test_create_model_takes_a_config_and_overrides_it():
    config = ModelConfig(variant="mu/8", num_classes=3, img_size=16)

    assert create_model(config).config == config
    changed = create_model(config, num_classes=4, img_size=24, variant="mu/4").config
    assert changed == ModelConfig(variant="mu/4", num_classes=4, img_size=24)


@pytest.mark.parametrize(
    ("args", "changes", "parts"),
    [
        (("B/16", 10), {"drop_rat": 0.1}, ['"drop_rat"', 'did you mean "drop_rate"']),
        (("B/16", 10), {"zzz": 0.1}, ['"zzz"', "img_size"]),
        (("B/16", 10), {"variant": "L/16"}, ["B/16", "L/16", "one of them"]),
        (("B/16", 10), {"drop_rate": 1.5}, ["drop_rate = 1.5"]),
        (("B/16", -1), {}, ["num_classes = -1"]),
        (("B/16",), {}, ["num_classes is not set"]),
        (("vit_bas_patch16_224", 10), {}, ["vit_base_patch16_224"]),
        (("vit_base_patch16_224.augreg_in21k", 10), {}, ["vit_base_patch16_224", "tag"]),
        (("resnet50", 10), {}, ["unknown model"]),
        (("resnetv2_50x1", 10), {}, ["resnetv2_50x1_bit"]),
        (("resnetv2_34x1_bit", 10), {}, ["R34x1", "26, 50"]),
        (("vit_base_r50_s8_224", 10), {}, ["vit_base_r50_s16_384"]),
        (("vit_base_r26_s16_224", 10), {}, ["unknown model"]),
        (("vit_base_patch16_gip_224", 10), {}, ["unknown model"]),
        (("vit_base_patch16", 10), {}, ["vit_base_patch16_224"]),
        (("R34+B/16", 10), {}, ["unknown hybrid", "R50+SIZE/16"]),
        (("R50x1", 10), {"reg_tokens": 4}, ["reg_tokens = 4", "ResNet"]),
        (("", 10), {}, ["unknown model"]),
        (("ViT-b/16", 10), {}, ['"B/16"']),
    ],
)
def test_create_model_refuses_with_a_way_out(args, changes, parts):
    with pytest.raises(UserError) as caught:
        create_model(*args, **changes)

    for part in parts:
        assert part in str(caught.value)


def test_models_package_is_lazy():
    code = "import sys, vitscale.models; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_models_package_has_no_other_names():
    with pytest.raises(ImportError, match="VisionTransformer"):
        from vitscale.models import VisionTransformer  # noqa: F401
