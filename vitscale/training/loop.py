"""The training loop: everything that happens to a run, in the order in which it happens."""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from vitscale.config.errors import Stopped
from vitscale.data.loader import Batch
from vitscale.training.ema import Ema
from vitscale.training.recorder import StepRecorder
from vitscale.training.rhythm import Rhythm
from vitscale.training.schedule import Schedule, due

# Python's collector runs at the same steps on all ranks, so that they pause together.
GC_EVERY_STEPS = 1000


@dataclass
class TrainState:
    """What must survive a restart, besides weights and optimizer.

    Args:
        step: Finished updates.
        seen_examples: Examples consumed by them.
    """

    step: int = 0
    seen_examples: int = 0


class Trains(Protocol):
    """What the loop asks of an engine (training/engine.py)."""

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next update."""

    def micro_step(self, images: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        """Run forward and backward, and the update at the last micro-batch."""

    def grad_norm(self) -> Any:
        """Norm of the last update's gradient."""

    def take_skipped(self) -> int:
        """Updates skipped since the last call."""


@dataclass(frozen=True)
class Actions:
    """What the loop calls when it is due.

    Args:
        seed_step: Seeds the stochastic layers for the update after `step` finished ones.
        save: Commits a checkpoint.
        evaluate: Measures on the validation set.
        stop_reason: Agrees over all ranks whether to stop: the reason, or None.
    """

    seed_step: Callable[[int], None]
    save: Callable[[TrainState], None]
    evaluate: Callable[[TrainState], None]
    stop_reason: Callable[[], str | None]


def train(
    state: TrainState,
    rhythm: Rhythm,
    schedule: Schedule,
    engine: Trains,
    ema: Ema | None,
    batches: Iterator[Batch],
    grad_accum: int,
    global_batch: int,
    recorder: StepRecorder,
    actions: Actions,
) -> None:
    """Train until the last step.

    A step is: lr of the finished steps; micro-batches, the last of which updates the weights; the
    average; step += 1, seen_examples += global_batch; then, where due, log (the only host sync,
    with the check that all numbers are finite), save, evaluate; then a requested stop: save unless
    just saved, and leave. A save is always preceded by the check, so no checkpoint holds broken
    weights.

    Args:
        state: Where to begin; kept up to date.
        rhythm: When to log, save, evaluate and stop.
        schedule: The learning rate.
        engine: Model and optimizer.
        ema: Averaged weights, where the run has them.
        batches: Micro-batches, from the first one after `state`.
        grad_accum: Micro-batches of one update.
        global_batch: Examples of one update over all ranks.
        recorder: Takes the results.
        actions: Saving, evaluating, stopping.

    Raises:
        Stopped: Asked to stop; a checkpoint is saved.
        NumbersError: Loss or gradients stopped being finite.
    """
    was_collecting = gc.isenabled()
    gc.disable()
    recorder.restart_clock()
    try:
        while state.step < rhythm.total_steps:
            lr = schedule.lr_at(state.step)
            engine.set_lr(lr)
            actions.seed_step(state.step)
            for _ in range(grad_accum):
                start = time.perf_counter()
                batch = next(batches)
                wait_s = time.perf_counter() - start
                loss = engine.micro_step(batch.images, batch.labels, batch.positions)
                recorder.add(batch, loss, wait_s)
            if ema is not None:
                ema.update()
            state.step += 1
            state.seen_examples += global_batch
            recorder.end_step(state.step, state.seen_examples, lr, engine.grad_norm())
            _after_step(state, rhythm, engine, recorder, actions)
            if state.step % GC_EVERY_STEPS == 0:
                gc.collect()
    finally:
        if was_collecting:
            gc.enable()


def _after_step(
    state: TrainState, rhythm: Rhythm, engine: Trains, recorder: StepRecorder, actions: Actions
) -> None:
    """Do what is due between two steps."""
    step, total = state.step, rhythm.total_steps
    logs = step % rhythm.log_every == 0 or step == total or step == 1
    saves = due(rhythm.save_every, step, total)
    evaluates = due(rhythm.eval_every, step, total)
    reason = actions.stop_reason() if step < total else None
    if reason is None and step == rhythm.stop_at:
        reason = f"run.stop_at = {step} steps"
    if logs or saves or evaluates or reason:
        recorder.flush(say=logs or reason is not None, skipped=engine.take_skipped())
    if saves:
        actions.save(state)
    if evaluates:
        actions.evaluate(state)
    if reason:
        if not saves:
            actions.save(state)
        raise Stopped(f"{reason}: saved at step {step} of {total}; the same command goes on")
    if saves or evaluates:
        recorder.restart_clock()


def seed_stochastic_layers(key: int) -> None:
    """Seed torch's generators, so that dropout of a step does not depend on what came before."""
    torch.manual_seed(key & (2**63 - 1))
