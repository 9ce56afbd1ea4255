import math

import pytest

from vitscale.config.recipe import DataConfig, OptimConfig, RunConfig, RunSection
from vitscale.training.rhythm import schedule_of
from vitscale.training.schedule import Schedule, due


def schedule(decay: str, warmup_steps: int = 10, min_lr: float = 0.0, **rest) -> Schedule:
    return Schedule(1.0, min_lr, warmup_steps, 110, decay, **rest)


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


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine", "rsqrt", "step", "wsd"])
def test_lr_at_warms_up_from_zero(decay: str):
    curve = schedule(decay, cooldown_steps=20, drop_steps=(60,))

    assert [curve.lr_at(step) for step in (0, 5, 10)] == [0.0, 0.5, 1.0]


def test_lr_at_ends_at_min_lr():
    assert schedule("linear", min_lr=0.1).lr_at(110) == pytest.approx(0.1)
    assert schedule("cosine", min_lr=0.1).lr_at(500) == pytest.approx(0.1)
    for decay in ("rsqrt", "wsd"):
        assert schedule(decay, min_lr=0.1, cooldown_steps=20).lr_at(110) == pytest.approx(0.1)


def test_lr_at_without_warmup_begins_at_the_peak():
    assert schedule("cosine", warmup_steps=0).lr_at(0) == 1.0


@pytest.mark.parametrize(
    ("step", "lr"),
    [
        (5_000, 0.5 * 8e-4),
        (10_000, 8e-4),
        (20_000, 8e-4 / math.sqrt(2)),
        (100_000, 8e-4 / math.sqrt(10)),
        (200_000, 8e-4 / math.sqrt(20) * 25_000 / 50_000),
        (225_000, 0.0),
    ],
)
def test_rsqrt_follows_scaling_vision_transformers(step: int, lr: float):
    # Timescale and warm-up 10,000, cool-down 50,000 (arXiv:2106.04560).
    curve = Schedule(8e-4, 0.0, 10_000, 225_000, "rsqrt", 10_000, cooldown_steps=50_000)

    assert curve.lr_at(step) == pytest.approx(lr, rel=1e-12)


@pytest.mark.parametrize(
    ("step", "lr"), [(29, 1.0), (30, 0.1), (59, 0.1), (60, 0.01), (80, 0.001), (109, 0.001)]
)
def test_step_drops_at_its_steps(step: int, lr: float):
    # Big Transfer: a tenth after 30, 60 and 80 of 90 epochs (arXiv:1912.11370).
    curve = schedule("step", drop_steps=(30, 60, 80))

    assert curve.lr_at(step) == pytest.approx(lr)


@pytest.mark.parametrize(("step", "lr"), [(10, 1.0), (90, 1.0), (95, 0.75), (100, 0.5), (110, 0.0)])
def test_wsd_is_stable_until_the_cooldown(step: int, lr: float):
    assert schedule("wsd", cooldown_steps=20).lr_at(step) == pytest.approx(lr)


def test_schedule_of_reads_durations_in_any_unit():
    optim = {
        "rsqrt": {"timescale": "2epochs", "cooldown": "25%"},
        "step": {"drop_at": ["1epochs", "50%"], "drop_factor": 0.2},
    }

    curves = {
        name: schedule_of(
            RunConfig(
                data=DataConfig(train="unused"),
                optim=OptimConfig(lr=1.0, schedule=name, warmup="5%", **leaves),
                batch={"global_batch": 10},
                run=RunSection(duration="100steps"),
            ),
            total_steps=100,
            samples_an_epoch=200,
        )
        for name, leaves in optim.items()
    }

    assert curves["rsqrt"] == Schedule(1.0, 0.0, 5, 100, "rsqrt", 40, 25)
    assert curves["step"] == Schedule(
        1.0, 0.0, 5, 100, "step", drop_steps=(20, 50), drop_factor=0.2
    )


def test_due_leaves_the_last_step_to_the_end():
    assert [step for step in range(1, 13) if due(4, step, 12)] == [4, 8]
    assert not any(due(None, step, 12) for step in range(1, 13))
