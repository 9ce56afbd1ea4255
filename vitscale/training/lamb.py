"""LAMB: Adam whose step on each weight is as long as the weight is."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from vitscale.training.layout import ShapedOptimizer, gradients, with_gradient


class Lamb(ShapedOptimizer):
    """LAMB, as DeiT III trains with.

    Weights without decay - biases, norms, tokens, tables - take Adam's own step. The gradient is
    not clipped here: NVIDIA's FusedLAMB does so at norm 1, which is optim.grad_clip_norm = 1.0.

    Args:
        groups: Parameter groups.
        lr: Learning rate.
        betas: Decay a step of the two moments.
        eps: Added to the root of the second moment.

    Source:
        arXiv:1904.00962, algorithm 2, with the identity for phi; left alone without decay: NVIDIA
        apex, FusedLAMB (use_nvlamb=False).
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights from their gradients."""
        for group in self.param_groups:
            params = with_gradient(group)
            if not params:
                continue
            updates = self._adam_updates(params, group)
            if group["weight_decay"]:
                torch._foreach_add_(updates, params, alpha=group["weight_decay"])
                self._stretch(params, updates)
            torch._foreach_add_(params, updates, alpha=-group["lr"])

    def _adam_updates(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Advance Adam's moments and return its bias-corrected steps, before the learning rate."""
        betas: tuple[float, float] = group["betas"]
        states = [self.state[param] for param in params]
        for param, state in zip(params, states, strict=True):
            if not state:
                state["step"] = 0
                state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(param) for _ in "mv")
            state["step"] += 1
        grads = gradients(params)
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(means, grads, 1.0 - betas[0])
        torch._foreach_mul_(squares, betas[1])
        torch._foreach_addcmul_(squares, grads, grads, 1.0 - betas[1])
        steps = [int(state["step"]) for state in states]
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [math.sqrt(1.0 - betas[1] ** step) for step in steps])
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(means, roots)
        torch._foreach_div_(updates, [1.0 - betas[0] ** step for step in steps])
        return list(updates)

    def _stretch(self, params: list[Tensor], updates: list[Tensor]) -> None:
        """Scale the update of each weight to the norm of the weight."""
        pairs = list(zip(params, updates, strict=True))
        weights = [part for param, _ in pairs for part in self.layout.parts(param, param)]
        steps = [part for param, update in pairs for part in self.layout.parts(param, update)]
        squares = torch.stack(torch._foreach_norm(weights + steps)).square()
        weight_norms, step_norms = self.layout.add(squares).sqrt().chunk(2)
        moves = (weight_norms > 0) & (step_norms > 0)
        ratios = torch.where(moves, weight_norms / step_norms, 1.0)
        torch._foreach_mul_(steps, list(ratios.unbind()))
