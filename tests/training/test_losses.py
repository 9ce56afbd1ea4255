import pytest
import torch

from vitscale.config.recipe import LossConfig
from vitscale.training.losses import build_loss, sigmoid_loss, softmax_loss

LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.0, 3.0, -2.0]])
LABELS = torch.tensor([0, 2])


def test_softmax_loss_equals_the_definition():
    probabilities = LOGITS.exp() / LOGITS.exp().sum(1, keepdim=True)

    loss = softmax_loss(LOGITS, LABELS)

    assert loss.item() == pytest.approx(-probabilities[[0, 1], LABELS].log().mean().item())


def test_softmax_loss_smooths_over_all_classes():
    log_probabilities = LOGITS.log_softmax(1)
    targets = torch.full((2, 3), 0.3 / 3)
    targets[[0, 1], LABELS] += 0.7

    loss = softmax_loss(LOGITS, LABELS, 0.3)

    assert loss.item() == pytest.approx(-(targets * log_probabilities).sum(1).mean().item())


def test_sigmoid_loss_sums_over_classes_and_averages_over_the_batch():
    targets = torch.eye(3)[LABELS]
    p = LOGITS.sigmoid()
    wanted = -(targets * p.log() + (1 - targets) * (1 - p).log()).sum(1).mean()

    assert sigmoid_loss(LOGITS, LABELS).item() == pytest.approx(wanted.item(), rel=1e-6)


def test_losses_compute_in_float32():
    for name in ("softmax", "sigmoid"):
        loss = build_loss(LossConfig(name=name))(LOGITS.bfloat16(), LABELS)
        assert loss.dtype == torch.float32


def test_build_loss_passes_the_smoothing_on():
    loss = build_loss(LossConfig(label_smoothing=0.3))

    assert loss(LOGITS, LABELS).item() == softmax_loss(LOGITS, LABELS, 0.3).item()
