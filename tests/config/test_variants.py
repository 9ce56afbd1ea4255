from types import SimpleNamespace

import pytest

from vitscale.config.errors import UserError
from vitscale.config.variants import SIZES, ModelShape, nearest_img_sizes, parse_variant
from vitscale.config.variants import resolve_shape as resolve


def fields(**changes):
    defaults = {
        "variant": "B/16",
        "img_size": 224,
        "embed_dim": None,
        "depth": None,
        "num_heads": None,
        "mlp_dim": None,
        "class_token": True,
        "global_pool": "token",
        "reg_tokens": 0,
        "pos_embed": "learned",
        "pos_embed_at": "stem",
        "no_embed_class": False,
        "block": "serial",
        "mlp": "mlp",
        "patch_drop_rate": 0.0,
    }
    return SimpleNamespace(**(defaults | changes))


def test_sizes_have_the_published_rows():
    rows = {name: (s.depth, s.embed_dim, s.mlp_dim, s.num_heads) for name, s in SIZES.items()}

    assert rows == {
        "mu": (1, 32, 128, 2),
        "Ti": (12, 192, 768, 3),
        "S": (12, 384, 1536, 6),
        "M": (12, 512, 2048, 8),
        "B": (12, 768, 3072, 12),
        "L": (24, 1024, 4096, 16),
        "H": (32, 1280, 5120, 16),
        "So400m": (27, 1152, 4304, 16),
        "g": (40, 1408, 6144, 16),
        "g-opt": (40, 1536, 6144, 16),
        "G": (48, 1664, 8192, 16),
        "G-opt": (48, 1536, 8192, 16),
        "e": (56, 1792, 15360, 16),
    }


@pytest.mark.parametrize("name", SIZES)
def test_resolve_shape_accepts_every_size(name):
    shape = resolve(fields(variant=f"{name}/14"))

    assert (shape.embed_dim, shape.patch_size, shape.num_patches) == (
        SIZES[name].embed_dim,
        14,
        256,
    )


@pytest.mark.parametrize(
    ("variant", "expected"), [("H/14", ("H", 14)), ("So400m/7", ("So400m", 7)), ("g-opt/1", None)]
)
def test_parse_variant_takes_any_positive_patch(variant, expected):
    assert parse_variant(variant) == (expected or ("g-opt", 1))


@pytest.mark.parametrize(
    ("variant", "hint"),
    [
        ("b/16", '"B/16"'),
        ("T/8", '"Ti/8"'),
        ("So400/14", '"So400m/14"'),
        ("B", '"B/16"'),
        ("B/0", '"B/16"'),
        ("B/-2", '"B/16"'),
        ("B/16.0", '"B/16"'),
        ("B/\u00b2", '"B/16"'),
        ("", '"B/16"'),
    ],
)
def test_parse_variant_refuses_with_the_nearest_name(variant, hint):
    with pytest.raises(UserError, match="unknown model variant") as caught:
        parse_variant(variant)

    assert f"nearest: {hint}" in str(caught.value)


def test_resolve_shape_applies_each_override_alone():
    shape = resolve(fields(variant="Ti/4", img_size=12, embed_dim=64, depth=2, num_heads=4))

    assert shape == ModelShape(64, 2, 4, 768, 4, (3, 3), 9, 1, 1)


def test_resolve_shape_without_class_token_has_no_prefix():
    assert resolve(fields(class_token=False, global_pool="avg")).num_prefix_tokens == 0


@pytest.mark.parametrize(
    ("img_size", "patch_size", "sides"),
    [(512, 14, [504, 518]), (225, 16, [224, 240]), (5, 16, [16])],
)
def test_nearest_img_sizes(img_size, patch_size, sides):
    assert nearest_img_sizes(img_size, patch_size) == sides


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"variant": "H/14", "img_size": 512}, ["512", "14", "504 or 518"]),
        ({"embed_dim": 770}, ["770", "12", "768 or 780"]),
        ({"pos_embed": "sincos2d", "embed_dim": 30, "num_heads": 2}, ["multiple of 4", "30"]),
        ({"pos_embed": "sincos2d", "embed_dim": 4, "num_heads": 2}, ["at least 8", "not 4"]),
        ({"class_token": False}, ['global_pool = "token"', 'global_pool = "avg"']),
    ],
    ids=["img_size", "heads", "sincos", "sincos-narrow", "pool"],
)
def test_resolve_shape_refuses_contradictions_with_a_way_out(changes, parts):
    with pytest.raises(UserError) as caught:
        resolve(fields(**changes))

    for part in parts:
        assert part in str(caught.value)


def test_resolve_shape_lists_all_contradictions():
    with pytest.raises(UserError) as caught:
        resolve(fields(img_size=225, num_heads=7, class_token=False))

    assert str(caught.value).count("; ") >= 3
    for part in ("225", "num_heads = 7", "class_token"):
        assert part in str(caught.value)
