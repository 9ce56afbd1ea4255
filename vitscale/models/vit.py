"""The Vision Transformer (arXiv:2010.11929), with timm's module and parameter names.

State dicts move to and from timm as they are; the paper's hidden head layer, which timm dropped, is
`pre_logits.fc`. Initialisation and dropout places are those of the paper's published code.

Axes: B micro batch, C channels, H W pixels, N tokens, D embed_dim, K classes, h heads, d head_dim.
"""

from collections import OrderedDict

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitscale.config.errors import UserError
from vitscale.config.model import ModelConfig
from vitscale.config.variants import resolve_shape
from vitscale.models.blocks import BLOCKS, AttentionPool
from vitscale.models.hybrid import HybridEmbed
from vitscale.models.layers import (
    LecunConv2d,
    LecunLinear,
    PatchDropout,
    ZeroLinear,
    dropout,
    norm_layer,
    reset_all_parameters,
)
from vitscale.models.pos_embed import (
    TABLE_STD,
    Positions2d,
    TablePositions,
    add_rows,
    sincos2d_pos_embed,
)


class PatchEmbed(nn.Module):
    """Cut the image into patches and project each to a token.

    Args:
        in_chans: Channels of the image.
        embed_dim: Token width.
        patch_size: Side of a patch, px.
        bias: Whether the projection has a bias.
    """

    def __init__(self, in_chans: int, embed_dim: int, patch_size: int, bias: bool) -> None:
        super().__init__()
        self.proj = LecunConv2d(in_chans, embed_dim, patch_size, stride=patch_size, bias=bias)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n d"]:
        """Return one token a patch, row by row."""
        return self.proj(images).flatten(2).transpose(1, 2)  # [B, N, D]


class VisionTransformer(nn.Module):
    """Image classifier; a hybrid where the config's variant names a ResNet for the patches.

    Args:
        config: The model section of a recipe; num_classes must be known. 0 means no classifier: the
            output is then what it would have read.

    Raises:
        UserError: The config contradicts itself or leaves num_classes open.

    Source:
        arXiv:2010.11929 sections 3.1 and D.4; initialisation and dropout: vision_transformer,
        models_vit.py; names: timm, VisionTransformer.
    """

    cls_token: nn.Parameter | None
    reg_token: nn.Parameter | None
    pos_embed: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.num_classes is None:
            raise UserError(
                "model.num_classes is not set; give the number of classes, or 0 for no head"
            )
        if problems := list(config.problems()):
            raise UserError("; ".join(problems))
        shape = resolve_shape(config)
        dim = shape.embed_dim
        self.config = config
        self.shape = shape
        self.num_classes = config.num_classes
        self.num_features = dim
        self.num_prefix_tokens = shape.num_prefix_tokens
        self.grad_checkpointing = config.grad_checkpointing

        self.patch_embed = self._build_patch_embed()
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim)) if config.class_token else None
        self.reg_token = None
        if config.reg_tokens:
            self.reg_token = nn.Parameter(torch.empty(1, config.reg_tokens, dim))
        self._build_positions()
        self.pos_drop = dropout(config.drop_rate)
        self.patch_drop: nn.Module = nn.Identity()
        if config.patch_drop_rate > 0:
            self.patch_drop = PatchDropout(config.patch_drop_rate, shape.num_prefix_tokens)
        self.norm_pre = norm_layer(config, dim) if config.pre_norm else nn.Identity()
        block = BLOCKS[config.block]
        rates = drop_path_rates(config, shape.depth)
        self.blocks = nn.ModuleList(block(config, shape, rate) for rate in rates)
        # As in timm: the average of the tokens is normalised after pooling instead of before.
        after = config.global_pool == "avg" if config.fc_norm is None else config.fc_norm
        norm = norm_layer(config, dim) if config.final_norm else nn.Identity()
        self.norm = nn.Identity() if after else norm
        self.attn_pool = AttentionPool(config, shape) if config.global_pool == "map" else None
        self.fc_norm = norm if after else nn.Identity()
        self.pre_logits: nn.Module = nn.Identity()
        if config.head == "mlp":
            fc = LecunLinear(dim, dim)
            self.pre_logits = nn.Sequential(OrderedDict(fc=fc, act=nn.Tanh()))
        self.head: nn.Module = nn.Identity()
        if config.num_classes > 0:
            self.head = ZeroLinear(dim, config.num_classes, config.head_bias)
        self.reset_parameters()

    def _build_patch_embed(self) -> nn.Module:
        config, shape = self.config, self.shape
        # The norm before the blocks brings a bias of its own.
        bias = not config.pre_norm
        if shape.backbone is not None:
            return HybridEmbed(
                config.in_chans, shape.embed_dim, shape.patch_size, bias, shape.backbone
            )
        return PatchEmbed(config.in_chans, shape.embed_dim, shape.patch_size, bias)

    def _build_positions(self) -> None:
        config, shape = self.config, self.shape
        kind, place, dim = config.pos_embed, config.pos_embed_at, shape.embed_dim
        num_rows = shape.num_prefix_rows + shape.num_patches
        if kind == "sincos2d":
            # A buffer keeps timm's name in the state dict, while optimizer, weight decay, gradient
            # norm, averaging and ZeRO's partitions, which all go by parameters, never meet it.
            self.register_buffer("pos_embed", torch.empty(1, num_rows, dim))
        elif kind == "learned" and place != "every":
            self.pos_embed = nn.Parameter(torch.empty(1, num_rows, dim))
        else:
            self.pos_embed = None
        self.pos_embed_2d: nn.Module | None = None
        if kind == "learned2d" and place != "every":
            self.pos_embed_2d = Positions2d(shape.grid_size, dim)
        # Modules of their own: ZeRO gathers the parameters of what is called.
        self.block_positions: nn.ModuleList | None = None
        if kind == "learned" and place == "every":
            tables = (TablePositions(num_rows, dim) for _ in range(shape.depth))
            self.block_positions = nn.ModuleList(tables)
        elif kind == "learned2d" and place == "every":
            grids = (Positions2d(shape.grid_size, dim) for _ in range(shape.depth))
            self.block_positions = nn.ModuleList(grids)

    def reset_parameters(self) -> None:
        """Fill the model's own tokens and table; its layers fill their parameters."""
        if self.cls_token is not None:
            nn.init.zeros_(self.cls_token)
        if self.reg_token is not None:
            # Equal tokens would stay equal. Source: timm, VisionTransformer.init_weights.
            nn.init.normal_(self.reg_token, std=1e-6)
        if self.pos_embed is None:
            return
        if self.config.pos_embed == "learned":
            nn.init.normal_(self.pos_embed, std=TABLE_STD)
            return
        shape = self.shape
        table = sincos2d_pos_embed(shape.grid_size, shape.embed_dim, shape.num_prefix_rows)
        with torch.no_grad():
            self.pos_embed.copy_(table)

    def init_weights(self) -> None:
        """Fill all parameters again, for instance after materialising a meta-device model."""
        reset_all_parameters(self)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks' activations in the backward pass, or keep them."""
        self.grad_checkpointing = enable

    def _check_images(self, images: Tensor) -> None:
        side = self.config.img_size
        if images.shape[-2:] != (side, side):
            height, width = images.shape[-2:]
            raise ValueError(
                f"images of {height} x {width} px given to a model for {side} x {side}; "
                f"build it with img_size of the data and load the weights with load_weights"
            )

    def _embed(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n d"]:
        """Return the tokens with their positions, prefix first."""
        if self.shape.backbone is None:
            x = self.patch_embed(images)
        else:
            x = self.patch_embed(images, self.grad_checkpointing)
        # DeepSpeed casts parameters to half precision and leaves a buffer as it is.
        table = None if self.pos_embed is None else self.pos_embed.to(x.dtype)
        at_stem = self.config.pos_embed_at == "stem"
        if at_stem and table is not None and self.shape.num_prefix_rows == 0:
            x, table = x + table, None
        prefix = [token for token in (self.cls_token, self.reg_token) if token is not None]
        if prefix:
            x = torch.cat([*(token.expand(x.shape[0], -1, -1) for token in prefix), x], dim=1)
        if at_stem and table is not None:
            x = x + table
        if at_stem and self.pos_embed_2d is not None:
            x = self.pos_embed_2d(x)
        return self.norm_pre(self.patch_drop(self.pos_drop(x)))

    def _add_positions(self, x: Float[Tensor, "b n d"], index: int) -> Float[Tensor, "b n d"]:
        """Add what this model adds before block `index`."""
        if self.block_positions is not None:
            return self.block_positions[index](x)
        if self.config.pos_embed_at != "shared":
            return x
        if self.pos_embed_2d is not None:
            return self.pos_embed_2d(x)
        return x if self.pos_embed is None else add_rows(x, self.pos_embed)

    def forward_features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n d"]:
        """Return all tokens after the last block, prefix first; normalised if the norm is `norm`.

        Raises:
            ValueError: The images are not of the size that the position table is for.
        """
        self._check_images(images)
        x = self._embed(images)
        recompute = self.grad_checkpointing and torch.is_grad_enabled()
        # The random state is replayed for dropping only.
        replay = self.training and self.config.drop_rate + self.config.drop_path_rate > 0
        for index, block in enumerate(self.blocks):
            x = self._add_positions(x, index)
            if recompute:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=replay)
            else:
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
        if self.attn_pool is not None:
            x = self.attn_pool(x[:, self.num_prefix_tokens :])
        elif self.config.global_pool == "token":
            x = x[:, 0]
        else:
            x = x[:, self.num_prefix_tokens :].mean(dim=1)
        x = self.pre_logits(self.fc_norm(x))
        return x if pre_logits else self.head(x)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b k"]:
        """Return logits, or the pooled features where the model has no head."""
        return self.forward_head(self.forward_features(images))


def drop_path_rates(config: ModelConfig, depth: int) -> list[float]:
    """Return every block's rate of stochastic depth.

    Source:
        Linear growth: arXiv:1603.09382 section 3, as AugReg (arXiv:2106.10270) has it. Constant:
        DeiT III (arXiv:2204.07118), deit, models_v2.py.
    """
    rate = config.drop_path_rate
    if config.drop_path_growth == "constant":
        return [rate] * depth
    return [rate * index / max(depth - 1, 1) for index in range(depth)]
