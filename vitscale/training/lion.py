"""Lion: steps of one length in every coordinate, by the sign of a momentum."""

from collections.abc import Iterable
from typing import Any

import torch

from vitscale.training.layout import gradients, with_gradient


class Lion(torch.optim.Optimizer):
    """Lion with decoupled weight decay.

    Args:
        groups: Parameter groups.
        lr: Learning rate: 3 to 10 times lower than AdamW's.
        betas: Weight of the momentum in the step, and its decay a step; the paper: 0.9 and 0.99.

    Source:
        arXiv:2302.06675, algorithm 2; the learning rate: its section 5.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float]
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights from their gradients."""
        for group in self.param_groups:
            params = with_gradient(group)
            if not params:
                continue
            for param in params:
                if not self.state[param]:
                    self.state[param]["exp_avg"] = torch.zeros_like(param)
            grads = gradients(params)
            means = [self.state[param]["exp_avg"] for param in params]
            updates = torch._foreach_lerp(means, grads, 1.0 - group["betas"][0])
            torch._foreach_sign_(updates)
            torch._foreach_mul_(params, 1.0 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, updates, alpha=-group["lr"])
            torch._foreach_lerp_(means, grads, 1.0 - group["betas"][1])
