"""Adafactor as "Scaling Vision Transformers" changed it: about half of AdamW's memory.

The second moment of a matrix is kept as the means of its rows and columns, the first moment in
bfloat16. torch.optim.Adafactor is the original: without a first moment, its steps scaled by the
size of the weight.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from vitscale.training.layout import Fragment, ShapedOptimizer, with_gradient

# Source of the numbers: big_vision, optax.scale_by_adafactor.
MIN_DIM_SIZE_TO_FACTOR = 32
DECAY_RATE = 0.8
EPS = 1e-30


def factored_dims(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the second largest and the largest dimension, or None: not worth factoring."""
    order = sorted(range(len(shape)), key=lambda dim: (shape[dim], dim))
    if len(shape) < 2 or shape[order[-2]] < MIN_DIM_SIZE_TO_FACTOR:
        return None
    return order[-2], order[-1]


class Adafactor(ShapedOptimizer):
    """Adafactor with momentum and without scaling by the weights.

    Args:
        groups: Parameter groups.
        lr: Learning rate, as AdamW's.
        momentum: Decay a step of the first moment.
        beta2_cap: Largest decay of the second moment, which is 1 - step^-0.8 until then.

    Source:
        arXiv:2106.04560, on memory-efficient optimizers; big_vision, optax.scale_by_adafactor.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, momentum: float, beta2_cap: float
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "beta2_cap": beta2_cap, "weight_decay": 0.0}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights from their gradients."""
        for group in self.param_groups:
            for param in with_gradient(group):
                self._update(param, group)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(param, dtype=torch.bfloat16)
        state["step"] += 1
        # Loading a checkpoint casts the state to the type of the weights.
        mean = state["exp_avg"] = state["exp_avg"].to(torch.bfloat16)
        assert param.grad is not None
        decay = min(group["beta2_cap"], 1.0 - float(state["step"]) ** -DECAY_RATE)
        update = torch.zeros_like(param)
        grads, updates = (self.layout.parts(param, t) for t in (param.grad, update))
        scales = self._scales(self.layout.of(param), grads, state, 1.0 - decay)
        for grad, scale, part in zip(grads, scales, updates, strict=True):
            torch.mul(grad, scale, out=part)
        mean.lerp_(update.to(torch.bfloat16), 1.0 - group["momentum"])
        param.mul_(1.0 - group["lr"] * group["weight_decay"])
        param.add_(mean.to(param.dtype), alpha=-group["lr"])

    def _scales(
        self,
        fragments: Sequence[Fragment],
        grads: list[Tensor],
        state: dict[str, Any],
        weight: float,
    ) -> list[Tensor]:
        """Advance the second moments and return one over their roots, a tensor a fragment."""
        means = iter(self._means(fragments, grads))
        scales = []
        for k, (fragment, grad) in enumerate(zip(fragments, grads, strict=True)):
            dims = factored_dims(fragment.shape)
            if dims is None:
                scales.append(_moved(state, f"exp_avg_sq.{k}", grad.square(), weight).rsqrt())
                continue
            rows = _moved(state, f"exp_avg_sq_r.{k}", next(means), weight)
            columns = _moved(state, f"exp_avg_sq_c.{k}", next(means), weight)
            row_scale = (rows / rows.mean(dim=dims[0], keepdim=True)).rsqrt()
            scales.append(self.layout.take(row_scale * columns.rsqrt(), fragment))
        return scales

    def _means(self, fragments: Sequence[Fragment], grads: list[Tensor]) -> list[Tensor]:
        """Average the squared gradient of each factored weight over its rows and its columns.

        Returns:
            Two tensors a weight: without its largest dimension, and without the second largest.
        """
        means = []
        for fragment, grad in zip(fragments, grads, strict=True):
            dims = factored_dims(fragment.shape)
            if dims is not None:
                squares = self.layout.spread(grad.square(), fragment)
                means += [squares.mean(dim=dim, keepdim=True) for dim in reversed(dims)]
        if means:
            # Ranks hold disjoint parts, so the sum of their means is the mean.
            flat = self.layout.add(torch.cat([mean.reshape(-1) for mean in means]))
            sums = flat.split([mean.numel() for mean in means])
            means = [new.view_as(old) for new, old in zip(sums, means, strict=True)]
        return means


def _moved(state: dict[str, Any], name: str, square: Tensor, weight: float) -> Tensor:
    """Move a second moment towards a squared gradient and return it."""
    if name not in state:
        state[name] = torch.zeros_like(square)
    moment: Tensor = state[name].lerp_(square + EPS, weight)
    return moment
