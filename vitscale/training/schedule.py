"""The learning rate as a pure function of the number of finished steps: nothing to save."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up times a decay.

    Args:
        peak_lr: Learning rate at the top.
        min_lr: Learning rate at the end of the decay.
        warmup_steps: Steps of the rise from 0.
        total_steps: Steps of the whole run.
        decay: Shape after the warm-up.

    Source:
        google-research/vision_transformer, utils.create_learning_rate_schedule.
    """

    peak_lr: float
    min_lr: float
    warmup_steps: int
    total_steps: int
    decay: Literal["constant", "linear", "cosine"]

    def lr_at(self, step: int) -> float:
        """Return the learning rate of the update that follows `step` finished ones."""
        length = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, max(0.0, (step - self.warmup_steps) / length))
        if self.decay == "linear":
            factor = 1.0 - progress
        elif self.decay == "cosine":
            factor = 0.5 * (1.0 + math.cos(math.pi * progress))
        else:
            factor = 1.0
        lr = self.min_lr + (self.peak_lr - self.min_lr) * factor
        return lr * min(1.0, step / self.warmup_steps) if self.warmup_steps else lr


def due(every: int | None, step: int, total_steps: int) -> bool:
    """Return whether something periodic happens after this step; never at the very end.

    The end has its own final save and evaluation, and a period of None means only there.
    """
    return every is not None and step % every == 0 and step < total_steps
