"""Averaged weights ("Polyak averaging") over each rank's own share of the fp32 weights.

The average is element-wise, so averaging the shares that ZeRO cut is averaging the model: no
communication, and 4 bytes a parameter divided by the number of ranks from stage 1 on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Ema:
    """Exponential moving average of tensors that an optimizer updates in place.

    Args:
        masters: The fp32 weights of this rank; they are watched, not copied again.
        decay: Share of the old average that stays, a step, 0 to 1.

    Source:
        arXiv:2010.11929, section 4.1: averaging with factor 0.9999. It names no bias correction, so
        there is none: the average starts at the initial weights.
    """

    def __init__(self, masters: Sequence[Tensor], decay: float) -> None:
        self._masters = list(masters)
        self._decay = decay
        self.average = [master.detach().clone() for master in self._masters]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights after an update of them."""
        masters = [master.detach() for master in self._masters]
        torch._foreach_lerp_(self.average, masters, 1.0 - self._decay)

    @torch.no_grad()
    def load(self, average: Sequence[Tensor]) -> None:
        """Take over a saved average.

        Raises:
            ValueError: It was cut differently.
        """
        saved, own = [t.shape for t in average], [t.shape for t in self.average]
        if saved != own:
            raise ValueError(f"the saved average has shapes {saved}, this run has {own}")
        for mine, given in zip(self.average, average, strict=True):
            mine.copy_(given)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the masters hold the average for a while, so that they can be gathered."""
        with torch.no_grad():
            kept = [master.detach().clone() for master in self._masters]
            try:
                for master, mean in zip(self._masters, self.average, strict=True):
                    master.copy_(mean)
                yield
            finally:
                for master, weight in zip(self._masters, kept, strict=True):
                    master.copy_(weight)
