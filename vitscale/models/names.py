"""The fields behind timm's model names, and the paper's.

A name says architecture and image side; what a pre-training tag (".augreg_in21k") says about
numerics is left to the weights.
"""

import difflib
import re
from typing import Any

from vitscale.config.errors import UserError
from vitscale.config.variants import BACKBONES, RESNETS, SIZES, is_resnet, split_hybrid

# timm's word for each size letter.
_SIZES = {
    "tiny": "Ti",
    "small": "S",
    "medium": "M",
    "base": "B",
    "large": "L",
    "huge": "H",
    "so400m": "So400m",
    "giant": "g",
    "giantopt": "g-opt",
    "gigantic": "G",
}
# Sizes of timm's own that no paper names: width, depth, heads, width of the MLP.
# Source: timm, vision_transformer.py.
_OTHER_SIZES = {
    "xsmall": (256, 10, 4, 1024),
    "wee": (256, 14, 4, 1280),
    "pwee": (256, 16, 4, 1280),
    "little": (320, 14, 5, 1792),
    "mediumd": (512, 20, 8, 2048),
    "betwixt": (640, 12, 10, 2560),
    "so150m": (896, 18, 14, 2304),
    "so150m2": (832, 21, 13, 2176),
}
_AVERAGE = {"class_token": False, "global_pool": "avg", "fc_norm": False}
_REGISTERS = {"class_token": False, "global_pool": "avg", "no_embed_class": True}
_CLIP = {"pre_norm": True, "norm_eps": 1e-5}
_SIGLIP = {"class_token": False, "global_pool": "map"}
_DINOV2 = {"init_values": 1e-5}
# What stands between the patch side and the image side. Source: timm, vision_transformer.py.
_KINDS: dict[str, dict[str, Any]] = {
    "": {},
    "miil": {"qkv_bias": False},
    "gap": _AVERAGE,
    "clip": _CLIP,
    "plus_clip": _CLIP | {"embed_dim": 896, "num_heads": 14, "mlp_dim": 3584},
    "clip_quickgelu": _CLIP | {"act": "quick_gelu"},
    "plus": {"embed_dim": 896, "num_heads": 14, "mlp_dim": 3584, "init_values": 1e-5},
    "siglip": _SIGLIP,
    "siglip_gap": _AVERAGE,
    "reg1_gap": _REGISTERS | {"reg_tokens": 1, "init_values": 1e-5},
    "reg4_gap": _REGISTERS | {"reg_tokens": 4, "init_values": 1e-5},
    "reg4_map": _SIGLIP | {"reg_tokens": 4},
    "dinov2": _DINOV2,
    "reg4_dinov2": _DINOV2 | {"reg_tokens": 4, "no_embed_class": True},
    "36x1": {"depth": 36, "init_values": 1e-5},
    "18x2": {"depth": 18, "init_values": 1e-5, "block": "pairs"},
    "xp": {
        "pre_norm": True,
        "no_embed_class": True,
        "norm": "rmsnorm",
        "block": "parallel",
        "qkv_bias": False,
        "qk_norm": True,
    },
}
_PLAIN_GAP = {"qkv_bias": False, "init_values": 1e-6}
_GIANT_DINOV2 = {
    "embed_dim": 1536, "depth": 40, "num_heads": 24, "mlp_dim": 4096, "mlp": "swiglu",
}  # fmt: skip
_SO150M_GAP = {"no_embed_class": False, "fc_norm": False, "init_values": None}
_SO150M2 = {"no_embed_class": False, "qkv_bias": False}
_TANH = {"act": "gelu_tanh"}
# Where timm's models of one kind differ by size: the name without its image side, with it where
# that decides.
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "vit_medium_patch16_gap": _PLAIN_GAP,
    "vit_betwixt_patch16_gap": _PLAIN_GAP,
    "vit_base_patch16_gap": {"num_heads": 16},
    "vit_base_patch16_reg4_gap": {"init_values": None},
    "vit_so150m_patch16_reg4_gap": _SO150M_GAP,
    "vit_so150m2_patch16_reg1_gap": _SO150M2,
    "vit_pwee_patch16_reg1_gap": {"block": "parallel"},
    "vit_giant_patch14_dinov2": _GIANT_DINOV2,
    "vit_giant_patch14_reg4_dinov2": _GIANT_DINOV2,
    "vit_base_patch32_siglip": _TANH,
    "vit_base_patch32_siglip_gap": _TANH,
    "vit_so400m_patch16_siglip": _TANH,
    "vit_so400m_patch16_siglip_gap": _TANH,
    "vit_giantopt_patch16_siglip": _TANH,
    "vit_giantopt_patch16_siglip_gap": _TANH,
    "vit_large_patch16_siglip_512": _TANH,
    "vit_large_patch16_siglip_gap_512": _TANH,
}
_DEIT3 = {"no_embed_class": True, "init_values": 1e-6}
_INTERN = {"variant": "L/14", "img_size": 448, "init_values": 0.1, "final_norm": False}

_VIT = re.compile(
    r"vit_([a-z0-9]+)_patch([1-9][0-9]*)(?:_([a-z0-9_]+?))??(?:_([1-9][0-9]*))?(_miil)?", re.ASCII
)
_DEIT = re.compile(r"(deit3?)_([a-z]+)_patch([1-9][0-9]*)_([1-9][0-9]*)", re.ASCII)
_HYBRID = re.compile(r"vit_([a-z0-9]+)_r([0-9]*)_s(16|32)(_p8)?_([1-9][0-9]*)", re.ASCII)
_EVA = re.compile(r"eva_large_patch14_([1-9][0-9]*)", re.ASCII)
_FLEXIVIT = re.compile(r"flexivit_(small|base|large)", re.ASCII)
_BIT = re.compile(r"resnetv2_([0-9]+x[1-9])_bit", re.ASCII)


def fields_from_name(name: str) -> dict[str, Any]:
    """Return the fields of ModelConfig that a name stands for.

    Args:
        name: timm's ("vit_base_patch16_224", "vit_base_r50_s16_384", "resnetv2_50x1_bit") or the
            paper's ("B/16", "ViT-B/16", "R50+ViT-B/16", "R50x1").

    Raises:
        UserError: No such name; the message has the nearest ones.
    """
    fields = _timm_vit(name) or _timm_other(name)
    if fields is not None:
        return fields
    variant = name.removeprefix("ViT-").replace("+ViT-", "+")
    if is_resnet(variant):
        return {"variant": variant}
    if "/" in variant:
        split_hybrid(variant)
        return {"variant": variant}
    raise _unknown(name)


def _size(word: str, patch: str) -> dict[str, Any] | None:
    if word in _SIZES:
        return {"variant": f"{_SIZES[word]}/{patch}"}
    if word in _OTHER_SIZES:
        width, depth, heads, hidden = _OTHER_SIZES[word]
        size = {"embed_dim": width, "depth": depth, "num_heads": heads, "mlp_dim": hidden}
        return {"variant": f"M/{patch}"} | size
    return None


def _timm_vit(name: str) -> dict[str, Any] | None:
    """Read "vit_SIZE_patchP_KIND_IMGSIZE"."""
    match = _VIT.fullmatch(name)
    if match is None:
        return None
    word, patch, kind, img_size, suffix = match.groups()
    kind = "miil" if suffix else kind or ""
    size = _size(word, patch)
    # Only DINOv2's names have no image side: theirs is 518.
    if size is None or kind not in _KINDS or (img_size is None and "dinov2" not in kind):
        return None
    base = f"vit_{word}_patch{patch}" + (f"_{kind}" if kind else "")
    exceptions = _EXCEPTIONS.get(base, {}) | _EXCEPTIONS.get(f"{base}_{img_size}", {})
    return size | {"img_size": int(img_size or 518)} | _KINDS[kind] | exceptions


def _timm_other(name: str) -> dict[str, Any] | None:
    """Read the names of hybrids, BiT ResNets and other families."""
    if match := _HYBRID.fullmatch(name):
        word, depth, stride, stem, img_size = match.groups()
        backbone = f"R{depth}"
        known = int(stride) in BACKBONES.get(backbone, {}) and bool(stem) == (backbone == "R")
        if known and word in _SIZES:
            variant = f"{backbone}+{_SIZES[word]}/{stride}"
            return {"variant": variant, "img_size": int(img_size)}
    if (match := _BIT.fullmatch(name)) and is_resnet(f"R{match[1]}"):
        return {"variant": f"R{match[1]}"}
    if (match := _DEIT.fullmatch(name)) and match[2] in _SIZES:
        family, word, patch, img_size = match.groups()
        fields = {"variant": f"{_SIZES[word]}/{patch}", "img_size": int(img_size)}
        return fields | (_DEIT3 if family == "deit3" else {})
    if match := _EVA.fullmatch(name):
        return {"variant": "L/14", "img_size": int(match[1]), "global_pool": "avg"}
    if match := _FLEXIVIT.fullmatch(name):
        return {"variant": f"{_SIZES[match[1]]}/16", "img_size": 240, "no_embed_class": True}
    return dict(_INTERN) if name == "vit_intern300m_patch14_448" else None


def _unknown(name: str) -> UserError:
    match = _VIT.fullmatch(name)
    patch, img_size = (match[2], match[4] or "224") if match else ("16", "224")
    legal = [f"vit_{size}_patch{patch}_{img_size}" for size in _SIZES]
    legal += [f"{size}/{patch}" for size in SIZES]
    legal += ["vit_base_r50_s16_384", "vit_small_r26_s32_224", "vit_tiny_r_s16_p8_224"]
    legal += [f"resnetv2_{depth}x{width}_bit" for depth in RESNETS for width in (1, 2, 3, 4)]
    nearest = difflib.get_close_matches(name, legal, n=3, cutoff=0.4) or [legal[4], "B/16"]
    return UserError(
        f'unknown model "{name}"; nearest: {", ".join(nearest)} '
        "(vit_SIZE_patchP_IMGSIZE, SIZE/P, ViT-SIZE/P, R50+SIZE/P or R50x1, without a pre-training "
        "tag)"
    )
