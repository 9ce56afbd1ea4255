"""What a ResNet costs: parameters, arithmetic and activations, without torch.

The same figures serve the BiT ResNets and the ResNet of a hybrid; neither has its head in here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from vitscale.config.variants import STAGE_CHANNELS, STEM_CHANNELS


@dataclass(frozen=True, slots=True)
class ResNetCost:
    """Totals of one ResNet without its head.

    Args:
        params: Trained numbers.
        macs: Multiply-accumulates of one example, convolutions only.
        channels: Of the last map.
        kernels: Numbers of all kernels.
        kept: Numbers that the backward pass of one example needs.
        kept_inputs: The part of `kept` that remains when units are recomputed.
        largest_unit: What the largest recomputed unit needs on top.
        pooled: Numbers after the stem's pool, which keeps a 64-bit place for each.
    """

    params: int
    macs: int
    channels: int
    kernels: int
    kept: int
    kept_inputs: int
    largest_unit: int
    pooled: int


@dataclass(frozen=True, slots=True)
class _Unit:
    in_chs: int
    out_chs: int
    in_pixels: int
    out_pixels: int
    project: bool

    @property
    def mid_chs(self) -> int:
        return self.out_chs // 4

    @property
    def kernels(self) -> int:
        mid = self.mid_chs
        branch = self.in_chs * mid + 9 * mid * mid + mid * self.out_chs
        return branch + (self.in_chs * self.out_chs if self.project else 0)

    @property
    def macs(self) -> int:
        mid = self.mid_chs
        branch = self.in_pixels * self.in_chs * mid
        branch += self.out_pixels * (9 * mid * mid + mid * self.out_chs)
        return branch + (self.out_pixels * self.in_chs * self.out_chs if self.project else 0)

    def norm_channels(self, pre_activation: bool) -> int:
        """Channels of all norms."""
        if pre_activation:
            return self.in_chs + 2 * self.mid_chs
        return 2 * self.mid_chs + self.out_chs + (self.out_chs if self.project else 0)

    def kept(self, pre_activation: bool) -> int:
        """Numbers kept besides the unit's input: inputs of norms and of convolutions."""
        middle = 2 * self.mid_chs * (self.in_pixels + self.out_pixels)
        if pre_activation:
            return middle + self.in_chs * self.in_pixels
        # The last ReLU keeps its output, which is the next unit's input.
        last = self.out_chs * self.out_pixels
        # Padding as "SAME" copies the input of the convolution with the stride.
        padded = self.mid_chs * self.in_pixels if self.in_pixels > self.out_pixels else 0
        return middle + padded + last + (last if self.project else 0)


def _units(layers: tuple[int, ...], width_factor: int, side: int) -> Iterator[_Unit]:
    in_chs = STEM_CHANNELS * width_factor
    for index, count in enumerate(layers):
        out_chs = STAGE_CHANNELS[index] * width_factor
        for number in range(count):
            stride = 2 if index > 0 and number == 0 else 1
            out_side = -(-side // stride)
            yield _Unit(in_chs, out_chs, side**2, out_side**2, number == 0)
            in_chs, side = out_chs, out_side


def resnet_cost(
    in_chans: int,
    img_size: int,
    layers: tuple[int, ...],
    width_factor: int,
    pre_activation: bool,
) -> ResNetCost:
    """Count a ResNet without its head.

    Args:
        in_chans: Channels of the image.
        img_size: Side of the image, px.
        layers: Units in each stage; none: the stem alone.
        width_factor: Factor of all channels.
        pre_activation: BiT's units and their norm at the end, or a hybrid's, with one in the stem.
    """
    stem_chs = STEM_CHANNELS * width_factor
    stem_side = -(-img_size // 2)
    side = -(-stem_side // 2)
    units = list(_units(layers, width_factor, side))
    channels = units[-1].out_chs if units else stem_chs
    last_pixels = units[-1].out_pixels if units else side**2
    stem_kernel = 49 * in_chans * stem_chs
    kernels = stem_kernel + sum(unit.kernels for unit in units)
    norms = sum(unit.norm_channels(pre_activation) for unit in units)
    norms += channels if pre_activation else stem_chs
    # The stem: inputs of convolution and pool, and of the norm and ReLU between them.
    stem = in_chans * img_size**2 + (1 if pre_activation else 3) * stem_chs * stem_side**2
    inputs = sum(unit.in_chs * unit.in_pixels for unit in units) + channels * last_pixels
    kept_inputs = stem + inputs + (channels * last_pixels if pre_activation else 0)
    inner = [unit.kept(pre_activation) for unit in units]
    return ResNetCost(
        params=kernels + 2 * norms,
        macs=stem_kernel * stem_side**2 + sum(unit.macs for unit in units),
        channels=channels,
        kernels=kernels,
        kept=kept_inputs + sum(inner),
        kept_inputs=kept_inputs,
        largest_unit=max(inner, default=0),
        pooled=stem_chs * side**2,
    )
