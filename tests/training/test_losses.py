import pytest
import torch
from timm.loss import BinaryCrossEntropy

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


def test_losses_take_the_targets_of_mixed_examples():
    targets = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.0, 1.0]])
    p = LOGITS.sigmoid()
    soft = -(targets * LOGITS.log_softmax(1)).sum(1).mean()
    binary = -(targets * p.log() + (1 - targets) * (1 - p).log())

    assert softmax_loss(LOGITS, targets).item() == pytest.approx(soft.item(), rel=1e-6)
    assert sigmoid_loss(LOGITS, targets).item() == pytest.approx(binary.sum(1).mean().item())


@pytest.mark.parametrize("loss", [softmax_loss, sigmoid_loss])
def test_losses_of_classes_are_those_of_one_hot_targets(loss):
    one_hot = torch.eye(3)[LABELS]

    assert loss(LOGITS, one_hot).item() == pytest.approx(loss(LOGITS, LABELS).item(), rel=1e-6)


def test_sigmoid_loss_is_that_of_deit_iii_with_its_leaves():
    # Deit's trainer marks all classes of a mixed example and averages over batch and classes.
    targets = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.0, 1.0]])
    loss = build_loss(LossConfig(name="sigmoid", over_classes="mean", multi_hot=True))
    wanted = torch.nn.BCEWithLogitsLoss()(LOGITS, targets.gt(0.0).float())

    assert loss(LOGITS, targets).item() == pytest.approx(wanted.item())


def test_sigmoid_loss_is_timms():
    targets = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.0, 1.0]])

    for over_classes in ("sum", "mean"):
        timms = BinaryCrossEntropy(
            smoothing=0.0, target_threshold=0.0, sum_classes=over_classes == "sum"
        )
        found = sigmoid_loss(LOGITS, targets, over_classes, multi_hot=True)
        assert found.item() == pytest.approx(timms(LOGITS, targets).item())
