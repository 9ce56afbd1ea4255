from dataclasses import dataclass

import pytest
import torch

from vitscale.evaluation.classification import evaluate_classification


@dataclass
class Batch:
    images: torch.Tensor
    labels: torch.Tensor


def test_padding_does_not_count():
    logits = torch.tensor([[3.0, 0, 0, 0, 0, 0], [2, 1, 1, 1, 0, 3.0], [0, 1.0, 2.0, 3, 4, 5]])
    batches = [
        Batch(logits[:2], torch.tensor([0, 0])),
        Batch(torch.stack([logits[2], logits[0]]), torch.tensor([1, -1])),
    ]

    result = evaluate_classification(lambda images: images, batches, None)

    assert result["num_samples"] == 3
    assert result["top1"] == pytest.approx(1 / 3)
    assert result["top5"] == pytest.approx(1.0)
    losses = -logits.log_softmax(1)[[0, 1, 2], [0, 0, 1]]
    assert result["loss"] == pytest.approx(losses.mean().item(), rel=1e-6)


def test_an_empty_set_is_refused():
    batches = [Batch(torch.zeros(1, 3), torch.tensor([-1]))]

    with pytest.raises(ValueError, match="empty"):
        evaluate_classification(lambda images: images, batches, None)
