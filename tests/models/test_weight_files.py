"""Files of every kind, recognised by what is in them; the ways that foreign ones are wrong."""

import argparse
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.weight_layouts import google_vit
from vitscale.config.augment import AugmentConfig
from vitscale.config.errors import UserError
from vitscale.models import create_model
from vitscale.models.weight_files import is_foreign_folder, load_file, read_weights
from vitscale.models.weights import write_safetensors

FIELDS = {"img_size": 16, "num_classes": 10, "embed_dim": 32, "depth": 3, "num_heads": 4,
          "mlp_dim": 64}  # fmt: skip


def model(**changes):
    return create_model("B/4", **(FIELDS | changes))


def state():
    generator = torch.Generator().manual_seed(5)
    own = model().state_dict()
    return {name: torch.randn(value.shape, generator=generator) for name, value in own.items()}


def is_loaded(path):
    target = model()
    load_file(target, read_weights(path), new_head=False)
    return all(torch.equal(value, state()[n]) for n, value in target.state_dict().items())


def prefixed(prefix):
    return {prefix + name: tensor for name, tensor in state().items()}


@pytest.mark.parametrize(
    "content",
    [
        state(),
        OrderedDict(state()),
        {"model": state()},
        {"state_dict": prefixed("module."), "epoch": 3},
        prefixed("_orig_mod."),
        {"module": prefixed("_orig_mod.module."), "model": "vit"},
        {"state_dict": {"model": state()}},
        {"model": state(), "args": argparse.Namespace(lr=0.1, data="x")},
    ],
    ids=["bare", "ordered", "model", "module-prefix", "compiled", "both", "nested", "namespace"],
)
def test_torch_files_are_read_without_wrappers(tmp_path, content):
    # The name says nothing: the content does.
    torch.save(content, tmp_path / "weights.npz")

    assert is_loaded(tmp_path / "weights.npz")


def test_the_old_torch_format_is_read(tmp_path):
    torch.save({"model": state()}, tmp_path / "w.pth", _use_new_zipfile_serialization=False)

    assert is_loaded(tmp_path / "w.pth")


def test_safetensors_of_timm_with_prefixes_are_read(tmp_path):
    save_file(prefixed("module."), tmp_path / "w.bin")

    assert is_loaded(tmp_path / "w.bin")


class Trap:
    def __reduce__(self):
        return (print, ("trapped",))


@pytest.mark.parametrize("new", [True, False], ids=["zip", "old"])
def test_code_in_a_torch_file_is_refused_and_not_run(tmp_path, capsys, new):
    content = {"model": state(), "extra": Trap()}
    torch.save(content, tmp_path / "w.pth", _use_new_zipfile_serialization=new)

    with pytest.raises(UserError, match="more than weights") as caught:
        read_weights(tmp_path / "w.pth")

    assert "print" in str(caught.value)
    assert "trapped" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ({"epoch": 3}, "epoch"),
        ([1, 2], "no state_dict"),
        ({}, "no state_dict"),
        ({"model": state() | {"step": 3}}, "step"),
    ],
)
def test_a_torch_file_without_weights_is_refused(tmp_path, content, part):
    torch.save(content, tmp_path / "w.pth")

    with pytest.raises(UserError, match=part):
        read_weights(tmp_path / "w.pth")


def test_what_is_no_file_of_weights_is_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    for content in (b"", b"<html>not found</html>", pickle.dumps({"a": 1}, protocol=2)[:-3]):
        path.write_bytes(content)
        with pytest.raises(UserError, match="is not a whole file"):
            read_weights(path)
    torch.save(state(), path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(UserError, match="is not a whole file"):
        read_weights(path)
    np.savez(path.with_suffix(".npz"), a=np.zeros(3))
    with pytest.raises(UserError, match=r"no known model: 1 arrays, a"):
        read_weights(path.with_suffix(".npz"))
    with pytest.raises(UserError, match="no weights file"):
        read_weights(tmp_path / "absent")


def test_a_deepspeed_folder_is_read_through_its_pointer(tmp_path):
    step = tmp_path / "global_step20"
    step.mkdir()
    (tmp_path / "latest").write_text("global_step20")
    torch.save({"module": prefixed("module."), "dp_world_size": 2},
               step / "mp_rank_00_model_states.pt")  # fmt: skip

    assert is_foreign_folder(tmp_path)
    assert is_loaded(tmp_path)
    assert is_loaded(step)


def google(tmp_path, **layout):
    np.savez(tmp_path / "w.npz", **google_vit(**layout))
    return read_weights(tmp_path / "w.npz")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({}, 'model.act = "gelu", "gelu_tanh" in the file'),
        ({"act": "gelu_tanh", "norm_eps": 1e-12}, "model.norm_eps = 1e-12, 1e-06 in the file"),
        ({"act": "gelu_tanh", "num_heads": 8}, "model.num_heads = 8, 4 in the file"),
        ({"act": "gelu_tanh", "global_pool": "avg", "fc_norm": False},
         'model.global_pool = "avg", "token" in the file'),
    ],
)  # fmt: skip
def test_arithmetic_that_the_tensors_do_not_show_is_compared(tmp_path, changes, part):
    target = model(**changes)
    before = {name: value.clone() for name, value in target.state_dict().items()}

    with pytest.raises(UserError) as caught:
        load_file(target, google(tmp_path), new_head=False)

    assert part in str(caught.value)
    assert all(torch.equal(value, before[n]) for n, value in target.state_dict().items())


def test_the_input_range_is_compared(tmp_path):
    imagenet = AugmentConfig(mean=(0.485, 0.456, 0.406))
    file = google(tmp_path)

    with pytest.raises(UserError, match=r"augment.mean = \[0.485, .*\], \[0.5, 0.5, 0.5\] in the"):
        load_file(model(act="gelu_tanh"), file, augment=imagenet, new_head=False)
    load_file(model(act="gelu_tanh"), file, augment=AugmentConfig(), new_head=False)


def test_a_new_head_may_pool_otherwise(tmp_path):
    target = model(act="gelu_tanh", global_pool="avg", fc_norm=False, num_classes=2)

    assert load_file(target, google(tmp_path), new_head=True).dropped.keys() == {
        "head.weight", "head.bias",
    }  # fmt: skip


def test_positions_without_a_class_row_are_not_for_a_model_with_one(tmp_path):
    file = google(tmp_path, style="big_vision", prefix="params/")

    with pytest.raises(UserError, match="no_embed_class = false, true in the file"):
        load_file(model(act="gelu_tanh"), file, new_head=False)


def test_bfloat16_of_big_vision_is_read_and_noted(tmp_path):
    arrays = google_vit(style="big_vision", prefix="params/", scan=True)
    halves = {n: torch.tensor(a).bfloat16() for n, a in arrays.items()}
    np.savez(tmp_path / "w.npz", **{n: h.view(torch.int16).numpy().view("V2")
                                    for n, h in halves.items()})  # fmt: skip
    file = read_weights(tmp_path / "w.npz")
    target = create_model(file.model)

    report = load_file(target, file, new_head=False)

    assert "44 tensors are bfloat16 in the file" in str(report)
    assert torch.equal(target.head.bias, halves["params/head/bias"].float())


def test_a_file_of_timm_says_what_it_does_not_say(tmp_path):
    save_file(state(), tmp_path / "w")

    report = load_file(model(), read_weights(tmp_path / "w"), new_head=False)

    assert "does not say model.act, model.norm, model.norm_eps, augment.mean" in str(report)


def test_nan_is_refused_by_name(tmp_path):
    arrays = google_vit()
    arrays["Transformer/encoderblock_1/MlpBlock_3/Dense_0/kernel"][3, 4] = np.nan
    np.savez(tmp_path / "w.npz", **arrays)

    with pytest.raises(UserError, match=r"blocks\.1\.mlp\.fc1\.weight holds NaN or Inf"):
        load_file(model(act="gelu_tanh"), read_weights(tmp_path / "w.npz"), new_head=False)


def test_own_files_carry_their_model(tmp_path):
    source = model(act="gelu_tanh")
    augment = AugmentConfig().model_dump(mode="json")
    metadata = {"model": source.config.model_dump(mode="json"), "input": augment}
    write_safetensors(tmp_path / "w", source.state_dict(), metadata)

    file = read_weights(tmp_path / "w")

    assert (file.model, file.augment) == (source.config, AugmentConfig())
    with pytest.raises(UserError, match=r'model.act = "gelu", "gelu_tanh" in the file'):
        load_file(model(), file, new_head=False)
    write_safetensors(tmp_path / "w", source.state_dict(), {"model": {"variant": 3}})
    with pytest.raises(UserError, match="describes a model"):
        read_weights(tmp_path / "w")
