"""The BiT ResNets (arXiv:1912.11370), the paper's convolutional baselines, with timm's names.

Pre-activation ResNets whose convolutions standardise their weights (arXiv:1903.10520), with
GroupNorm instead of BatchNorm: nothing depends on the batch, and there are no running statistics.

Axes: B micro batch, C channels, H W pixels, K classes.
"""

from collections import OrderedDict
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vitscale.config.errors import UserError
from vitscale.config.model import ModelConfig
from vitscale.config.variants import STAGE_CHANNELS, STEM_CHANNELS, resolve_resnet
from vitscale.models.layers import lecun_normal_, reset_all_parameters

# Source: big_transfer, bit_pytorch/models.py (32 groups); timm, resnetv2.py (1e-8; 1e-10 in BiT's
# own code and 1e-5 beside the deviation in the hybrids': GroupNorm undoes the difference).
_NUM_GROUPS = 32
_WEIGHT_EPS = 1e-8


class StdConv2d(nn.Conv2d):
    """Convolution with standardised weights: mean 0, variance 1 an output channel; no bias.

    Args:
        in_chs: Channels of the input.
        out_chs: Channels of the output.
        kernel_size: Side of the kernel; odd.
        stride: Step.
        same: Pad as TensorFlow's "SAME", which puts the odd column and row behind, instead of
            equally on both sides.
    """

    def __init__(
        self, in_chs: int, out_chs: int, kernel_size: int, stride: int = 1, same: bool = False
    ) -> None:
        # Where the stride is 1 both paddings are one.
        self.pads = same and stride > 1
        padding = 0 if self.pads else kernel_size // 2
        super().__init__(in_chs, out_chs, kernel_size, stride, padding, bias=False)

    def reset_parameters(self) -> None:
        """Fill the weight: flax's default for a convolution."""
        lecun_normal_(self.weight)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
        """Convolve; the weight is standardised in float32."""
        weight = self.weight.float()
        var, mean = torch.var_mean(weight, dim=(1, 2, 3), correction=0, keepdim=True)
        weight = ((weight - mean) * torch.rsqrt(var + _WEIGHT_EPS)).to(x.dtype)
        if self.pads:
            x = _pad_same(x, self.kernel_size[0], self.stride[0], 0.0)
        return F.conv2d(x, weight, None, self.stride, self.padding)


class GroupNormAct(nn.GroupNorm):
    """GroupNorm of 32 groups, and a ReLU unless told otherwise.

    Args:
        num_channels: A multiple of 32.
        act: Whether the ReLU follows.
        zero_init: Start with the scale 0, which silences a residual branch.
    """

    zero_init = False

    def __init__(self, num_channels: int, act: bool = True, zero_init: bool = False) -> None:
        super().__init__(_NUM_GROUPS, num_channels)
        self.act = act
        self.zero_init = zero_init
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the parameters."""
        nn.init.constant_(self.weight, 0.0 if self.zero_init else 1.0)
        nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """Normalise each example's groups of channels."""
        x = super().forward(x)
        return F.relu(x) if self.act else x


class SameMaxPool2d(nn.Module):
    """Max-pool of 3 x 3 with stride 2, padded as TensorFlow's "SAME"."""

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h2 w2"]:
        """Halve the sides, rounded up."""
        return F.max_pool2d(_pad_same(x, 3, 2, -torch.inf), 3, 2)


def _pad_same(x: Tensor, kernel_size: int, stride: int, value: float) -> Tensor:
    """Pad so that the output has ceil(side / stride); the odd row and column go behind."""
    padding = []
    for side in (x.shape[-1], x.shape[-2]):
        steps = -(-side // stride)
        total = max((steps - 1) * stride + kernel_size - side, 0)
        padding += [total // 2, total - total // 2]
    return F.pad(x, padding, value=value)


class Downsample(nn.Module):
    """The shortcut where channels or sides change: a 1 x 1 convolution.

    Args:
        in_chs: Channels of the input.
        out_chs: Channels of the output.
        stride: Step.
        norm: What follows; None: nothing.
    """

    def __init__(
        self, in_chs: int, out_chs: int, stride: int, norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.conv = StdConv2d(in_chs, out_chs, 1, stride=stride)
        self.norm = nn.Identity() if norm is None else norm

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
        """Project."""
        return self.norm(self.conv(x))


class PreActBottleneck(nn.Module):
    """Pre-activation unit: norm and ReLU before each of 1 x 1, 3 x 3 with the stride, 1 x 1.

    Args:
        in_chs: Channels of the input.
        out_chs: Channels of the output; four times the inner ones.
        stride: Of the 3 x 3 convolution and the shortcut.
        project: Whether the shortcut has a convolution.

    Source:
        arXiv:1603.05027; the stride's place: big_transfer, bit_pytorch/models.py.
    """

    def __init__(self, in_chs: int, out_chs: int, stride: int, project: bool) -> None:
        super().__init__()
        mid_chs = out_chs // 4
        self.downsample = Downsample(in_chs, out_chs, stride) if project else None
        self.norm1 = GroupNormAct(in_chs)
        self.conv1 = StdConv2d(in_chs, mid_chs, 1)
        self.norm2 = GroupNormAct(mid_chs)
        self.conv2 = StdConv2d(mid_chs, mid_chs, 3, stride=stride)
        self.norm3 = GroupNormAct(mid_chs)
        self.conv3 = StdConv2d(mid_chs, out_chs, 1)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
        """Add the branch to the shortcut; a projection reads the normalised input."""
        active = self.norm1(x)
        shortcut = x if self.downsample is None else self.downsample(active)
        x = self.conv2(self.norm2(self.conv1(active)))
        return self.conv3(self.norm3(x)) + shortcut


class UnitType(Protocol):
    """How a unit is made."""

    def __call__(self, in_chs: int, out_chs: int, stride: int, project: bool) -> nn.Module:
        """Make one."""


class Stage(nn.Module):
    """Units of one width; the first changes channels and sides.

    Args:
        unit: What the units are.
        in_chs: Channels of the input.
        out_chs: Channels of the output.
        count: Units.
        stride: Of the first unit.
    """

    def __init__(self, unit: UnitType, in_chs: int, out_chs: int, count: int, stride: int) -> None:
        super().__init__()
        first = unit(in_chs, out_chs, stride, True)
        rest = (unit(out_chs, out_chs, 1, False) for _ in range(count - 1))
        self.blocks = nn.ModuleList([first, *rest])

    def forward(self, x: Float[Tensor, "b c h w"], recompute: bool) -> Float[Tensor, "b c2 h2 w2"]:
        """Run all units, keeping their inputs only where `recompute` and gradients are wanted."""
        for block in self.blocks:
            if recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        return x


class ZeroConv2d(nn.Conv2d):
    """Classifier as a 1 x 1 convolution, BiT's form: zero weight, constant bias.

    Args:
        in_chs: Channels of the features.
        out_chs: Number of classes.
        bias_value: What the bias starts at.
    """

    bias_value = 0.0

    def __init__(self, in_chs: int, out_chs: int, bias_value: float) -> None:
        super().__init__(in_chs, out_chs, 1)
        self.bias_value = bias_value
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the parameters."""
        assert self.bias is not None
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, self.bias_value)


class ResNetV2(nn.Module):
    """Image classifier.

    Args:
        config: The model section of a recipe; num_classes must be known. 0 means no classifier: the
            output is then what it would have read.

    Raises:
        UserError: The config contradicts itself or leaves num_classes open.

    Source:
        big_transfer, bit_pytorch/models.py; names: timm, ResNetV2.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.num_classes is None:
            raise UserError(
                "model.num_classes is not set; give the number of classes, or 0 for no head"
            )
        if problems := list(config.problems()):
            raise UserError("; ".join(problems))
        shape = resolve_resnet(config)
        self.config = config
        self.shape = shape
        self.num_classes = config.num_classes
        self.num_features = shape.num_features
        self.grad_checkpointing = config.grad_checkpointing
        channels = [c * shape.width_factor for c in (STEM_CHANNELS, *STAGE_CHANNELS)]
        conv = StdConv2d(config.in_chans, channels[0], 7, stride=2)
        # The border is 0 and not minus infinity: BiT's root pads before it pools.
        pad, pool = nn.ConstantPad2d(1, 0.0), nn.MaxPool2d(3, 2)
        self.stem = nn.Sequential(OrderedDict(conv=conv, pad=pad, pool=pool))
        self.stages = nn.ModuleList(
            Stage(PreActBottleneck, channels[k], channels[k + 1], count, 1 if k == 0 else 2)
            for k, count in enumerate(shape.layers)
        )
        self.norm = GroupNormAct(shape.num_features)
        fc: nn.Module = nn.Identity()
        if config.num_classes > 0:
            fc = ZeroConv2d(shape.num_features, config.num_classes, config.head_bias)
        self.head = nn.Sequential(OrderedDict(fc=fc))

    def init_weights(self) -> None:
        """Fill all parameters again, for instance after materialising a meta-device model."""
        reset_all_parameters(self)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the units' activations in the backward pass, or keep them."""
        self.grad_checkpointing = enable

    def forward_features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
        """Return the last map, normalised. Any image size will do."""
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x, self.grad_checkpointing)
        return self.norm(x)

    def forward_head(
        self, x: Float[Tensor, "b c h w"], pre_logits: bool = False
    ) -> Float[Tensor, "b k"]:
        """Average the map and classify it.

        Args:
            x: What forward_features returned.
            pre_logits: Stop before the classifier and return the features it would read.
        """
        x = x.mean(dim=(2, 3), keepdim=True)
        return (x if pre_logits else self.head(x)).flatten(1)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b k"]:
        """Return logits, or the pooled features where the model has no head."""
        return self.forward_head(self.forward_features(images))
