"""Losses over logits, in float32 whatever the model computes in."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from vitscale.config.recipe import LossConfig

# A class an example, or a distribution over the classes, as MixUp and CutMix give.
Targets = Int[Tensor, " b"] | Float[Tensor, "b k"]
Loss = Callable[[Float[Tensor, "b k"], Targets], Float[Tensor, ""]]


def softmax_loss(
    logits: Float[Tensor, "b k"], targets: Targets, label_smoothing: float = 0.0
) -> Float[Tensor, ""]:
    """Cross-entropy of the softmax, averaged over the batch.

    Args:
        logits: Scores.
        targets: Class ids, or distributions over the classes.
        label_smoothing: Share of the target that is spread over all classes, 0 to 1.
    """
    return F.cross_entropy(logits.float(), targets, label_smoothing=label_smoothing)


def sigmoid_loss(
    logits: Float[Tensor, "b k"],
    targets: Targets,
    over_classes: Literal["sum", "mean"] = "sum",
    multi_hot: bool = False,
) -> Float[Tensor, ""]:
    """Binary cross-entropy of each class, averaged over the batch.

    Args:
        logits: Scores.
        targets: Class ids, or probabilities of each class.
        over_classes: The classes of an example are summed or averaged.
        multi_hot: Every class with a part in a mixed example counts as present in full.

    Source:
        The loss of the ImageNet-21k runs: google-research/vision_transformer issue 34; summing
        over classes: big_vision, utils.sigmoid_xent. Averaged, multi-hot: arXiv:2204.07118
        (DeiT III); facebookresearch/deit, engine.py.
    """
    if targets.ndim == 1:
        targets = F.one_hot(targets, logits.shape[1])
    elif multi_hot:
        targets = targets > 0
    targets = targets.to(torch.float32)
    losses = F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none")
    return losses.sum(dim=1).mean() if over_classes == "sum" else losses.mean()


def build_loss(config: LossConfig) -> Loss:
    """Return the recipe's loss."""
    if config.name == "sigmoid":
        return partial(sigmoid_loss, over_classes=config.over_classes, multi_hot=config.multi_hot)
    return partial(softmax_loss, label_smoothing=config.label_smoothing)
