"""Hugging Face's ViT against transformers itself, both ways and in both generations of names."""

import json

import pytest
import torch
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file
from transformers import AutoImageProcessor, ViTConfig, ViTForImageClassification, ViTModel

from vitscale.config.augment import AugmentConfig
from vitscale.config.errors import UserError
from vitscale.config.model import ModelConfig
from vitscale.models import create_model
from vitscale.models.hf_names import preprocessor_json, to_hf
from vitscale.models.weight_files import load_file, read_weights
from vitscale.models.weights import write_tensors

TINY = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 16, "patch_size": 4, "num_labels": 3,
}  # fmt: skip


def theirs(kind=ViTForImageClassification, **changes):
    torch.manual_seed(0)
    model = kind(ViTConfig(**(TINY | changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def ours(path):
    file = read_weights(path)
    model = create_model(file.model).eval()
    return model, load_file(model, file, new_head=False)


def images():
    return torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(3)) * 2 - 1


def logits(model):
    with torch.inference_mode():
        found = model(images())
    return found if isinstance(found, torch.Tensor) else found.logits


@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh"])
def test_a_saved_folder_gives_the_same_logits(tmp_path, act):
    source = theirs(hidden_act=act)
    source.save_pretrained(tmp_path)
    assert any(".attention.attention.query." in n for n in load_tensors(tmp_path /
               "model.safetensors"))  # fmt: skip

    model, report = ours(tmp_path)

    assert model.config.norm_eps == 1e-12
    assert not report.dropped
    torch.testing.assert_close(logits(model), logits(source), rtol=1e-5, atol=1e-5)


def test_version_5_names_give_the_same_logits(tmp_path):
    source = theirs()
    source.config.save_pretrained(tmp_path)
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    assert "vit.layers.0.attention.q_proj.weight" in source.state_dict()

    model, _ = ours(tmp_path)

    torch.testing.assert_close(logits(model), logits(source), rtol=1e-5, atol=1e-5)


def test_a_bin_of_torch_beside_the_config_is_read(tmp_path):
    source = theirs()
    source.config.save_pretrained(tmp_path)
    torch.save(source.state_dict(), tmp_path / "pytorch_model.bin")

    model, _ = ours(tmp_path)

    torch.testing.assert_close(logits(model), logits(source), rtol=1e-5, atol=1e-5)


def test_the_pooler_of_a_headless_model_is_the_hidden_head_layer(tmp_path):
    source = theirs(ViTModel)
    source.save_pretrained(tmp_path)
    file = read_weights(tmp_path)

    model = create_model(file.model, num_classes=5)
    load_file(create_model(file.model, num_classes=5, head="linear"), file, new_head=True)

    assert (file.model.head, file.model.num_classes) == ("mlp", 0)
    with pytest.raises(UserError, match=r"head\.weight is missing"):
        load_file(model, file, new_head=False)


def test_what_masked_pretraining_adds_is_dropped_with_the_reason(tmp_path):
    source = theirs()
    source.config.save_pretrained(tmp_path)
    extra = {"vit.embeddings.mask_token": torch.zeros(1, 1, 32)}
    save_file(source.state_dict() | extra, tmp_path / "model.safetensors")

    _, report = ours(tmp_path)

    assert report.dropped == {"vit.embeddings.mask_token": "of masked pre-training"}


@pytest.mark.parametrize(
    ("changes", "part"),
    [({"model_type": "deit"}, 'model_type "deit"'), ({"hidden_act": "relu"}, 'hidden_act "relu"'),
     ({"layer_norm_eps": "no"}, "norm_eps = 'no'")],
)  # fmt: skip
def test_another_architecture_is_refused(tmp_path, changes, part):
    source = theirs()
    source.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    with pytest.raises(UserError) as caught:
        read_weights(tmp_path)

    assert part in str(caught.value)


def own(**changes):
    torch.manual_seed(1)
    fields = {"img_size": 16, "num_classes": 3, "act": "gelu_tanh"} | changes
    model = create_model("mu/4", **fields).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


@pytest.mark.parametrize("changes", [{}, {"act": "gelu"}, {"act": "quick_gelu"},
                                     {"qkv_bias": False}, {"pos_embed": "sincos2d"}])  # fmt: skip
def test_transformers_runs_the_exported_folder_to_the_same_logits(tmp_path, changes):
    model = own(**changes)
    tensors, config = to_hf(model.state_dict(), model.config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tensors(tmp_path / "model.safetensors", tensors, ("format", "pt"))

    loaded, info = ViTForImageClassification.from_pretrained(tmp_path, output_loading_info=True)

    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(logits(loaded.eval()), logits(model), rtol=1e-5, atol=1e-5)
    back, _ = ours(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name


def test_the_exported_names_fit_version_4_and_5(tmp_path):
    model = own()
    names = set(to_hf(model.state_dict(), model.config)[0])
    reference = theirs(num_hidden_layers=1)
    reference.save_pretrained(tmp_path)

    # What version 5 writes is what version 4 has in memory.
    assert names == set(load_tensors(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"global_pool": "avg"}, "model.global_pool = 'avg'"),
        ({"init_values": 0.1}, "model.init_values = 0.1"),
        ({"reg_tokens": 2}, "model.reg_tokens = 2"),
        ({"head": "mlp"}, "model.head = 'mlp'"),
        ({"variant": "R50+B/16"}, "no plain Vision Transformer"),
        ({"variant": "R50x1"}, "no plain Vision Transformer"),
        ({"num_classes": 0}, "model.num_classes = 0"),
    ],
)
def test_what_transformers_cannot_be_is_refused_with_the_reason(changes, part):
    config = ModelConfig(**({"variant": "B/16", "num_classes": 3} | changes))

    with pytest.raises(UserError) as caught:
        to_hf({}, config)

    assert part in str(caught.value)
    assert "--to timm" in str(caught.value)


@pytest.mark.parametrize(("crop", "sides"), [("center", (224, 224)), ("resize", (224, 224))])
def test_transformers_prepares_the_input_as_described(tmp_path, crop, sides):
    augment = AugmentConfig(eval_crop=crop, mean=(0.1, 0.2, 0.3))
    document = preprocessor_json(ModelConfig(variant="B/16"), augment)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(document))
    picture = torch.full((3, 300, 400), 255, dtype=torch.uint8)

    processor = AutoImageProcessor.from_pretrained(tmp_path)
    pixels = processor(picture, return_tensors="pt")["pixel_values"]

    assert pixels.shape == (1, 3, *sides)
    expected = (1 - torch.tensor([0.1, 0.2, 0.3])) / 0.5
    torch.testing.assert_close(pixels[0, :, 100, 100], expected, rtol=0, atol=1e-5)
