"""Google's .npz against timm's own loader, both ways."""

from functools import partial

import numpy as np
import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

from tests.helpers.weight_layouts import bit_resnet, google_hybrid, google_vit
from vitscale.config.errors import UserError
from vitscale.models import create_model
from vitscale.models.google_names import from_google, to_google
from vitscale.models.npz import read_npz, write_npz
from vitscale.models.weight_files import load_file, read_weights

SIZE = {"embed_dim": 32, "depth": 3, "num_heads": 4, "mlp_ratio": 2.0}


def timm_vit(**fields):
    fields = {"img_size": 16, "patch_size": 4, "num_classes": 10} | SIZE | fields
    act = partial(torch.nn.GELU, approximate="tanh")
    return VisionTransformer(act_layer=act, **fields).eval()


def ours(path):
    """Build the model that the file says it is."""
    file = read_weights(path)
    model = create_model(file.model).eval()
    load_file(model, file, new_head=False)
    return model


def numbers(model, side=16):
    images = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(3)) * 2 - 1
    with torch.inference_mode():
        return model(images)


def assert_same(first, second, side=16, tolerance=1e-5):
    theirs = second.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in first.state_dict().items())
    a, b = numbers(first, side), numbers(second, side)
    assert a.abs().max() > 0.05
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


LAYOUTS = {
    "augreg": ({}, {}),
    "opt-target": ({"prefix": "opt/target/"}, {}),
    "big-vision": ({"style": "big_vision", "prefix": "params/"}, {"no_embed_class": True}),
    "big-vision-bare": ({"style": "big_vision"}, {"no_embed_class": True}),
    "big-vision-scan-gap": (
        {"style": "big_vision", "prefix": "params/", "scan": True, "cls": False},
        {"class_token": False, "global_pool": "avg", "fc_norm": False},
    ),
    "big-vision-map": (
        {"style": "big_vision", "prefix": "params/", "cls": False, "pool": "map"},
        {"class_token": False, "global_pool": "map"},
    ),
    "siglip": (
        {"style": "big_vision", "prefix": "params/img/", "cls": False, "pool": "map", "classes": 0},
        {"class_token": False, "global_pool": "map", "num_classes": 0},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_vit_gives_the_logits_of_timms_loader(tmp_path, name):
    layout, fields = LAYOUTS[name]
    np.savez(tmp_path / "w.npz", **google_vit(**layout))
    theirs = timm_vit(**fields)
    theirs.load_pretrained(str(tmp_path / "w.npz"))

    assert_same(ours(tmp_path / "w.npz"), theirs)


@pytest.mark.parametrize(
    ("units", "variant", "img_size", "stride"),
    [((), "R+B/16", 64, 32), ((2, 2, 2, 2), "R26+B/32", 64, 32)],
)
def test_hybrid_gives_the_logits_of_timms_loader(tmp_path, units, variant, img_size, stride):
    arrays = google_hybrid(units, grid=img_size // stride)
    np.savez(tmp_path / "w.npz", **arrays)
    name = "vit_small_r26_s32_224" if units else "vit_tiny_r_s16_p8_224"
    act = partial(torch.nn.GELU, approximate="tanh")
    theirs = timm.create_model(
        name, img_size=img_size, num_classes=10, act_layer=act, **SIZE
    ).eval()  # fmt: skip
    theirs.load_pretrained(str(tmp_path / "w.npz"))

    model = ours(tmp_path / "w.npz")

    assert model.config.variant == variant
    # As for BiT; timm's GroupNorm has another epsilon, besides.
    assert_same(model, theirs, img_size, tolerance=1e-4)


def test_bit_gives_the_logits_of_timms_loader(tmp_path):
    np.savez(tmp_path / "w.npz", **bit_resnet((3, 4, 6, 3)))
    theirs = timm.create_model("resnetv2_50x1_bit", num_classes=5).eval()
    theirs.load_pretrained(str(tmp_path / "w.npz"))

    model = ours(tmp_path / "w.npz")

    assert model.config.variant == "R50x1"
    # The tensors are the same to the bit; 50 standardised convolutions add up in another order.
    assert_same(model, theirs, 64, tolerance=1e-4)


@pytest.mark.parametrize("name", [*LAYOUTS, "hybrid", "stem-only", "bit"])
def test_arrays_come_back_bitwise(tmp_path, name):
    if name == "bit":
        arrays = bit_resnet((2, 2, 2, 2))
    elif name in ("hybrid", "stem-only"):
        arrays = google_hybrid((2, 2, 2, 2) if name == "hybrid" else (), grid=2)
    else:
        arrays = google_vit(**{**LAYOUTS[name][0], "prefix": "", "scan": False})
    np.savez(tmp_path / "w.npz", **arrays)
    tensors, config, dropped = from_google(read_npz(tmp_path / "w.npz"))

    write_npz(tmp_path / "back.npz", to_google(tensors, config))

    assert not dropped
    with np.load(tmp_path / "back.npz", allow_pickle=False) as back:
        assert set(back.files) == set(arrays)
        assert all(np.array_equal(back[key], array) for key, array in arrays.items())


def test_a_model_of_timm_comes_back_bitwise_through_npz(tmp_path):
    torch.manual_seed(0)
    source = timm_vit()
    model = create_model(
        "B/4", img_size=16, num_classes=10, embed_dim=32, depth=3, num_heads=4, mlp_dim=64
    )
    model.load_state_dict(source.state_dict())

    write_npz(tmp_path / "w.npz", to_google(model.state_dict(), model.config))

    target = timm_vit()
    target.load_pretrained(str(tmp_path / "w.npz"))
    back = target.state_dict()
    assert all(torch.equal(back[key], value) for key, value in source.state_dict().items())


def test_the_2020_layout_keeps_its_hidden_layer_and_its_empty_head_is_noted(tmp_path):
    arrays = google_vit(pre_logits=True, classes=21)
    arrays["head/kernel"][:] = 0
    np.savez(tmp_path / "w.npz", **arrays)
    file = read_weights(tmp_path / "w.npz")
    model = create_model(file.model)

    report = load_file(model, file, new_head=False)

    assert (model.config.head, model.num_classes) == ("mlp", 21)
    assert torch.equal(model.pre_logits.fc.weight, torch.tensor(arrays["pre_logits/kernel"]).T)
    assert "the head is all zero" in str(report)

    fresh = create_model(file.model, num_classes=3, head="linear")
    report = load_file(fresh, file, new_head=True)
    assert report.dropped["pre_logits.fc.weight"] == "replaced by the new head"


def test_optimizer_state_beside_the_weights_is_accounted_for(tmp_path):
    arrays = google_vit(prefix="opt/target/") | {"opt/state/step": np.array(7)}
    np.savez(tmp_path / "w.npz", **arrays)
    file = read_weights(tmp_path / "w.npz")

    report = load_file(create_model(file.model), file, new_head=False)

    assert report.dropped == {"opt/state/step": "optimizer state"}


def test_unknown_arrays_are_an_error(tmp_path):
    arrays = google_vit() | {"Transformer/encoderblock_0/extra": np.zeros(3, np.float32)}
    np.savez(tmp_path / "w.npz", **arrays)
    file = read_weights(tmp_path / "w.npz")

    with pytest.raises(UserError, match="encoderblock_0/extra is unknown"):
        load_file(create_model(file.model), file, new_head=False)


def test_what_the_layout_has_no_place_for_is_refused_by_name():
    model = create_model("mu/4", img_size=16, num_classes=2, init_values=0.1)

    with pytest.raises(UserError, match=r"no place for blocks\.0\.ls1\.gamma"):
        to_google(model.state_dict(), model.config)
