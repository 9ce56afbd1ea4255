import hashlib
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vitscale.config.errors import UserError
from vitscale.config.recipe import ModelConfig
from vitscale.models.pos_embed import resize_pos_embed
from vitscale.models.vit import VisionTransformer
from vitscale.models.weights import load_weights, read_safetensors, write_safetensors


def tiny(**changes):
    fields = {"variant": "mu/4", "img_size": 16, "num_classes": 5}
    return VisionTransformer(ModelConfig(**(fields | changes)))


def weights(**changes):
    state = tiny(**changes).state_dict()
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(value.shape, generator=generator) for name, value in state.items()}


def test_load_weights_loads_every_key():
    model, state = tiny(), weights()

    report = load_weights(model, state, new_head=False)

    assert sorted(report.loaded) == sorted(state)
    assert (report.resized, report.new, report.dropped) == ({}, {}, {})
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("mode", ["google", "timm", "hf"])
def test_load_weights_resizes_the_position_table(mode):
    model, state = tiny(img_size=24), weights()

    report = load_weights(model, state, pos_embed_resize=mode, new_head=False)

    assert report.resized == {"pos_embed": f"17 to 37 rows, {mode}"}
    assert torch.equal(model.pos_embed, resize_pos_embed(state["pos_embed"], (6, 6), 1, mode))
    assert sorted([*report.loaded, "pos_embed"]) == sorted(state)


def test_load_weights_new_head_is_zero_and_replaces_both_layers():
    model, state = tiny(num_classes=3, head_bias=-10.0), weights(head="mlp")

    report = load_weights(model, state, new_head=True)

    assert not model.head.weight.any()
    assert not model.head.bias.any()
    assert set(report.new) == {"head.weight", "head.bias"}
    assert set(report.dropped) == {
        "head.weight", "head.bias", "pre_logits.fc.weight", "pre_logits.fc.bias",
    }  # fmt: skip
    assert "dropped=4" in str(report)
    assert "pre_logits.fc.bias (replaced by the new head)" in str(report)


def test_load_weights_new_head_without_one_in_the_file():
    state = {k: v for k, v in weights().items() if not k.startswith("head.")}

    report = load_weights(tiny(), state, new_head=True)

    assert set(report.new) == {"head.weight", "head.bias"}
    assert not report.dropped


def test_load_weights_into_a_headless_model_drops_the_classifier():
    report = load_weights(tiny(num_classes=0), weights(), new_head=False)

    assert set(report.dropped) == {"head.weight", "head.bias"}


def test_load_weights_casts_to_the_model():
    model, state = tiny(), {name: value.bfloat16() for name, value in weights().items()}

    load_weights(model, state, new_head=False)

    assert model.head.weight.dtype == torch.float32
    assert torch.equal(model.head.weight, state["head.weight"].float())


def changed(**tensors):
    return weights() | tensors


@pytest.mark.parametrize(
    ("state", "parts"),
    [
        (changed(extra=torch.zeros(1)), ["extra is unknown"]),
        ({k: v for k, v in weights().items() if k != "norm.bias"}, ["norm.bias is missing"]),
        ({k: v for k, v in weights().items() if k != "head.bias"}, ["head.bias", "new_head"]),
        (changed(**{"norm.bias": torch.full((32,), torch.nan)}), ["norm.bias holds NaN or Inf"]),
        (changed(**{"head.bias": torch.full((5,), torch.inf)}), ["head.bias holds NaN or Inf"]),
        (changed(**{"norm.bias": torch.zeros(32).int()}), ["norm.bias is torch.int32"]),
        (changed(**{"norm.bias": torch.zeros(33)}), ["norm.bias", "(33,)", "(32,)"]),
        (weights(num_classes=6), ["head.weight", "(6, 32)", "(5, 32)", "new_head"]),
        (weights(head="mlp"), ["pre_logits.fc.weight is unknown", "new_head"]),
        (weights(class_token=False, global_pool="avg"), ["cls_token is missing", "16 rows"]),
        (changed(pos_embed=torch.zeros(1, 17, 33)), ["pos_embed", "(1, 17, 33)", "(1, 17, 32)"]),
        ({}, ["blocks.0.attn.proj.bias is missing", "and 12 more of the kind"]),
        (
            changed(extra=torch.zeros(1), **{"norm.bias": torch.full((32,), torch.nan)}),
            ["extra is unknown", "norm.bias holds NaN"],
        ),
    ],
    ids=["unknown", "missing", "no-head", "nan", "inf", "integer", "shape", "classes",
         "pre-logits", "no-cls", "width", "empty", "both"],
)  # fmt: skip
def test_load_weights_refuses_what_it_cannot_explain(state, parts):
    model = tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    with pytest.raises(UserError) as caught:
        load_weights(model, state, new_head=False)

    for part in parts:
        assert part in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("changes", [{"head": "mlp"}, {"num_classes": 0}])
def test_load_weights_refuses_a_new_head_where_none_fits(changes):
    with pytest.raises(UserError, match="new_head needs"):
        load_weights(tiny(**changes), weights(), new_head=True)


def test_load_weights_recomputes_a_fixed_table():
    model = tiny(img_size=24, pos_embed="sincos2d")
    table = model.pos_embed.clone()
    state = weights() | {"pos_embed": tiny(pos_embed="sincos2d").pos_embed}

    report = load_weights(model, state, new_head=False)

    assert set(report.resized) == {"pos_embed"}
    assert torch.equal(model.pos_embed, table)
    del state["pos_embed"]
    assert set(load_weights(model, state, new_head=False).new) == {"pos_embed"}


def test_load_weights_refuses_a_learned_table_for_a_fixed_one():
    with pytest.raises(UserError, match="pos_embed of the file is not the sincos2d table"):
        load_weights(tiny(pos_embed="sincos2d"), weights(), new_head=False)


def test_safetensors_round_trip(tmp_path):
    state = weights()
    metadata = {"step": 3, "model": {"variant": "mu/4"}}

    write_safetensors(tmp_path / "w.safetensors", state, metadata)

    read, read_metadata = read_safetensors(tmp_path / "w.safetensors")
    assert read_metadata == metadata
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], state[name]) for name in state)
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_safetensors_bytes_are_reproducible(tmp_path):
    state = weights()
    backwards = dict(reversed(state.items()))
    write_safetensors(tmp_path / "a", state, {"x": 1, "y": 2})
    write_safetensors(tmp_path / "b", backwards, {"y": 2, "x": 1})
    write_safetensors(tmp_path / "c", backwards, {"y": 3, "x": 1})

    a, b, c = (hashlib.sha256((tmp_path / name).read_bytes()).digest() for name in "abc")

    assert a == b
    assert a != c


def test_safetensors_are_float32_with_one_metadata_key(tmp_path):
    shared = torch.arange(6, dtype=torch.bfloat16)

    write_safetensors(tmp_path / "w", {"a": shared, "b": shared.view(2, 3).T}, {"k": [1]})

    with safe_open(tmp_path / "w", framework="pt") as file:
        assert file.metadata() == {"vitscale": json.dumps({"k": [1]}, separators=(",", ":"))}
        assert {file.get_tensor(name).dtype for name in ("a", "b")} == {torch.float32}
        assert torch.equal(file.get_tensor("b"), shared.float().view(2, 3).T)


def test_safetensors_failure_leaves_the_old_file(tmp_path):
    path = tmp_path / "w"
    write_safetensors(path, weights(), {})
    before = path.read_bytes()

    with pytest.raises(ValueError, match="JSON"):
        write_safetensors(path, weights(), {"loss": float("nan")})

    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["w"]


def test_read_safetensors_of_another_program_has_no_metadata(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "w")

    assert read_safetensors(tmp_path / "w")[1] is None


def test_read_safetensors_refuses_damage_by_name(tmp_path):
    path = tmp_path / "w.safetensors"
    with pytest.raises(UserError, match="no weights file"):
        read_safetensors(path)
    write_safetensors(path, weights(), {})
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(UserError, match=r"w\.safetensors is not a whole"):
        read_safetensors(path)
