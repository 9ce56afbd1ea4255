"""Top-1, top-5 and loss of a classifier, each sample counted once on any number of ranks."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from vitscale.data.loader import Batch
from vitscale.distributed import Collectives

Forward = Callable[[UInt8[Tensor, "b c h w"]], Float[Tensor, "b k"]]


@torch.no_grad()
def evaluate_classification(
    forward: Forward, batches: Iterable[Batch], collectives: Collectives | None
) -> dict[str, float | int]:
    """Measure a classifier on a dataset.

    Args:
        forward: From uint8 pictures to logits.
        batches: This rank's part; the same number of batches on every rank, label -1 = padding.
        collectives: Sums over the ranks; None for a lone process.

    Returns:
        top1 and top5 as fractions of 1, loss (mean cross-entropy), num_samples.
    """
    sums = torch.zeros(4, dtype=torch.float64)
    for batch in batches:
        logits = forward(batch.images).float()
        labels = batch.labels.to(logits.device, non_blocking=True)
        real = labels >= 0
        losses = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices
        hits = (best == labels[:, None]) & real[:, None]
        # One small copy a batch: the accelerator's queue stays ahead of it only by a batch.
        sums += torch.stack(
            [hits[:, 0].sum(), hits.any(dim=1).sum(), (losses * real).sum(), real.sum()]
        ).to("cpu", torch.float64)
    if collectives is not None:
        sums = collectives.sum_float(sums)
    top1, top5, loss, count = (float(value) for value in sums)
    if count == 0:
        raise ValueError("the evaluation set is empty")
    return {
        "top1": top1 / count,
        "top5": top5 / count,
        "loss": loss / count,
        "num_samples": int(count),
    }
