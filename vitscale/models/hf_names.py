"""Hugging Face's ViT: names of both generations, and the two documents beside the weights.

Version 5 of transformers renamed the parts in memory and still writes the names of version 4, which
both read; so do we.

Source:
    transformers, models/vit (4.57: configuration_vit.py, modeling_vit.py; 5.24: the same).
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from vitscale.config.augment import AugmentConfig
from vitscale.config.errors import UserError
from vitscale.config.model import ModelConfig
from vitscale.config.variants import is_resnet, resolve_shape

_ACTS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
_PATCHES = "embeddings.patch_embeddings.projection.weight"
_OUTER = {
    "embeddings.cls_token": "cls_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "layernorm": "norm",
    "pooler.dense": "pre_logits.fc",
    "classifier": "head",
}
_LAYER = re.compile(r"(?:encoder\.layer|layers)\.(\d+)\.(.+)\.(weight|bias)")
# Of version 4, then of version 5.
_PARTS = {
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "attention.output.dense": "attn.proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "attention.o_proj": "attn.proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
_QKV = (
    tuple(f"attention.attention.{part}" for part in ("query", "key", "value")),
    tuple(f"attention.{part}_proj" for part in "qkv"),
)
# What masked pre-training has and classification has not.
_MASKED = re.compile(r"embeddings\.mask_token|decoder\..*")


def is_hf(tensors: Mapping[str, Tensor]) -> bool:
    """Whether the names are of Hugging Face's ViT."""
    return _PATCHES in tensors or f"vit.{_PATCHES}" in tensors


def from_hf(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Turn tensors into those under timm's names.

    Returns:
        The tensors, with unknown ones under their own names; and what was left out: name -> why.
    """
    found: dict[str, Tensor] = {}
    dropped: dict[str, str] = {}
    projections: dict[str, dict[int, Tensor]] = {}
    for full, tensor in tensors.items():
        name = full.removeprefix("vit.")
        stem, _, leaf = name.rpartition(".")
        layer = _LAYER.fullmatch(name)
        place = None if layer is None else _place_in_qkv(layer[2])
        if _MASKED.fullmatch(name):
            dropped[full] = "of masked pre-training"
        elif layer is not None and place is not None:
            target = f"blocks.{layer[1]}.attn.qkv.{layer[3]}"
            projections.setdefault(target, {})[place] = tensor
        elif layer is not None and layer[2] in _PARTS:
            found[f"blocks.{layer[1]}.{_PARTS[layer[2]]}.{layer[3]}"] = tensor
        elif name in _OUTER:
            found[_OUTER[name]] = tensor
        elif stem in _OUTER:
            found[f"{_OUTER[stem]}.{leaf}"] = tensor
        else:
            found[full] = tensor
    for target, parts in projections.items():
        if len(parts) == 3:
            found[target] = torch.cat([parts[0], parts[1], parts[2]])
    return found, dropped


def _place_in_qkv(part: str) -> int | None:
    return next((names.index(part) for names in _QKV if part in names), None)


def config_from_hf(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ModelConfig:
    """Read the model off a config.json.

    Args:
        document: The config.json; what it leaves out has the defaults of ViTConfig.
        tensors: Under timm's names.

    Raises:
        UserError: Another architecture, or a value that our model does not have.
    """
    kind = document.get("model_type")
    if kind != "vit":
        raise UserError(f'config.json is of model_type "{kind}"; only "vit" is read')
    act = document.get("hidden_act", "gelu")
    if act not in _ACTS:
        raise UserError(f'config.json has hidden_act "{act}"; there are {", ".join(_ACTS)}')
    head = tensors.get("head.weight")
    fields = {
        "variant": f"B/{document.get('patch_size', 16)}",
        "img_size": document.get("image_size", 224),
        "in_chans": document.get("num_channels", 3),
        "embed_dim": document.get("hidden_size", 768),
        "depth": document.get("num_hidden_layers", 12),
        "num_heads": document.get("num_attention_heads", 12),
        "mlp_dim": document.get("intermediate_size", 3072),
        "qkv_bias": document.get("qkv_bias", True),
        "norm_eps": document.get("layer_norm_eps", 1e-12),
        "act": _ACTS[act],
        "num_classes": 0 if head is None else head.shape[0],
        "head": "mlp" if "pre_logits.fc.weight" in tensors else "linear",
    }
    try:
        return ModelConfig(**fields)
    except ValidationError as error:
        faults = (f"{e['loc'][0]} = {e['input']!r}: {e['msg']}" for e in error.errors())
        raise UserError(f"config.json: {'; '.join(faults)}") from error


def to_hf(
    tensors: Mapping[str, Tensor], config: ModelConfig
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Turn a model's tensors into those of a ViTForImageClassification, and its config.json.

    Raises:
        UserError: The model is none that transformers' ViT can be; all reasons are listed.
    """
    if problems := _misfits(config):
        raise UserError(
            "transformers' ViT cannot be this model: " + "; ".join(problems) + "; export --to timm"
        )
    outer = {ours: theirs for theirs, ours in _OUTER.items()}
    # Version 4's come first in the table and win.
    parts = {ours: theirs for theirs, ours in reversed(_PARTS.items())}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, leaf = name.rpartition(".")
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
        if block is not None and block[2] == "attn.qkv":
            for theirs, one in zip(_QKV[0], tensor.chunk(3), strict=True):
                found[f"vit.encoder.layer.{block[1]}.{theirs}.{leaf}"] = one
        elif block is not None:
            found[f"vit.encoder.layer.{block[1]}.{parts[block[2]]}.{leaf}"] = tensor
        elif stem == "head":
            found[f"classifier.{leaf}"] = tensor
        else:
            found[f"vit.{outer[name] if name in outer else f'{outer[stem]}.{leaf}'}"] = tensor
    return found, _config_json(config)


def _misfits(config: ModelConfig) -> list[str]:
    if is_resnet(config.variant) or "+" in config.variant:
        return [f'model.variant = "{config.variant}" is no plain Vision Transformer']
    needs: dict[str, tuple[Any, ...]] = {
        "class_token": (True,),
        "reg_tokens": (0,),
        "global_pool": ("token",),
        "final_norm": (True,),
        "pos_embed": ("learned", "sincos2d"),
        "pos_embed_at": ("stem",),
        "no_embed_class": (False,),
        "pre_norm": (False,),
        "block": ("serial",),
        "qk_norm": (False,),
        "mlp": ("mlp",),
        "init_values": (None,),
        "head": ("linear",),
        "norm": ("layernorm",),
    }
    problems = [
        f"model.{name} = {getattr(config, name)!r}, not {values[0]!r}"
        for name, values in needs.items()
        if getattr(config, name) not in values
    ]
    if config.fc_norm:
        problems.append("model.fc_norm = True, not False")
    if not config.num_classes:
        problems.append("model.num_classes = 0, not the classes of a classifier")
    return problems


def _config_json(config: ModelConfig) -> dict[str, Any]:
    shape = resolve_shape(config)
    acts = {ours: theirs for theirs, ours in reversed(_ACTS.items())}
    labels = range(config.num_classes or 0)
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": shape.embed_dim,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": shape.num_heads,
        "intermediate_size": shape.mlp_dim,
        "image_size": config.img_size,
        "patch_size": shape.patch_size,
        "num_channels": config.in_chans,
        "qkv_bias": config.qkv_bias,
        "hidden_act": acts[config.act],
        # Theirs is 1e-12 where it is not said.
        "layer_norm_eps": config.norm_eps,
        "hidden_dropout_prob": config.drop_rate,
        "attention_probs_dropout_prob": 0.0,
        "id2label": {str(label): f"LABEL_{label}" for label in labels},
        "label2id": {f"LABEL_{label}": label for label in labels},
        "torch_dtype": "float32",
    }


def preprocessor_json(config: ModelConfig, augment: AugmentConfig) -> dict[str, Any]:
    """Describe how the model's input is made, for transformers' image processors."""
    side = config.img_size
    square = {"height": side, "width": side}
    document: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": square,
        # Pillow's number for bilinear.
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(augment.mean),
        "image_std": list(augment.std),
    }
    if augment.eval_crop == "center":
        # ViT's processor has no crop; CLIP's scales the shorter side and cuts the middle out.
        document |= {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": round(side / augment.eval_crop_ratio)},
            "do_center_crop": True,
            "crop_size": square,
            "do_convert_rgb": True,
        }
    return document
