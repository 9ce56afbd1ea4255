"""vitscale export: from every self-describing source to every kind, and what it refuses."""

import json
from functools import partial

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from transformers import ViTForImageClassification

from launchers.export import main
from tests.helpers.weight_layouts import google_vit
from vitscale.config.augment import AugmentConfig
from vitscale.models import create_model
from vitscale.models.weights import read_safetensors, write_safetensors

FIELDS = {"img_size": 16, "num_classes": 10, "embed_dim": 32, "depth": 3, "num_heads": 4,
          "mlp_dim": 64, "act": "gelu_tanh"}  # fmt: skip


def timms():
    torch.manual_seed(0)
    act = partial(torch.nn.GELU, approximate="tanh")
    return VisionTransformer(
        img_size=16, patch_size=4, num_classes=10, embed_dim=32, depth=3, num_heads=4,
        mlp_ratio=2.0, act_layer=act, weight_init="",
    ).eval()  # fmt: skip


@pytest.fixture
def own(tmp_path):
    """Weights of timm in a file of ours."""
    source = timms()
    config = create_model("B/4", **FIELDS).config
    metadata = {
        "version": 1,
        "model": config.model_dump(mode="json"),
        "input": AugmentConfig(eval_crop="resize").model_dump(mode="json"),
        "labels_sha256": "0" * 64,
    }
    write_safetensors(tmp_path / "own.safetensors", source.state_dict(), metadata)
    return tmp_path / "own.safetensors"


def export(source, out, *words):
    return main(["--checkpoint", str(source), "--out", str(out), *words])


def logits(model):
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(3)) * 2 - 1
    with torch.inference_mode():
        found = model.eval()(images)
    return found if isinstance(found, torch.Tensor) else found.logits


def test_timm_to_ours_to_timm_is_bitwise(tmp_path, own):
    assert export(own, tmp_path / "out.safetensors") == 0

    model = timms()
    model.load_state_dict(load_tensors(tmp_path / "out.safetensors"), strict=True)
    assert all(torch.equal(v, timms().state_dict()[n]) for n, v in model.state_dict().items())
    assert (tmp_path / "out.safetensors").read_bytes() == own.read_bytes()


def test_the_npz_loads_in_timm_bitwise(tmp_path, own):
    assert export(own, tmp_path / "out.npz", "--to", "npz") == 0

    model = timm.create_model(
        "vit_base_patch16_224", img_size=16, patch_size=4, num_classes=10, embed_dim=32, depth=3,
        num_heads=4, mlp_ratio=2.0,
    )  # fmt: skip
    model.load_pretrained(str(tmp_path / "out.npz"))
    assert all(torch.equal(v, timms().state_dict()[n]) for n, v in model.state_dict().items())


def test_the_folder_runs_in_transformers_and_comes_back(tmp_path, own):
    assert export(own, tmp_path / "folder", "--to", "hf") == 0

    loaded = ViTForImageClassification.from_pretrained(tmp_path / "folder")
    torch.testing.assert_close(logits(loaded), logits(timms()), rtol=1e-5, atol=1e-5)
    document = json.loads((tmp_path / "folder/preprocessor_config.json").read_text())
    assert (document["size"], document["image_mean"]) == ({"height": 16, "width": 16}, [0.5] * 3)
    card = json.loads((tmp_path / "folder/config.json").read_text())["vitscale"]
    assert card["labels_sha256"] == "0" * 64

    assert export(tmp_path / "folder", tmp_path / "back.safetensors") == 0
    back, metadata = read_safetensors(tmp_path / "back.safetensors")
    assert metadata["model"]["act"] == "gelu_tanh"
    assert all(torch.equal(v, back[n]) for n, v in timms().state_dict().items())


def test_googles_file_becomes_ours_with_its_arithmetic_in_the_card(tmp_path, capsys):
    np.savez(tmp_path / "w.npz", **google_vit(prefix="opt/target/"))

    assert export(tmp_path / "w.npz", tmp_path / "out.safetensors") == 0

    _, metadata = read_safetensors(tmp_path / "out.safetensors")
    assert metadata["origin"] == "Google's .npz"
    model = metadata["model"]
    assert (model["act"], model["norm_eps"], model["global_pool"]) == ("gelu_tanh", 1e-6, "token")
    assert metadata["input"]["mean"] == [0.5, 0.5, 0.5]
    assert "loaded=44" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "out", "part"),
    [
        ([], "out.npz", "must end in .safetensors"),
        (["--to", "npz"], "out.safetensors", "must end in .npz"),
        (["--to", "hf"], "", "is there already"),
        (["--ema", "--to", "hf"], "folder", None),
    ],
)
def test_a_wrong_name_is_refused_before_anything_is_read(tmp_path, own, capsys, words, out, part):
    code = export(own, tmp_path / out, *words)

    assert code == (0 if part is None else 2)
    assert part is None or part in capsys.readouterr().err


def test_a_file_that_does_not_say_its_model_is_refused(tmp_path, capsys):
    save_file(timms().state_dict(), tmp_path / "w.safetensors")

    assert export(tmp_path / "w.safetensors", tmp_path / "out.safetensors") == 2

    assert "does not describe its model" in capsys.readouterr().err
    assert not (tmp_path / "out.safetensors").exists()


def test_averaged_weights_of_another_program_are_refused(tmp_path, own, capsys):
    export(own, tmp_path / "folder", "--to", "hf")

    assert export(tmp_path / "folder", tmp_path / "out.safetensors", "--ema") == 2

    assert "no averaged weights" in capsys.readouterr().err
