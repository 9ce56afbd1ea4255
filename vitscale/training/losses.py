"""Losses over logits, in float32 whatever the model computes in."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from vitscale.config.recipe import LossConfig

Loss = Callable[[Float[Tensor, "b k"], Int[Tensor, " b"]], Float[Tensor, ""]]


def softmax_loss(
    logits: Float[Tensor, "b k"], labels: Int[Tensor, " b"], label_smoothing: float = 0.0
) -> Float[Tensor, ""]:
    """Cross-entropy of the softmax, averaged over the batch.

    Args:
        logits: Scores.
        labels: Class ids.
        label_smoothing: Share of the target that is spread over all classes, 0 to 1.
    """
    return F.cross_entropy(logits.float(), labels, label_smoothing=label_smoothing)


def sigmoid_loss(logits: Float[Tensor, "b k"], labels: Int[Tensor, " b"]) -> Float[Tensor, ""]:
    """Binary cross-entropy of each class, summed over classes, averaged over the batch.

    Args:
        logits: Scores.
        labels: Class ids.

    Source:
        The loss of the ImageNet-21k runs: google-research/vision_transformer issue 34; summing
        over classes: big_vision, utils.sigmoid_xent.
    """
    targets = F.one_hot(labels, logits.shape[1]).to(torch.float32)
    losses = F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none")
    return losses.sum(dim=1).mean()


def build_loss(config: LossConfig) -> Loss:
    """Return the recipe's loss."""
    if config.name == "sigmoid":
        return sigmoid_loss
    return lambda logits, labels: softmax_loss(logits, labels, config.label_smoothing)
