"""The transformer's blocks, their attention and their MLP, and the pooling by attention.

Axes: B micro batch, N tokens, D embed_dim, M mlp_dim, h heads, d head_dim.
"""

from collections import OrderedDict

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitscale.config.model import ModelConfig
from vitscale.config.variants import ModelShape
from vitscale.models.layers import (
    GateLinear,
    KvLinear,
    MlpLinear,
    QkvLinear,
    XavierLinear,
    activation,
    drop_path,
    dropout,
    layer_scale,
    norm_layer,
)
from vitscale.models.pos_embed import RelativePositions


class Attention(nn.Module):
    """Multi-head self-attention; no dropout on the attention probabilities.

    Args:
        config: The model's config.
        shape: The model's lengths.
    """

    def __init__(self, config: ModelConfig, shape: ModelShape) -> None:
        super().__init__()
        dim = shape.embed_dim
        self.num_heads = shape.num_heads
        self.head_dim = dim // shape.num_heads
        self.qkv = QkvLinear(dim, 3 * dim, bias=config.qkv_bias)
        self.q_norm = norm_layer(config, self.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = norm_layer(config, self.head_dim) if config.qk_norm else nn.Identity()
        self.relative: RelativePositions | None = None
        if config.pos_embed == "relative":
            self.relative = RelativePositions(
                shape.num_patches, shape.num_prefix_tokens, self.head_dim
            )
        self.proj = XavierLinear(dim, dim)
        self.proj_drop = dropout(config.drop_rate)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Let every token read all tokens."""
        b, n, d = x.shape
        qkv = self.qkv(x).view(b, n, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, h, N, d]
        q, k = self.q_norm(q), self.k_norm(k)
        scores = None if self.relative is None else self.relative(q)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=scores)
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(b, n, d)))


class Mlp(nn.Module):
    """Two dense layers with an activation between them.

    Args:
        config: The model's config.
        shape: The model's lengths.
    """

    def __init__(self, config: ModelConfig, shape: ModelShape) -> None:
        super().__init__()
        self.fc1 = MlpLinear(shape.embed_dim, shape.mlp_dim)
        self.act = activation(config)
        self.drop1 = dropout(config.drop_rate)
        self.fc2 = MlpLinear(shape.mlp_dim, shape.embed_dim)
        self.drop2 = dropout(config.drop_rate)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Transform each token by itself."""
        return self.drop2(self.fc2(self.drop1(self.act(self.fc1(x)))))


class SwiGlu(nn.Module):
    """Gated MLP: SiLU of one half of the first layer times the other half.

    Args:
        config: The model's config.
        shape: The model's lengths; mlp_dim is the width after gating.

    Source:
        arXiv:2002.05202; both halves in fc1, the gate first: timm, SwiGLUPacked.
    """

    def __init__(self, config: ModelConfig, shape: ModelShape) -> None:
        super().__init__()
        self.fc1 = GateLinear(shape.embed_dim, 2 * shape.mlp_dim)
        self.drop1 = dropout(config.drop_rate)
        self.fc2 = MlpLinear(shape.mlp_dim, shape.embed_dim)
        self.drop2 = dropout(config.drop_rate)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Transform each token by itself."""
        gate, value = self.fc1(x).chunk(2, dim=-1)  # each [B, N, M]
        return self.drop2(self.fc2(self.drop1(F.silu(gate) * value)))


def _mlp(config: ModelConfig, shape: ModelShape) -> nn.Module:
    return SwiGlu(config, shape) if config.mlp == "swiglu" else Mlp(config, shape)


class Block(nn.Module):
    """Pre-norm encoder block.

    Args:
        config: The model's config.
        shape: The model's lengths.
        drop_path_rate: Stochastic depth of this block.
    """

    def __init__(self, config: ModelConfig, shape: ModelShape, drop_path_rate: float) -> None:
        super().__init__()
        dim = shape.embed_dim
        self.norm1 = norm_layer(config, dim)
        self.attn = Attention(config, shape)
        self.ls1 = layer_scale(config, dim)
        self.drop_path1 = drop_path(drop_path_rate)
        self.norm2 = norm_layer(config, dim)
        self.mlp = _mlp(config, shape)
        self.ls2 = layer_scale(config, dim)
        self.drop_path2 = drop_path(drop_path_rate)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Add attention, then the MLP, to the residual stream."""
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class PairsBlock(nn.Module):
    """Two attentions that read the same input, then two MLPs that do.

    Args:
        config: The model's config.
        shape: The model's lengths.
        drop_path_rate: Stochastic depth of this block.

    Source:
        arXiv:2203.09795 section 3; names: timm, ParallelThingsBlock.
    """

    def __init__(self, config: ModelConfig, shape: ModelShape, drop_path_rate: float) -> None:
        super().__init__()

        def branch(name: str, layer: nn.Module) -> nn.Module:
            parts = OrderedDict([("norm", norm_layer(config, shape.embed_dim)), (name, layer)])
            parts["ls"] = layer_scale(config, shape.embed_dim)
            parts["drop_path"] = drop_path(drop_path_rate)
            return nn.Sequential(parts)

        self.attns = nn.ModuleList(branch("attn", Attention(config, shape)) for _ in range(2))
        self.ffns = nn.ModuleList(branch("mlp", _mlp(config, shape)) for _ in range(2))

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Add both attentions, then both MLPs, to the residual stream."""
        x = x + (self.attns[0](x) + self.attns[1](x))
        return x + (self.ffns[0](x) + self.ffns[1](x))


class InLinear(nn.Linear):
    """First layer of MLP and attention in one, each part initialised as its own layer."""

    def reset_parameters(self) -> None:
        """Fill the parameters."""
        mlp_dim = self.out_features - 3 * self.in_features
        with torch.no_grad():
            nn.init.xavier_uniform_(self.weight[:mlp_dim])
            for part in self.weight[mlp_dim:].chunk(3):
                nn.init.xavier_uniform_(part)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class ParallelBlock(nn.Module):
    """Attention and MLP side by side, behind one norm and one fused projection.

    Without qkv_bias the MLP's first layer keeps its own bias.

    Args:
        config: The model's config.
        shape: The model's lengths.
        drop_path_rate: Stochastic depth of this block.

    Source:
        arXiv:2302.05442 section 2; names: timm, ParallelScalingBlock.
    """

    mlp_bias: nn.Parameter | None

    def __init__(self, config: ModelConfig, shape: ModelShape, drop_path_rate: float) -> None:
        super().__init__()
        dim, mlp_dim = shape.embed_dim, shape.mlp_dim
        self.num_heads = shape.num_heads
        self.head_dim = dim // shape.num_heads
        self.widths = [mlp_dim, dim, dim, dim]
        self.in_norm = norm_layer(config, dim)
        self.in_proj = InLinear(dim, mlp_dim + 3 * dim, bias=config.qkv_bias)
        self.mlp_bias = None if config.qkv_bias else nn.Parameter(torch.empty(mlp_dim))
        self.q_norm = norm_layer(config, self.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = norm_layer(config, self.head_dim) if config.qk_norm else nn.Identity()
        self.mlp_act = activation(config)
        self.mlp_drop = dropout(config.drop_rate)
        self.attn_out_proj = XavierLinear(dim, dim)
        self.mlp_out_proj = MlpLinear(mlp_dim, dim)
        self.out_drop = dropout(config.drop_rate)
        self.ls = layer_scale(config, dim)
        self.drop_path = drop_path(drop_path_rate)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the block's own parameters; its layers fill theirs."""
        if self.mlp_bias is not None:
            nn.init.zeros_(self.mlp_bias)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Add the sum of attention and MLP to the residual stream."""
        b, n, d = x.shape
        hidden, q, k, v = self.in_proj(self.in_norm(x)).split(self.widths, dim=-1)
        if self.mlp_bias is not None:
            hidden = hidden + self.mlp_bias
        heads = (b, n, self.num_heads, self.head_dim)
        q = self.q_norm(q.view(heads)).transpose(1, 2)  # [B, h, N, d]
        k = self.k_norm(k.view(heads)).transpose(1, 2)
        read = F.scaled_dot_product_attention(q, k, v.view(heads).transpose(1, 2))
        read = self.attn_out_proj(read.transpose(1, 2).reshape(b, n, d))
        out = read + self.mlp_out_proj(self.mlp_drop(self.mlp_act(hidden)))
        return x + self.drop_path(self.ls(self.out_drop(out)))


BLOCKS = {"serial": Block, "parallel": ParallelBlock, "pairs": PairsBlock}


class AttentionPool(nn.Module):
    """Pooling by attention: a learned query reads the tokens, and a residual MLP follows.

    Args:
        config: The model's config.
        shape: The model's lengths.

    Source:
        arXiv:2106.04560 section 3.2; layers and initialisation: big_vision, models/vit.py, MAPHead;
        names: timm, AttentionPoolLatent.
    """

    def __init__(self, config: ModelConfig, shape: ModelShape) -> None:
        super().__init__()
        dim = shape.embed_dim
        self.num_heads = shape.num_heads
        self.latent = nn.Parameter(torch.empty(1, 1, dim))
        self.q = XavierLinear(dim, dim)
        self.kv = KvLinear(dim, 2 * dim)
        self.proj = XavierLinear(dim, dim)
        self.norm = norm_layer(config, dim)
        self.mlp = Mlp(config, shape)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the query; the layers fill their own parameters."""
        nn.init.xavier_uniform_(self.latent)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b d"]:
        """Read all tokens that are given."""
        b, n, d = x.shape
        heads = (self.num_heads, d // self.num_heads)
        q = self.q(self.latent.expand(b, -1, -1)).view(b, 1, *heads).transpose(1, 2)
        kv = self.kv(x).view(b, n, 2, *heads)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, h, N, d]
        read = F.scaled_dot_product_attention(q, k, v)
        pooled = self.proj(read.transpose(1, 2).reshape(b, 1, d))
        return (pooled + self.mlp(self.norm(pooled)))[:, 0]
