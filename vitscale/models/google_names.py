"""Google's names and layouts of arrays: vision_transformer, big_vision, its hybrids, and BiT.

One table serves both directions: what a tensor of ours is called there and how it lies.

Axes: D embed_dim, h heads, d head_dim; kernels there are [rows, columns, in, out] or [in, out].

Source:
    vision_transformer, models_vit.py and models_resnet.py; big_vision, models/vit.py; big_transfer,
    bit_pytorch/models.py; timm, vision_transformer.py and resnetv2.py (its .npz loaders).
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vitscale.config.errors import UserError
from vitscale.config.model import ModelConfig
from vitscale.config.variants import BACKBONES, RESNETS, SIZES, is_resnet, resolve_shape
from vitscale.config.variants import resolve_resnet as resnet_shape

# "plain" as it is, "flat" any shape to a vector, "norm4" the same that lies as [1, 1, 1, C],
# "conv" and "dense" kernels, "heads" and "heads_bias" one or more projections to heads stacked on
# ours' first axis, "merge" the projection back from heads.
Kind = Literal["plain", "flat", "norm4", "conv", "dense", "heads", "heads_bias", "merge"]

# Tried in this order; the empty one is the published files'.
_PREFIXES = ("opt/target/", "params/img/", "params/", "")
_BIT_ROOT = "resnet/root_block/standardized_conv2d/kernel"
_SCANNED = "Transformer/encoderblock/"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of ours and the arrays that it is there."""

    name: str
    arrays: tuple[str, ...]
    kind: Kind


@dataclass(frozen=True, slots=True)
class _Numbering:
    """How the parts of a block are numbered, and where the positions are."""

    attention: str
    norm: str
    mlp: str
    pos_embed: str


# Before flax's Linen all parts of a block were counted together; the published files still have it.
_GOOGLE = _Numbering(
    "MultiHeadDotProductAttention_1",
    "LayerNorm_2",
    "MlpBlock_3",
    "Transformer/posembed_input/pos_embedding",
)
_BIG_VISION = _Numbering(
    "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0", "pos_embedding"
)


def is_google(arrays: Mapping[str, Tensor]) -> bool:
    """Whether the names are of one of these layouts."""
    return _prefix_of(arrays) is not None


def _prefix_of(arrays: Mapping[str, Tensor]) -> str | None:
    roots = ("embedding/kernel", _BIT_ROOT)
    found = (p for p in _PREFIXES if any(f"{p}{root}" in arrays for root in roots))
    return next(found, None)


def from_google(
    arrays: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], ModelConfig, dict[str, str]]:
    """Turn arrays into tensors under timm's names.

    Args:
        arrays: All of a file.

    Returns:
        The tensors, with arrays that the layout does not have under their own names; the model that
        they are of; and what was left out: name -> why.

    Raises:
        UserError: The layout contradicts itself.
    """
    prefix = _prefix_of(arrays)
    assert prefix is not None
    own: dict[str, Tensor] = {}
    dropped: dict[str, str] = {}
    for name, array in arrays.items():
        if name.startswith(prefix):
            own[name.removeprefix(prefix)] = array
        else:
            dropped[name] = "not of the image model" if "params/" in prefix else "optimizer state"
    own = _unstacked(own)
    if _BIT_ROOT in own:
        config = _bit_config(own)
        entries = list(_bit_entries(_bit_units(own)))
    else:
        numbering = _numbering(own)
        config = _vit_config(own, numbering)
        shape = resolve_shape(config)
        entries = list(_vit_entries(shape.depth, shape.backbone, numbering))
    tensors = {}
    for entry in entries:
        if all(name in own for name in entry.arrays):
            parts = [own.pop(name) for name in entry.arrays]
            tensors[entry.name] = _decoded(parts, entry)
    return tensors | own, config, dropped


def to_google(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Turn tensors into the arrays of the published files.

    Args:
        tensors: All of a model.
        config: The model.

    Raises:
        UserError: The model has tensors that the layout has no place for; all are named.
    """
    if is_resnet(config.variant):
        entries, num_heads = list(_bit_entries(resnet_shape(config).layers)), 1
    else:
        shape = resolve_shape(config)
        num_heads = shape.num_heads
        table = tensors.get("pos_embed")
        no_row = table is not None and table.shape[1] == shape.num_patches
        numbering = _BIG_VISION if no_row or config.global_pool != "token" else _GOOGLE
        entries = list(_vit_entries(shape.depth, shape.backbone, numbering))
    wanted = {entry.name: entry for entry in entries}
    if strange := sorted(tensors.keys() - wanted.keys()):
        more = f" and {len(strange) - 8} more" if len(strange) > 8 else ""
        raise UserError(
            f"Google's layout has no place for {', '.join(strange[:8])}{more}; export --to timm"
        )
    arrays: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = _encoded(tensor, wanted[name], num_heads)
        arrays.update(zip(wanted[name].arrays, parts, strict=True))
    return arrays


def _decoded(parts: list[Tensor], entry: Entry) -> Tensor:
    first = parts[0]
    ranks = {"conv": 4, "dense": 2, "heads": 3, "heads_bias": 2, "merge": 3}
    rank = ranks.get(entry.kind, first.ndim)
    for name, part in zip(entry.arrays, parts, strict=True):
        if part.ndim != rank:
            raise UserError(f"{name} has shape {tuple(part.shape)}, not one of {rank} axes")
    match entry.kind:
        case "conv":
            return first.permute(3, 2, 0, 1)
        case "dense":
            return first.T
        case "flat" | "norm4":
            return first.reshape(-1)
        case "heads":
            return torch.cat([part.flatten(1).T for part in parts])
        case "heads_bias":
            return torch.cat([part.flatten() for part in parts])
        case "merge":
            return first.flatten(0, 1).T
        case "plain":
            return first


def _encoded(tensor: Tensor, entry: Entry, num_heads: int) -> list[Tensor]:
    num_parts = len(entry.arrays)
    match entry.kind:
        case "conv":
            return [tensor.permute(2, 3, 1, 0)]
        case "dense":
            return [tensor.T]
        case "norm4":
            return [tensor.view(1, 1, 1, -1)]
        case "heads":
            parts = tensor.chunk(num_parts)
            return [part.T.reshape(part.shape[1], num_heads, -1) for part in parts]
        case "heads_bias":
            return [part.reshape(num_heads, -1) for part in tensor.chunk(num_parts)]
        case "merge":
            return [tensor.T.reshape(num_heads, -1, tensor.shape[0])]
        case "flat" | "plain":
            return [tensor]


def _unstacked(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take apart what big_vision's scan stacks: all blocks' arrays on a first axis."""
    own = {}
    for name, array in arrays.items():
        if name.startswith(_SCANNED) and array.ndim:
            part = name.removeprefix(_SCANNED)
            for index, one in enumerate(array):
                own[f"Transformer/encoderblock_{index}/{part}"] = one
        else:
            own[name] = array
    return own


def _numbering(own: Mapping[str, Tensor]) -> _Numbering:
    old = any(name.startswith("Transformer/encoderblock_0/MlpBlock_3/") for name in own)
    return _GOOGLE if old else _BIG_VISION


def _vit_entries(
    depth: int, backbone: tuple[int, ...] | None, numbering: _Numbering
) -> Iterator[Entry]:
    yield Entry("cls_token", ("cls",), "plain")
    yield Entry("pos_embed", (numbering.pos_embed,), "plain")
    yield from _affine("patch_embed.proj", "embedding", "conv")
    if backbone is not None:
        yield from _hybrid_entries(backbone)
    for index in range(depth):
        ours, theirs = f"blocks.{index}", f"Transformer/encoderblock_{index}"
        yield from _norm(f"{ours}.norm1", f"{theirs}/LayerNorm_0")
        attention = f"{theirs}/{numbering.attention}"
        yield from _heads(f"{ours}.attn.qkv", attention, ("query", "key", "value"))
        yield from _affine(f"{ours}.attn.proj", f"{attention}/out", "merge")
        yield from _norm(f"{ours}.norm2", f"{theirs}/{numbering.norm}")
        yield from _mlp(f"{ours}.mlp", f"{theirs}/{numbering.mlp}")
    yield from _norm("norm", "Transformer/encoder_norm")
    yield Entry("attn_pool.latent", ("MAPHead_0/probe",), "plain")
    attention = "MAPHead_0/MultiHeadDotProductAttention_0"
    yield from _heads("attn_pool.q", attention, ("query",))
    yield from _heads("attn_pool.kv", attention, ("key", "value"))
    yield from _affine("attn_pool.proj", f"{attention}/out", "merge")
    yield from _norm("attn_pool.norm", "MAPHead_0/LayerNorm_0")
    yield from _mlp("attn_pool.mlp", "MAPHead_0/MlpBlock_0")
    yield from _affine("pre_logits.fc", "pre_logits", "dense")
    yield from _affine("head", "head", "dense")


def _affine(ours: str, theirs: str, kind: Kind) -> Iterator[Entry]:
    yield Entry(f"{ours}.weight", (f"{theirs}/kernel",), kind)
    yield Entry(f"{ours}.bias", (f"{theirs}/bias",), "flat")


def _norm(ours: str, theirs: str, kind: Kind = "flat") -> Iterator[Entry]:
    yield Entry(f"{ours}.weight", (f"{theirs}/scale",), kind)
    yield Entry(f"{ours}.bias", (f"{theirs}/bias",), kind)


def _heads(ours: str, theirs: str, parts: tuple[str, ...]) -> Iterator[Entry]:
    kernels = tuple(f"{theirs}/{part}/kernel" for part in parts)
    yield Entry(f"{ours}.weight", kernels, "heads")
    biases = tuple(f"{theirs}/{part}/bias" for part in parts)
    yield Entry(f"{ours}.bias", biases, "heads_bias")


def _mlp(ours: str, theirs: str) -> Iterator[Entry]:
    yield from _affine(f"{ours}.fc1", f"{theirs}/Dense_0", "dense")
    yield from _affine(f"{ours}.fc2", f"{theirs}/Dense_1", "dense")


def _hybrid_entries(backbone: tuple[int, ...]) -> Iterator[Entry]:
    root = "patch_embed.backbone"
    stem = f"{root}.stem" if backbone else root
    yield Entry(f"{stem}.conv.weight", ("conv_root/kernel",), "conv")
    yield from _norm(f"{stem}.norm", "gn_root")
    for stage, count in enumerate(backbone):
        for unit in range(count):
            ours = f"{root}.stages.{stage}.blocks.{unit}"
            theirs = f"block{stage + 1}/unit{unit + 1}"
            pairs = [(f"conv{n}", f"conv{n}", f"norm{n}", f"gn{n}") for n in (1, 2, 3)]
            if unit == 0:
                pairs.append(("downsample.conv", "conv_proj", "downsample.norm", "gn_proj"))
            for conv, their_conv, norm, their_norm in pairs:
                kernel = f"{theirs}/{their_conv}/kernel"
                yield Entry(f"{ours}.{conv}.weight", (kernel,), "conv")
                yield from _norm(f"{ours}.{norm}", f"{theirs}/{their_norm}", "norm4")


def _bit_entries(layers: tuple[int, ...]) -> Iterator[Entry]:
    def conv(ours: str, theirs: str) -> Entry:
        return Entry(f"{ours}.weight", (f"{theirs}/standardized_conv2d/kernel",), "conv")

    def norm(ours: str, theirs: str) -> Iterator[Entry]:
        yield Entry(f"{ours}.weight", (f"{theirs}/group_norm/gamma",), "flat")
        yield Entry(f"{ours}.bias", (f"{theirs}/group_norm/beta",), "flat")

    yield conv("stem.conv", "resnet/root_block")
    for stage, count in enumerate(layers):
        for unit in range(count):
            ours = f"stages.{stage}.blocks.{unit}"
            theirs = f"resnet/block{stage + 1}/unit{unit + 1:02d}"
            for number, letter in enumerate("abc", 1):
                yield conv(f"{ours}.conv{number}", f"{theirs}/{letter}")
                yield from norm(f"{ours}.norm{number}", f"{theirs}/{letter}")
            if unit == 0:
                yield conv(f"{ours}.downsample.conv", f"{theirs}/a/proj")
    yield from norm("norm", "resnet")
    yield from _affine("head.fc", "resnet/head/conv2d", "conv")


def _bit_units(own: Mapping[str, Tensor]) -> tuple[int, ...]:
    return _counts(own, r"resnet/block(\d+)/unit(\d+)/a/standardized_conv2d/kernel")


def _counts(own: Mapping[str, Tensor], pattern: str) -> tuple[int, ...]:
    """Count the units of each stage from the names."""
    found = [m for m in (re.fullmatch(pattern, name) for name in own) if m]
    stages = [int(m[1]) for m in found]
    return tuple(stages.count(stage) for stage in sorted(set(stages)))


def _bit_config(own: Mapping[str, Tensor]) -> ModelConfig:
    units = _bit_units(own)
    depth = next((depth for depth, layers in RESNETS.items() if layers == units), None)
    if depth is None:
        raise UserError(f"no BiT ResNet has {units} units in its stages")
    width = own[_BIT_ROOT].shape[-1] // 64
    head = own.get("resnet/head/conv2d/bias")
    num_classes = 0 if head is None else head.numel()
    return ModelConfig(variant=f"R{depth}x{width}", num_classes=num_classes)


def _vit_config(own: Mapping[str, Tensor], numbering: _Numbering) -> ModelConfig:
    """Read the model off the arrays' shapes."""
    block = "Transformer/encoderblock_0"
    query = f"{block}/{numbering.attention}/query/kernel"
    for name in (query, f"{block}/{numbering.mlp}/Dense_0/kernel", numbering.pos_embed):
        if name not in own:
            raise UserError(f"the weights have no {name}: not a whole Vision Transformer")
    dim, num_heads, _ = own[query].shape
    blocks = {m[1] for m in (re.match(r"Transformer/encoderblock_(\d+)/", n) for n in own) if m}
    fields: dict[str, Any] = {
        "embed_dim": dim,
        "depth": len(blocks),
        "num_heads": num_heads,
        "mlp_dim": own[f"{block}/{numbering.mlp}/Dense_0/kernel"].shape[1],
        "class_token": "cls" in own,
        # jax.nn.gelu is the tanh form unless told otherwise; flax's and the code's epsilon is 1e-6.
        "act": "gelu_tanh",
        "norm_eps": 1e-6,
        "head": "mlp" if "pre_logits/kernel" in own else "linear",
        "num_classes": own["head/bias"].numel() if "head/bias" in own else 0,
        "in_chans": own["conv_root/kernel" if "conv_root/kernel" in own else "embedding/kernel"]
        .shape[2],
    }  # fmt: skip
    if "MAPHead_0/probe" in own:
        fields["global_pool"] = "map"
    elif "cls" not in own:
        # Their last norm is before the pooling.
        fields |= {"global_pool": "avg", "fc_norm": False}
    if numbering is _BIG_VISION and "cls" in own:
        # Positions are added before the class token joins.
        fields["no_embed_class"] = True
    rows = own[numbering.pos_embed].shape[1] - (numbering is _GOOGLE and "cls" in own)
    variant, stride = _variant(own, fields)
    return ModelConfig(variant=variant, img_size=math.isqrt(max(rows, 1)) * stride, **fields)


def _variant(own: Mapping[str, Tensor], fields: Mapping[str, Any]) -> tuple[str, int]:
    """Name the size, the nearest one that the overrides make right, and the stride of a token."""
    wanted = tuple(fields[name] for name in ("embed_dim", "depth", "num_heads", "mlp_dim"))
    exact = (
        name
        for name, size in SIZES.items()
        if (size.embed_dim, size.depth, size.num_heads, size.mlp_dim) == wanted
    )
    size = next(exact, "B")
    if "conv_root/kernel" not in own:
        patch = own["embedding/kernel"].shape[0]
        return f"{size}/{patch}", patch
    units = _counts(own, r"block(\d+)/unit(\d+)/conv1/kernel")
    for backbone, row in BACKBONES.items():
        for patch, layers in row.items():
            if layers == units:
                # R+Ti/16 has 8 x 8 patches on a map that is 4 times smaller.
                return f"{backbone}+{size}/{patch}", patch if layers else 32
    raise UserError(f"no hybrid's ResNet has {units} units in its stages")
