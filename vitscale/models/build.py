"""Building a model from a name: timm's, the paper's, or a config."""

import difflib
from typing import Any

from pydantic import ValidationError

from vitscale.config.errors import UserError
from vitscale.config.model import ModelConfig
from vitscale.config.variants import is_resnet
from vitscale.models.names import fields_from_name
from vitscale.models.resnet import ResNetV2
from vitscale.models.vit import VisionTransformer

Model = VisionTransformer | ResNetV2


def create_model(
    name_or_config: str | ModelConfig, num_classes: int | None = None, **overrides: Any
) -> Model:
    """Build a model with fresh weights.

    Args:
        name_or_config: "vit_base_patch16_224" (the last number is img_size), "B/16", "ViT-B/16",
            "R50+ViT-B/16", "resnetv2_50x1_bit", "R50x1", or a model section.
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
        fields = fields_from_name(name_or_config)
    if num_classes is not None:
        fields["num_classes"] = num_classes
    try:
        config = ModelConfig(**(fields | overrides))
    except ValidationError as error:
        faults = (f"{e['loc'][0]} = {e['input']!r}: {e['msg']}" for e in error.errors())
        raise UserError("; ".join(faults)) from error
    return ResNetV2(config) if is_resnet(config.variant) else VisionTransformer(config)


def _unknown_field(name: str) -> str:
    legal = sorted(ModelConfig.model_fields)
    nearest = difflib.get_close_matches(name, legal, n=1, cutoff=0.4)
    hint = f'did you mean "{nearest[0]}"?' if nearest else f"the fields are {', '.join(legal)}"
    return f'a model has no field "{name}"; {hint}'
