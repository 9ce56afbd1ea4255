import math

import pytest

from vitscale.training.schedule import Schedule, due


def schedule(decay: str, warmup_steps: int = 10, min_lr: float = 0.0) -> Schedule:
    return Schedule(1.0, min_lr, warmup_steps, 110, decay)


@pytest.mark.parametrize(
    ("decay", "step", "lr"),
    [
        ("constant", 60, 1.0),
        ("linear", 10, 1.0),
        ("linear", 60, 0.5),
        ("linear", 110, 0.0),
        ("cosine", 10, 1.0),
        ("cosine", 60, 0.5),
        ("cosine", 35, 0.5 * (1 + math.cos(math.pi / 4))),
        ("cosine", 110, 0.0),
    ],
)
def test_lr_at_follows_the_decay(decay: str, step: int, lr: float):
    assert schedule(decay).lr_at(step) == pytest.approx(lr, abs=1e-12)


def test_lr_at_warms_up_from_zero():
    assert [schedule("constant").lr_at(step) for step in (0, 5, 10)] == [0.0, 0.5, 1.0]


def test_lr_at_ends_at_min_lr():
    assert schedule("linear", min_lr=0.1).lr_at(110) == pytest.approx(0.1)
    assert schedule("cosine", min_lr=0.1).lr_at(500) == pytest.approx(0.1)


def test_lr_at_without_warmup_begins_at_the_peak():
    assert schedule("cosine", warmup_steps=0).lr_at(0) == 1.0


def test_due_leaves_the_last_step_to_the_end():
    assert [step for step in range(1, 13) if due(4, step, 12)] == [4, 8]
    assert not any(due(None, step, 12) for step in range(1, 13))
