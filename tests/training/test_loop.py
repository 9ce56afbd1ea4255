"""The order of effects in a step, recorded by parts that only write down that they were called."""

import numpy as np
import pytest
import torch

from vitscale.config.errors import Stopped
from vitscale.training.loop import Actions, TrainState, train
from vitscale.training.rhythm import Rhythm
from vitscale.training.schedule import Schedule


class Recording:
    """Stands where engine, average, recorder and actions stand, and notes the calls."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.calls: list[str] = []
        self.step = 0
        self.stop_after = stop_after

    def note(self, text: str) -> None:
        self.calls.append(text)

    def set_lr(self, lr: float) -> None:
        self.note(f"lr {lr:.1f}")

    def micro_step(self, images, labels, positions):
        self.note("micro_step")
        return torch.zeros(())

    def grad_norm(self):
        return 1.0

    def take_skipped(self) -> int:
        return 0

    def update(self) -> None:
        self.note("average")

    def restart_clock(self) -> None:
        pass

    def add(self, batch, loss, wait_s) -> None:
        self.note("add")

    def end_step(self, step, seen_examples, lr, grad_norm) -> None:
        self.step = step
        self.note(f"end {step} seen {seen_examples}")

    def flush(self, *, say, skipped) -> None:
        self.note("log" if say else "check")

    def actions(self) -> Actions:
        return Actions(
            seed_step=lambda step: self.note(f"seed {step}"),
            save=lambda state: self.note(f"save {state.step}"),
            evaluate=lambda state: self.note(f"evaluate {state.step}"),
            stop_reason=lambda: "SIGTERM" if self.step == self.stop_after else None,
        )


class Batches:
    images = labels = positions = np.zeros(1)

    def __iter__(self):
        return self

    def __next__(self):
        return self


def run(recording: Recording, start: int = 0, **rhythm) -> TrainState:
    wanted = {"log_every": 100, "save_every": None, "eval_every": None, "stop_at": None} | rhythm
    state = TrainState(start, start * 8)
    schedule = Schedule(1.0, 0.0, 0, 10, "linear")
    train(
        state, Rhythm(**wanted), schedule, recording, recording, Batches(), 2, 8, recording,
        recording.actions(),
    )  # fmt: skip
    return state


def test_a_step_happens_in_the_documented_order():
    recording = Recording()

    run(recording, start=3, total_steps=5, log_every=2, save_every=4, eval_every=4)

    step = ["seed 3", "micro_step", "add", "micro_step", "add", "average", "end 4 seen 32"]
    assert recording.calls[:11] == ["lr 0.7", *step, "log", "save 4", "evaluate 4"]


def test_no_save_without_the_check_before_it():
    recording = Recording()

    run(recording, total_steps=9, save_every=3)

    for position, call in enumerate(recording.calls):
        if call.startswith("save"):
            assert recording.calls[position - 1] in ("check", "log")


def test_the_last_step_is_left_to_the_end_of_the_run():
    recording = Recording()

    state = run(recording, total_steps=4, save_every=2, eval_every=2)

    assert state == TrainState(4, 32)
    assert [c for c in recording.calls if c.split()[0] in ("save", "evaluate")] == [
        "save 2",
        "evaluate 2",
    ]
    assert recording.calls[-1] == "log"


def test_a_stop_signal_saves_and_leaves():
    recording = Recording(stop_after=2)

    with pytest.raises(Stopped, match="saved at step 2 of 9"):
        run(recording, total_steps=9)

    assert recording.calls[-2:] == ["log", "save 2"]


def test_a_stop_right_after_a_save_does_not_save_twice():
    recording = Recording(stop_after=2)

    with pytest.raises(Stopped):
        run(recording, total_steps=9, save_every=2)

    assert [c for c in recording.calls if c.startswith("save")] == ["save 2"]


def test_stop_at_stops_there_with_the_schedule_at_full_length():
    recording = Recording()

    with pytest.raises(Stopped, match=r"run\.stop_at"):
        run(recording, total_steps=10, stop_at=3)

    assert [c for c in recording.calls if c.startswith("lr")] == ["lr 1.0", "lr 0.9", "lr 0.8"]


def test_a_finished_run_does_nothing():
    recording = Recording()

    run(recording, start=5, total_steps=5)

    assert recording.calls == []
