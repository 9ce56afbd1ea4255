"""Building a model from a name: timm's, the paper's, or a config."""

import difflib
import re
from typing import Any

from pydantic import ValidationError

from vitscale.config.errors import UserError
from vitscale.config.recipe import ModelConfig
from vitscale.config.variants import SIZES, parse_variant
from vitscale.models.vit import VisionTransformer

# timm's word for each size letter.
_TIMM_SIZES = {
    "tiny": "Ti",
    "small": "S",
    "medium": "M",
    "base": "B",
    "large": "L",
    "huge": "H",
    "so400m": "So400m",
    "giant": "g",
    "gigantic": "G",
}
_TIMM_NAME = re.compile(r"vit_([a-z0-9]+)_patch([1-9][0-9]*)_([1-9][0-9]*)", re.ASCII)


def create_model(
    name_or_config: str | ModelConfig, num_classes: int | None = None, **overrides: Any
) -> VisionTransformer:
    """Build a model with fresh weights.

    Args:
        name_or_config: "vit_base_patch16_224" (the last number is img_size), "B/16", "ViT-B/16", or
            a model section.
        num_classes: Classes of the head, 0 for no head; None takes it from the config.
        overrides: Any other fields of ModelConfig, which win over the name or the config.

    Raises:
        UserError: Unknown name or field, a value that the field does not take, or no num_classes.
    """
    unknown = [name for name in overrides if name not in ModelConfig.model_fields]
    if unknown:
        raise UserError("; ".join(_unknown_field(name) for name in unknown))
    if isinstance(name_or_config, ModelConfig):
        fields = name_or_config.model_dump()
    else:
        if "variant" in overrides:
            raise UserError(
                f'"{name_or_config}" names a variant and variant = "{overrides["variant"]}" '
                "another; pass one of them"
            )
        fields = _fields_from_name(name_or_config)
    if num_classes is not None:
        fields["num_classes"] = num_classes
    try:
        config = ModelConfig(**(fields | overrides))
    except ValidationError as error:
        faults = (f"{e['loc'][0]} = {e['input']!r}: {e['msg']}" for e in error.errors())
        raise UserError("; ".join(faults)) from error
    return VisionTransformer(config)


def _unknown_field(name: str) -> str:
    legal = sorted(ModelConfig.model_fields)
    nearest = difflib.get_close_matches(name, legal, n=1, cutoff=0.4)
    hint = f'did you mean "{nearest[0]}"?' if nearest else f"the fields are {', '.join(legal)}"
    return f'a model has no field "{name}"; {hint}'


def _fields_from_name(name: str) -> dict[str, Any]:
    match = _TIMM_NAME.fullmatch(name)
    if match and match[1] in _TIMM_SIZES:
        return {"variant": f"{_TIMM_SIZES[match[1]]}/{match[2]}", "img_size": int(match[3])}
    if "/" in name:
        variant = name.removeprefix("ViT-")
        parse_variant(variant)
        return {"variant": variant}
    patch, img_size = (match[2], match[3]) if match else ("16", "224")
    legal = [f"vit_{size}_patch{patch}_{img_size}" for size in _TIMM_SIZES]
    legal += [f"{size}/{patch}" for size in SIZES]
    nearest = difflib.get_close_matches(name, legal, n=3, cutoff=0.4) or [legal[4], "B/16"]
    raise UserError(
        f'unknown model "{name}"; nearest: {", ".join(nearest)} '
        "(vit_SIZE_patchP_IMGSIZE, SIZE/P or ViT-SIZE/P, without a pre-training tag)"
    )
