"""The hybrid's patch embedding: tokens from the last map of a ResNet (arXiv:2010.11929, 3.1).

Its ResNet is the post-activation kind, with weight standardisation and GroupNorm.

Axes: B micro batch, C channels, H W pixels, N tokens, D embed_dim.
"""

from collections import OrderedDict

from jaxtyping import Float
from torch import Tensor, nn

from vitscale.config.variants import STAGE_CHANNELS, STEM_CHANNELS
from vitscale.models.layers import LecunConv2d
from vitscale.models.resnet import (
    Downsample,
    GroupNormAct,
    SameMaxPool2d,
    Stage,
    StdConv2d,
)


class Bottleneck(nn.Module):
    """Post-activation unit: 1 x 1, 3 x 3 with the stride, 1 x 1, each normalised.

    Args:
        in_chs: Channels of the input.
        out_chs: Channels of the output; four times the inner ones.
        stride: Of the 3 x 3 convolution and the shortcut.
        project: Whether the shortcut has a convolution.
    """

    def __init__(self, in_chs: int, out_chs: int, stride: int, project: bool) -> None:
        super().__init__()
        mid_chs = out_chs // 4
        self.downsample: nn.Module | None = None
        if project:
            norm = GroupNormAct(out_chs, act=False)
            self.downsample = Downsample(in_chs, out_chs, stride, norm=norm)
        self.conv1 = StdConv2d(in_chs, mid_chs, 1)
        self.norm1 = GroupNormAct(mid_chs)
        self.conv2 = StdConv2d(mid_chs, mid_chs, 3, stride=stride, same=True)
        self.norm2 = GroupNormAct(mid_chs)
        self.conv3 = StdConv2d(mid_chs, out_chs, 1)
        # The unit starts as its shortcut. Source: vision_transformer, models_resnet.py.
        self.norm3 = GroupNormAct(out_chs, act=False, zero_init=True)
        self.act3 = nn.ReLU()

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
        """Add the branch to the shortcut, then ReLU."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.norm1(self.conv1(x))
        x = self.norm3(self.conv3(self.norm2(self.conv2(x))))
        return self.act3(x + shortcut)


class Backbone(nn.Module):
    """ResNet without a head: stem and stages, all of width 1.

    Args:
        in_chans: Channels of the image.
        layers: Units in each stage.
    """

    def __init__(self, in_chans: int, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = _stem(in_chans)
        self.stages = nn.ModuleList()
        channels = [STEM_CHANNELS, *STAGE_CHANNELS]
        for index, count in enumerate(layers):
            stride = 1 if index == 0 else 2
            units = Stage(Bottleneck, channels[index], channels[index + 1], count, stride)
            self.stages.append(units)

    def forward(
        self, images: Float[Tensor, "b c h w"], recompute: bool
    ) -> Float[Tensor, "b c2 h2 w2"]:
        """Return the last map."""
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x, recompute)
        return x


def _stem(in_chans: int) -> nn.Sequential:
    conv = StdConv2d(in_chans, STEM_CHANNELS, 7, stride=2, same=True)
    norm, pool = GroupNormAct(STEM_CHANNELS), SameMaxPool2d()
    return nn.Sequential(OrderedDict(conv=conv, norm=norm, pool=pool))


class HybridEmbed(nn.Module):
    """Cut the ResNet's map into patches and project each to a token.

    Args:
        in_chans: Channels of the image.
        embed_dim: Token width.
        patch_size: Side of a patch on the map.
        bias: Whether the projection has a bias.
        layers: Units in each stage of the ResNet; none: the stem is all there is of it.
    """

    def __init__(
        self,
        in_chans: int,
        embed_dim: int,
        patch_size: int,
        bias: bool,
        layers: tuple[int, ...],
    ) -> None:
        super().__init__()
        # timm's names: without stages the stem's layers have no "stem." before them.
        self.backbone = Backbone(in_chans, layers) if layers else _stem(in_chans)
        channels = STAGE_CHANNELS[len(layers) - 1] if layers else STEM_CHANNELS
        self.proj = LecunConv2d(channels, embed_dim, patch_size, stride=patch_size, bias=bias)

    def forward(self, images: Float[Tensor, "b c h w"], recompute: bool) -> Float[Tensor, "b n d"]:
        """Return one token a patch, row by row.

        Args:
            images: A multiple of the whole down-sampling on both sides.
            recompute: Keep the units' inputs only for the backward pass.
        """
        if isinstance(self.backbone, Backbone):
            features = self.backbone(images, recompute)
        else:
            features = self.backbone(images)
        return self.proj(features).flatten(2).transpose(1, 2)  # [B, N, D]
