"""Small layers that the models share: dense layers with their initialisation, norms, and dropping.

Each layer fills its own parameters in reset_parameters, so that they are right as soon as the layer
exists. ZeRO's partitioned construction takes a layer's tensors away at that moment.

Axes: B micro batch, N tokens, D embed_dim.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitscale.config.model import ModelConfig

# Standard deviation of a unit normal cut at 2 sigma; dividing by it restores the wanted variance.
# Source: jax.nn.initializers.variance_scaling.
_CUT_NORMAL_STD = 0.87962566103423978


class XavierLinear(nn.Linear):
    """Attention projection: Xavier-uniform weight, zero bias."""

    def reset_parameters(self) -> None:
        """Fill the parameters."""
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class QkvLinear(XavierLinear):
    """Fused query, key and value projection, initialised as three separate ones."""

    num_parts = 3

    def reset_parameters(self) -> None:
        """Fill the parameters."""
        xavier_uniform_parts_(self.weight, self.num_parts)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class KvLinear(QkvLinear):
    """Fused key and value projection, initialised as two separate ones."""

    num_parts = 2


class MlpLinear(nn.Linear):
    """Dense layer of a block's MLP: Xavier-uniform weight, bias of deviation 1e-6."""

    def reset_parameters(self) -> None:
        """Fill the parameters."""
        nn.init.xavier_uniform_(self.weight)
        nn.init.normal_(self.bias, std=1e-6)


class GateLinear(nn.Linear):
    """Fused gate and value of a gated MLP, initialised as two separate layers of an MLP."""

    def reset_parameters(self) -> None:
        """Fill the parameters."""
        xavier_uniform_parts_(self.weight, 2)
        nn.init.normal_(self.bias, std=1e-6)


class LecunLinear(nn.Linear):
    """Hidden layer of the head: LeCun-normal weight, zero bias (flax's default)."""

    def reset_parameters(self) -> None:
        """Fill the parameters."""
        lecun_normal_(self.weight)
        nn.init.zeros_(self.bias)


class LecunConv2d(nn.Conv2d):
    """Patch projection: LeCun-normal weight, zero bias (flax's default)."""

    def reset_parameters(self) -> None:
        """Fill the parameters."""
        lecun_normal_(self.weight)
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


class LayerScale(nn.Module):
    """Learned factor a channel.

    Args:
        dim: Token width.
        init_value: What all factors start at.

    Source:
        arXiv:2103.17239 section 2; name gamma: timm, LayerScale.
    """

    def __init__(self, dim: int, init_value: float) -> None:
        super().__init__()
        self.init_value = init_value
        self.gamma = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the parameters."""
        nn.init.constant_(self.gamma, self.init_value)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Multiply every token."""
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth: leave a residual branch out for some of the examples, in training.

    What stays is divided by its probability, so that the mean is as in evaluation. The choice comes
    from torch's generator, which the training loop seeds by (seed, step, rank).

    Args:
        drop_prob: Probability of leaving out, an example.

    Source:
        arXiv:1603.09382.
    """

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Drop, or scale up."""
        if not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        keep = x.new_empty(x.shape[0], 1, 1).bernoulli_(keep_prob)
        return x * (keep / keep_prob)


class PatchDropout(nn.Module):
    """Leave some patch tokens out of each example, in training; others for every example.

    Args:
        drop_rate: Part of the patches that is left out; at least one stays.
        num_prefix_tokens: Leading tokens that always stay.

    Source:
        arXiv:2212.00794 section 3; arXiv:2208.07220.
    """

    def __init__(self, drop_rate: float, num_prefix_tokens: int) -> None:
        super().__init__()
        self.drop_rate = drop_rate
        self.num_prefix_tokens = num_prefix_tokens

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n_kept d"]:
        """Return the prefix and the patches that stay, in their order."""
        if not self.training:
            return x
        prefix, patches = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        b, n, d = patches.shape
        num_kept = max(1, int(n * (1 - self.drop_rate)))
        draws = torch.rand(b, n, device=x.device)
        kept = draws.topk(num_kept, dim=1, sorted=False).indices.sort(dim=1).values  # [B, N_kept]
        patches = patches.gather(1, kept.unsqueeze(-1).expand(-1, -1, d))
        return torch.cat([prefix, patches], dim=1)


class QuickGelu(nn.Module):
    """The sigmoid approximation of the GELU, in OpenAI's CLIP.

    Source:
        arXiv:1606.08415 section 2.
    """

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Apply it to every number."""
        return x * torch.sigmoid(1.702 * x)


def xavier_uniform_parts_(weight: Tensor, num_parts: int) -> None:
    """Fill equal parts, stacked on the first axis, as so many separate Xavier-uniform matrices."""
    bound = math.sqrt(6 / (weight.shape[1] + weight.shape[0] // num_parts))
    nn.init.uniform_(weight, -bound, bound)


def lecun_normal_(weight: Tensor) -> None:
    """Fill with a normal distribution of variance 1 / fan-in, cut at two deviations."""
    std = math.sqrt(1 / weight[0].numel()) / _CUT_NORMAL_STD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def dropout(rate: float) -> nn.Module:
    """Return dropout, or nothing at rate 0, where it would still launch a kernel."""
    return nn.Dropout(rate) if rate > 0 else nn.Identity()


def drop_path(rate: float) -> nn.Module:
    """Return stochastic depth, or nothing at rate 0."""
    return DropPath(rate) if rate > 0 else nn.Identity()


def layer_scale(config: ModelConfig, dim: int) -> nn.Module:
    """Return the config's LayerScale, or nothing where it has none."""
    return nn.Identity() if config.init_values is None else LayerScale(dim, config.init_values)


def norm_layer(config: ModelConfig, dim: int) -> nn.Module:
    """Return the config's norm over the last axis."""
    norm = nn.RMSNorm if config.norm == "rmsnorm" else nn.LayerNorm
    return norm(dim, eps=config.norm_eps)


def activation(config: ModelConfig) -> nn.Module:
    """Return the config's activation of an MLP."""
    if config.act == "quick_gelu":
        return QuickGelu()
    return nn.GELU(approximate="tanh" if config.act == "gelu_tanh" else "none")


def reset_all_parameters(model: nn.Module) -> None:
    """Fill every parameter of a model anew; each layer knows how."""
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
