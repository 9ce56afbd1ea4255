"""The model table of a recipe: every choice that decides a model's tensors and arithmetic.

The defaults are timm's plain Vision Transformer. Field names are timm's where it has the option.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from vitscale.config.section import Section
from vitscale.config.variants import is_resnet, resolve_resnet, resolve_shape

Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(ge=0, lt=1)]

# Fields that a ResNet has, too; all others must keep their defaults there.
_RESNET_FIELDS = {
    "variant", "img_size", "in_chans", "num_classes", "global_pool", "head_bias",
    "grad_checkpointing",
}  # fmt: skip


class ModelConfig(Section):
    """Shape of the model and its head."""

    # A Vision Transformer by size letter and patch side in px: "Ti/16", "H/14", any patch side; a
    # hybrid: "R50+B/16", "R26+S/32", "R+Ti/16"; a BiT ResNet by depth and width: "R50x1".
    variant: str = "B/16"
    # Input side, px; a multiple of the patch.
    img_size: Positive = 224
    in_chans: Positive = 3
    # Classes of the head; absent: as many as the training set has.
    num_classes: Annotated[int, Field(ge=0)] | None = None
    # Overrides of the variant's size.
    embed_dim: Positive | None = None
    depth: Positive | None = None
    num_heads: Positive | None = None
    mlp_dim: Positive | None = None
    class_token: bool = True
    # Learned tokens that nothing reads (arXiv:2309.16588).
    reg_tokens: Annotated[int, Field(ge=0)] = 0
    # What the head reads: the class token, the average over the patch tokens, or what a learned
    # query draws from them by attention (arXiv:2106.04560 section 3.2). ResNets always average.
    global_pool: Literal["token", "avg", "map"] = "token"
    # Last norm after pooling instead of before; absent: as timm, with "avg" only.
    fc_norm: bool | None = None
    # Whether there is a last norm.
    final_norm: bool = True
    # Positions (arXiv:2010.11929 D.4): "learned" one row a token; "learned2d" half of the width for
    # the column, half for the row; "relative" scores by distance in every layer's attention.
    pos_embed: Literal["none", "learned", "learned2d", "relative", "sincos2d"] = "learned"
    # Where they enter: after the patches, before every block with its own table, or with one table.
    pos_embed_at: Literal["stem", "every", "shared"] = "stem"
    # Positions for patch tokens only, none for class and register tokens.
    no_embed_class: bool = False
    # A norm between positions and blocks, and no bias in the patch projection (CLIP).
    pre_norm: bool = False
    # "serial": attention, then MLP; "parallel": both at once (arXiv:2302.05442); "pairs": two
    # attentions at once, then two MLPs (arXiv:2203.09795).
    block: Literal["serial", "parallel", "pairs"] = "serial"
    qkv_bias: bool = True
    # Norm of each head's queries and keys.
    qk_norm: bool = False
    # "swiglu" gates the hidden values; mlp_dim is their number after gating (arXiv:2002.05202).
    mlp: Literal["mlp", "swiglu"] = "mlp"
    # LayerScale: what each residual branch is multiplied by at the start; absent: no such layer.
    init_values: Annotated[float, Field(gt=0)] | None = None
    # "mlp" is the paper's pre-training head: one hidden layer with tanh (arXiv:2010.11929, 3.1).
    head: Literal["linear", "mlp"] = "linear"
    # Initial bias of the head; -10 suits the sigmoid loss over many classes.
    head_bias: float = 0.0
    # "gelu" is the erf form (timm), "gelu_tanh" the approximation that the paper's code uses,
    # "quick_gelu" x * sigmoid(1.702 x) (OpenAI's CLIP).
    act: Literal["gelu", "gelu_tanh", "quick_gelu"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    # Dropout after the position embedding, the attention projection and both MLP layers.
    drop_rate: Rate = 0.0
    # Stochastic depth: probability that an example skips a residual branch, at the last block.
    drop_path_rate: Rate = 0.0
    # "linear": growing from 0 at the first block (AugReg); "constant": the same at all (DeiT III).
    drop_path_growth: Literal["linear", "constant"] = "linear"
    # Part of the patch tokens that is left out of each example in training (arXiv:2212.00794).
    patch_drop_rate: Rate = 0.0
    # Recompute the blocks' activations in the backward pass: less memory, about a third more work.
    grad_checkpointing: bool = False

    def problems(self) -> Iterator[str]:
        """Yield what is wrong between fields that are each right."""
        try:
            if is_resnet(self.variant):
                resolve_resnet(self)
            else:
                resolve_shape(self)
        except ValueError as error:
            yield str(error)
        if not is_resnet(self.variant):
            return
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name not in _RESNET_FIELDS and value != field.default:
                yield (
                    f'model.{name} = {value!r} has no meaning for the ResNet "{self.variant}"; '
                    "leave it out"
                )
        if self.global_pool == "map":
            yield (
                f'model.global_pool = "map" is not for the ResNet "{self.variant}", which averages'
            )
