"""The learning rate as a pure function of the number of finished steps: nothing to save."""

import math
from dataclasses import dataclass
from typing import Literal

Decay = Literal["constant", "linear", "cosine", "rsqrt", "step", "wsd"]


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up times a decay.

    Args:
        peak_lr: Learning rate at the top.
        min_lr: Learning rate at the end of the decay.
        warmup_steps: Steps of the rise from 0.
        total_steps: Steps of the whole run.
        decay: Shape after the warm-up.
        timescale: "rsqrt": steps after the warm-up at which the rate is 1/sqrt(2) of the peak.
        cooldown_steps: "rsqrt" and "wsd": last steps, in which the rate falls to min_lr on a line.
        drop_steps: "step": finished steps at which the rate is multiplied by drop_factor.
        drop_factor: "step": 0 to 1.

    Source:
        Warm-up, linear, cosine: google-research/vision_transformer,
        utils.create_learning_rate_schedule. Reciprocal square root with cool-down:
        arXiv:2106.04560; its form: big_vision, utils.create_learning_rate_schedule.
        Step: arXiv:1912.11370. Warm-up, stable, decay: arXiv:2405.18392.
    """

    peak_lr: float
    min_lr: float
    warmup_steps: int
    total_steps: int
    decay: Decay
    timescale: int = 10_000
    cooldown_steps: int = 0
    drop_steps: tuple[int, ...] = ()
    drop_factor: float = 0.1

    def lr_at(self, step: int) -> float:
        """Return the learning rate of the update that follows `step` finished ones."""
        lr = self.min_lr + (self.peak_lr - self.min_lr) * self._factor(step)
        return lr * min(1.0, step / self.warmup_steps) if self.warmup_steps else lr

    def _factor(self, step: int) -> float:
        """Return the place between min_lr (0) and peak_lr (1)."""
        length = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, max(0.0, (step - self.warmup_steps) / length))
        if self.decay == "linear":
            return 1.0 - progress
        if self.decay == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        if self.decay == "rsqrt":
            after = max(0, step - self.warmup_steps)
            return self._cooldown(step) / math.sqrt(1.0 + after / self.timescale)
        if self.decay == "step":
            return self.drop_factor ** sum(at <= step for at in self.drop_steps)
        return self._cooldown(step) if self.decay == "wsd" else 1.0

    def _cooldown(self, step: int) -> float:
        if not self.cooldown_steps:
            return 1.0
        return min(1.0, max(0.0, (self.total_steps - step) / self.cooldown_steps))


def due(every: int | None, step: int, total_steps: int) -> bool:
    """Return whether something periodic happens after this step; never at the very end.

    The end has its own final save and evaluation, and a period of None means only there.
    """
    return every is not None and step % every == 0 and step < total_steps
