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
