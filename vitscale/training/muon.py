"""Muon: matrices move by the nearest orthogonal matrix to their momentum; the rest by AdamW."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.adamw import adamw

from vitscale.training.layout import ShapedOptimizer, gradients, with_gradient

# Source: Keller Jordan, kellerjordan.github.io/posts/muon.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
EPS = 1e-7
# Brings the mean square of a step to that of AdamW's, so that both take the same learning rate and
# decay. Source: arXiv:2502.16982 section 2.2.
ADAMW_RMS = 0.2


def orthogonalised(matrix: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    """Bring all singular values of a matrix near 1, in bfloat16.

    Args:
        matrix: Any matrix; its scale does not matter.

    Returns:
        A matrix with the same singular vectors; its singular values lie within about 0.7 to 1.2.

    Source:
        Keller Jordan, kellerjordan.github.io/posts/muon: a Newton-Schulz iteration of order five
        whose coefficients favour speed over reaching 1 exactly.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    result = matrix.to(torch.bfloat16)
    if is_tall:
        result = result.T
    result = result / result.norm().clamp(min=EPS)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = result @ result.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        result = torch.addmm(result, polynomial, result, beta=a)
    return result.T if is_tall else result


class Muon(ShapedOptimizer):
    """Muon for groups with `use_muon`, AdamW for the others.

    torch.optim.Muon takes matrices alone, and whole ones. Where ZeRO cuts them, the ranks put each
    momentum together, 4 bytes a parameter more to send in a step, and every rank that holds a part
    of the matrix orthogonalises it: at stage 3 that is every rank.

    Args:
        groups: Parameter groups, each with `use_muon`.
        lr: Learning rate of both rules, as AdamW's.
        momentum: Decay a step of Muon's momentum (Nesterov); usual: 0.95.
        betas: AdamW's.
        eps: AdamW's.

    Source:
        Keller Jordan, kellerjordan.github.io/posts/muon; length of the steps and decoupled decay:
        arXiv:2502.16982.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": 0.0}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights from their gradients."""
        for group in self.param_groups:
            params = with_gradient(group)
            if not params:
                continue
            if not group["use_muon"]:
                self._adamw(params, group)
                continue
            torch._foreach_mul_(params, 1.0 - group["lr"] * group["weight_decay"])
            for param in params:
                self._move(param, group["lr"], group["momentum"])

    def _adamw(self, params: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[param] for param in params]
        for param, state in zip(params, states, strict=True):
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(param) for _ in "mv")
        adamw(
            params,
            gradients(params),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _move(self, param: Tensor, lr: float, momentum: float) -> None:
        grad, state = param.grad, self.state[param]
        assert grad is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        mean = state["momentum_buffer"].lerp_(grad, 1.0 - momentum)
        ahead = grad.lerp(mean, momentum)
        parts = zip(self.layout.parts(param, param), self.layout.parts(param, ahead), strict=True)
        for fragment, (weight, part) in zip(self.layout.of(param), parts, strict=True):
            whole = self.layout.add(self.layout.spread(part, fragment))
            if not fragment.numel:
                continue
            update = self.layout.take(orthogonalised(whole), fragment)
            length = ADAMW_RMS * math.sqrt(max(fragment.shape))
            weight.add_(update, alpha=-lr * length)
