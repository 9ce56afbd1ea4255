"""The Vision Transformer (arXiv:2010.11929), with timm's module and parameter names.

State dicts move to and from timm as they are; the paper's hidden head layer, which timm dropped, is
`pre_logits.fc`. Initialisation and dropout places are those of the paper's published code.

Axes: B micro batch, C channels, H W pixels, N tokens, D embed_dim, K classes, h heads, d head_dim.
"""

import math
from collections import OrderedDict

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vitscale.config.errors import UserError
from vitscale.config.recipe import ModelConfig
from vitscale.config.variants import ModelShape, resolve_shape
from vitscale.models.pos_embed import sincos2d_pos_embed

# Standard deviation of a unit normal cut at 2 sigma; dividing by it restores the wanted variance.
# Source: jax.nn.initializers.variance_scaling.
_CUT_NORMAL_STD = 0.87962566103423978


# Each layer below fills its own parameters in reset_parameters, so that they are right as soon as
# the layer exists. ZeRO's partitioned construction takes a layer's tensors away at that moment.


class XavierLinear(nn.Linear):
    """Attention projection: Xavier-uniform weight, zero bias."""

    def reset_parameters(self) -> None:
        """Fill the parameters."""
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class QkvLinear(XavierLinear):
    """Fused query, key and value projection, initialised as three separate ones."""

    def reset_parameters(self) -> None:
        """Fill the parameters."""
        bound = math.sqrt(6 / (self.in_features + self.out_features // 3))
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class MlpLinear(nn.Linear):
    """Dense layer of a block's MLP: Xavier-uniform weight, bias of deviation 1e-6."""

    def reset_parameters(self) -> None:
        """Fill the parameters."""
        nn.init.xavier_uniform_(self.weight)
        nn.init.normal_(self.bias, std=1e-6)


class LecunLinear(nn.Linear):
    """Hidden layer of the head: LeCun-normal weight, zero bias (flax's default)."""

    def reset_parameters(self) -> None:
        """Fill the parameters."""
        _lecun_normal_(self.weight)
        nn.init.zeros_(self.bias)


class LecunConv2d(nn.Conv2d):
    """Patch projection: LeCun-normal weight, zero bias (flax's default)."""

    def reset_parameters(self) -> None:
        """Fill the parameters."""
        _lecun_normal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class ZeroLinear(nn.Linear):
    """Classifier: zero weight, constant bias.

    Args:
        in_features: Width of the features.
        out_features: Number of classes.
        bias_value: What the bias starts at.
    """

    bias_value = 0.0

    def __init__(self, in_features: int, out_features: int, bias_value: float) -> None:
        super().__init__(in_features, out_features)
        self.bias_value = bias_value
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the parameters."""
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, self.bias_value)


def _lecun_normal_(weight: Tensor) -> None:
    std = math.sqrt(1 / weight[0].numel()) / _CUT_NORMAL_STD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def _dropout(rate: float) -> nn.Module:
    # Dropout of rate 0 would still launch a kernel.
    return nn.Dropout(rate) if rate > 0 else nn.Identity()


class PatchEmbed(nn.Module):
    """Cut the image into patches and project each to a token.

    Args:
        in_chans: Channels of the image.
        embed_dim: Token width.
        patch_size: Side of a patch, px.
    """

    def __init__(self, in_chans: int, embed_dim: int, patch_size: int) -> None:
        super().__init__()
        self.proj = LecunConv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n d"]:
        """Return one token a patch, row by row."""
        return self.proj(images).flatten(2).transpose(1, 2)  # [B, N, D]


class Attention(nn.Module):
    """Multi-head self-attention; no dropout on the attention probabilities.

    Args:
        dim: Token width.
        num_heads: Heads; divides dim.
        qkv_bias: Whether the fused projection has a bias.
        drop_rate: Dropout after the output projection.
    """

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool, drop_rate: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = QkvLinear(dim, 3 * dim, bias=qkv_bias)
        self.proj = XavierLinear(dim, dim)
        self.proj_drop = _dropout(drop_rate)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Let every token read all tokens."""
        b, n, d = x.shape
        qkv = self.qkv(x).view(b, n, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, h, N, d]
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(b, n, d)))


class Mlp(nn.Module):
    """Two dense layers with a GELU between them.

    Args:
        dim: Token width.
        hidden_dim: Width between the layers.
        act: "gelu" (erf) or "gelu_tanh".
        drop_rate: Dropout after each layer.
    """

    def __init__(self, dim: int, hidden_dim: int, act: str, drop_rate: float) -> None:
        super().__init__()
        self.fc1 = MlpLinear(dim, hidden_dim)
        self.act = nn.GELU(approximate="tanh" if act == "gelu_tanh" else "none")
        self.drop1 = _dropout(drop_rate)
        self.fc2 = MlpLinear(hidden_dim, dim)
        self.drop2 = _dropout(drop_rate)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Transform each token by itself."""
        return self.drop2(self.fc2(self.drop1(self.act(self.fc1(x)))))


class Block(nn.Module):
    """Pre-norm encoder block.

    Args:
        config: The model's config.
        shape: The model's lengths.
    """

    def __init__(self, config: ModelConfig, shape: ModelShape) -> None:
        super().__init__()
        dim = shape.embed_dim
        self.norm1 = nn.LayerNorm(dim, eps=config.norm_eps)
        self.attn = Attention(dim, shape.num_heads, config.qkv_bias, config.drop_rate)
        self.norm2 = nn.LayerNorm(dim, eps=config.norm_eps)
        self.mlp = Mlp(dim, shape.mlp_dim, config.act, config.drop_rate)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Add attention, then the MLP, to the residual stream."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Image classifier.

    Args:
        config: The model section of a recipe; num_classes must be known. 0 means no classifier: the
            output is then what it would have read.

    Raises:
        UserError: The config contradicts itself or leaves num_classes open.

    Source:
        arXiv:2010.11929 section 3.1; initialisation and dropout: vision_transformer, models_vit.py;
        names: timm, VisionTransformer.
    """

    cls_token: nn.Parameter | None
    pos_embed: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.num_classes is None:
            raise UserError(
                "model.num_classes is not set; give the number of classes, or 0 for no head"
            )
        shape = resolve_shape(config)
        dim = shape.embed_dim
        self.config = config
        self.shape = shape
        self.num_classes = config.num_classes
        self.num_prefix_tokens = shape.num_prefix_tokens
        self.grad_checkpointing = config.grad_checkpointing

        self.patch_embed = PatchEmbed(config.in_chans, dim, shape.patch_size)
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim)) if config.class_token else None
        table = torch.empty(1, shape.num_prefix_tokens + shape.num_patches, dim)
        if config.pos_embed == "learned":
            self.pos_embed = nn.Parameter(table)
        else:
            # A buffer keeps timm's name in the state dict, while optimizer, weight decay, gradient
            # norm, averaging and ZeRO's partitions, which all go by parameters, never meet it.
            self.register_buffer("pos_embed", table)
        self.pos_drop = _dropout(config.drop_rate)
        self.blocks = nn.ModuleList(Block(config, shape) for _ in range(shape.depth))
        # As in timm: the average of the tokens is normalised after pooling instead of before.
        average = config.global_pool == "avg"
        norm = nn.LayerNorm(dim, eps=config.norm_eps)
        self.norm = nn.Identity() if average else norm
        self.fc_norm = norm if average else nn.Identity()
        self.pre_logits: nn.Module = nn.Identity()
        if config.head == "mlp":
            fc = LecunLinear(dim, dim)
            self.pre_logits = nn.Sequential(OrderedDict(fc=fc, act=nn.Tanh()))
        self.head: nn.Module = nn.Identity()
        if config.num_classes > 0:
            self.head = ZeroLinear(dim, config.num_classes, config.head_bias)
        self._init_tables()

    def _init_tables(self) -> None:
        if self.cls_token is not None:
            nn.init.zeros_(self.cls_token)
        if self.config.pos_embed == "learned":
            nn.init.normal_(self.pos_embed, std=0.02)
            return
        shape = self.shape
        table = sincos2d_pos_embed(shape.grid_size, shape.embed_dim, shape.num_prefix_tokens)
        with torch.no_grad():
            self.pos_embed.copy_(table)

    def init_weights(self) -> None:
        """Fill all parameters again, for instance after materialising a meta-device model."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d | nn.LayerNorm):
                module.reset_parameters()
        self._init_tables()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks' activations in the backward pass, or keep them."""
        self.grad_checkpointing = enable

    def forward_features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n d"]:
        """Return all tokens after the last block, prefix first; normalised if pool is "token".

        Raises:
            ValueError: The images are not of the size that the position table is for.
        """
        side = self.config.img_size
        if images.shape[-2:] != (side, side):
            height, width = images.shape[-2:]
            raise ValueError(
                f"images of {height} x {width} px given to a model for {side} x {side}; "
                f"build it with img_size of the data and load the weights with load_weights"
            )
        x = self.patch_embed(images)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        # DeepSpeed casts parameters to half precision and leaves a buffer as it is.
        x = self.pos_drop(x + self.pos_embed.to(x.dtype))
        if self.grad_checkpointing and torch.is_grad_enabled():
            # The random state is replayed for dropout only.
            replay = self.training and self.config.drop_rate > 0
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=replay)
        else:
            for block in self.blocks:
                x = block(x)
        return self.norm(x)

    def forward_head(
        self, x: Float[Tensor, "b n d"], pre_logits: bool = False
    ) -> Float[Tensor, "b k"]:
        """Pool the tokens and classify them.

        Args:
            x: What forward_features returned.
            pre_logits: Stop before the classifier and return the features it would read.
        """
        if self.config.global_pool == "token":
            x = x[:, 0]
        else:
            x = x[:, self.num_prefix_tokens :].mean(dim=1)
        x = self.pre_logits(self.fc_norm(x))
        return x if pre_logits else self.head(x)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b k"]:
        """Return logits, or the pooled features where the model has no head."""
        return self.forward_head(self.forward_features(images))
