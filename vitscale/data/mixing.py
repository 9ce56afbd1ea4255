"""MixUp and CutMix on the training device.

Examples are mixed in pairs: slots 2i and 2i + 1 of the global batch. How is a function of the seed
and the pair's position in the run, so a step's mixed batch is the same on any number of ranks and
in any micro-batches that keep pairs together; others are refused at the start.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from vitscale.config.errors import UserError
from vitscale.config.recipe import AugmentConfig, RunConfig
from vitscale.data.mixture import Mixture
from vitscale.data.order import Order
from vitscale.data.permute import mix64, stream

Uint64 = NDArray[np.uint64]
Float64 = NDArray[np.float64]


def check_pairs(order: Order | Mixture, world_size: int, micro_batch: int) -> None:
    """Refuse a run whose ranks or micro-batches would part the examples of a pair.

    Raises:
        UserError: With what to change.
    """
    batch = order.global_batch
    if batch % 2 or micro_batch % 2:
        raise UserError(
            f"augment.mixup and augment.cutmix mix pairs of examples: batch.global_batch = {batch} "
            f"and batch.micro_batch = {micro_batch} must be even"
        )
    for rank in range(world_size):
        slots = order.rank_slots(rank, world_size)
        if not _are_pairs(slots):
            raise UserError(
                "augment.mixup and augment.cutmix mix neighbouring slots, and with data.lanes = "
                f"{order.lanes} those of {world_size} ranks are not neighbours; set data.lanes to "
                f"a multiple of {2 * world_size} that divides batch.global_batch = {batch}"
            )


def build_mixing(
    config: RunConfig, order: Order | Mixture, world_size: int, micro_batch: int
) -> "Mixing | None":
    """Return what mixes the examples of a run, or None where the recipe does not mix.

    Args:
        config: The recipe; the number of classes is known.
        order: The order of the run.
        world_size: Ranks of the run.
        micro_batch: Examples of one micro-batch.

    Raises:
        UserError: Pairs of examples would be parted.
    """
    if not (config.augment.mixup or config.augment.cutmix):
        return None
    check_pairs(order, world_size, micro_batch)
    assert config.model.num_classes is not None
    return Mixing(config.augment, config.model.num_classes, config.run.seed)


@dataclass(frozen=True)
class Draws:
    """How some pairs are mixed; arrays of one length."""

    # What an example keeps of itself, 0 to 1: of all pixels, or the part of them outside the box.
    shares: Float64
    # CutMix: top, bottom, left, right of what comes from the other one, px; empty with MixUp.
    boxes: NDArray[np.int64]
    is_cut: NDArray[np.bool_]


class Mixing:
    """Mixes the examples of a micro-batch and their labels.

    Args:
        config: The recipe's table.
        num_classes: Classes of the head.
        seed: Seed of the run.

    Source:
        MixUp: arXiv:1710.09412. CutMix: arXiv:1905.04899. One of the two a draw:
        arXiv:2012.12877 (DeiT); pairs that mix each other: timm, Mixup (mode "pair").
    """

    def __init__(self, config: AugmentConfig, num_classes: int, seed: int) -> None:
        self._config, self._num_classes = config, num_classes
        self._key = np.uint64(stream(seed, "mixing"))

    def __call__(
        self,
        images: Float[Tensor, "b c h w"],
        labels: Int[Tensor, " b"],
        positions: Int[Tensor, " b"],
    ) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, "b k"]]:
        """Mix a micro-batch.

        Args:
            images: The model's input.
            labels: Class of each, on the same device.
            positions: Place of each in the order of the run, in host memory.

        Returns:
            Mixed images, and a distribution over the classes for each.
        """
        own = positions.numpy()
        assert _are_pairs(own), own
        draws = self.draw(own[::2] // 2, images.shape[2], images.shape[3])
        device = images.device
        shares = torch.from_numpy(draws.shares).to(device, torch.float32, non_blocking=True)
        weights = shares.view(-1, 1, 1, 1, 1)
        if draws.is_cut.any():
            boxes = torch.from_numpy(draws.boxes).to(device, non_blocking=True)
            is_cut = torch.from_numpy(draws.is_cut).to(device, non_blocking=True)
            outside = ~_inside(boxes, images.shape[2], images.shape[3])
            weights = torch.where(is_cut.view(-1, 1, 1, 1, 1), outside, weights)
        targets = F.one_hot(labels, self._num_classes).to(torch.float32)
        return _mixed(images, weights.to(images.dtype)), _mixed(targets, shares.view(-1, 1, 1))

    def draw(self, pairs: NDArray[np.int64], height: int, width: int) -> Draws:
        """Draw how pairs are mixed.

        Args:
            pairs: Position in the run of the first of each, halved.
            height: Rows of the images, px.
            width: Their columns, px.
        """
        config, keys = self._config, mix64(pairs.astype(np.uint64) ^ self._key)
        switch = config.mix_switch_prob if config.mixup else 1.0
        is_cut = _uniform(keys, 0) < (switch if config.cutmix else 0.0)
        shares = np.ones(len(pairs))
        for chosen, alpha in ((is_cut, config.cutmix), (~is_cut, config.mixup)):
            if alpha:
                shares[chosen] = _beta(keys[chosen], alpha)
        # A box of the same shape as the image and of 1 - share of its area, around any pixel.
        root, sides = np.sqrt(1.0 - shares), np.array([height, width])
        half = (0.5 * root[:, None] * sides).astype(np.int64)
        centre = np.stack([_uniform(keys, 1), _uniform(keys, 2)], axis=1) * sides
        centre = centre.astype(np.int64)
        starts, ends = np.maximum(centre - half, 0), np.minimum(centre + half, sides)
        boxes = np.stack([starts[:, 0], ends[:, 0], starts[:, 1], ends[:, 1]], axis=1)
        left = 1.0 - np.prod(ends - starts, axis=1) / (height * width)
        boxes[~is_cut] = 0
        return Draws(np.where(is_cut, left, shares), boxes, is_cut)


def _are_pairs(slots: NDArray[np.int64]) -> bool:
    """Return whether slots follow each other as 2i, 2i + 1, 2j, 2j + 1."""
    return not (np.any(slots[::2] % 2) or np.any(slots[1::2] != slots[::2] + 1))


def _mixed(values: Tensor, weights: Tensor) -> Tensor:
    """Move each value of a pair towards the other one's, as far as weights are below 1."""
    pairs = values.unflatten(0, (-1, 2))
    return torch.lerp(pairs.flip(1), pairs, weights).flatten(0, 1)


def _inside(boxes: Int[Tensor, "p 4"], height: int, width: int) -> Tensor:
    """Mark the pixels of boxes: [p, 1, 1, h, w]."""
    top, bottom, left, right = boxes.view(-1, 4, 1).unbind(1)
    rows = torch.arange(height, device=boxes.device)
    columns = torch.arange(width, device=boxes.device)
    in_rows, in_columns = (rows >= top) & (rows < bottom), (columns >= left) & (columns < right)
    return (in_rows[:, :, None] & in_columns[:, None, :])[:, None, None]


def _uniform(keys: Uint64, number: int) -> Float64:
    """Draw uniform numbers below 1, `number` telling those of one key apart."""
    bits = mix64(keys ^ mix64(np.array([number], np.uint64))) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _beta(keys: Uint64, alpha: float) -> Float64:
    """Draw from Beta(alpha, alpha).

    Source:
        Joehnk 1964: of two powers of uniform numbers whose sum is at most 1, the first's share.
    """
    shares, pending, number = np.ones(len(keys)), np.arange(len(keys)), 3
    while pending.size:
        first, second = (_uniform(keys[pending], number + i) ** (1.0 / alpha) for i in (0, 1))
        sums = first + second
        fits = (sums <= 1.0) & (sums > 0.0)
        shares[pending[fits]] = first[fits] / sums[fits]
        pending, number = pending[~fits], number + 2
    return shares
