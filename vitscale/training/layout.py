"""Where the weights lie in the tensors that an optimizer updates.

From stage 1 on, ZeRO hands the optimizer a flat tensor a group, cut anywhere: this rank's part of
all weights laid end to end. A rule that looks at one number at a time need not know. One that looks
at a whole weight - its norm, its rows and columns, its singular vectors - finds it through here.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fragment:
    """The part of one weight that lies in a tensor.

    Args:
        shape: Of the whole weight.
        start: First element of the part, counted in the flattened weight.
        offset: Where it lies in the flat tensor.
        numel: Elements of the part; 0 where this rank has none of the weight.
    """

    shape: tuple[int, ...]
    start: int
    offset: int
    numel: int

    @property
    def is_whole(self) -> bool:
        """Whether the part is the weight."""
        return self.numel == math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The weights inside an optimizer's tensors; without arguments, every tensor is a weight.

    Args:
        fragments: Of each flat tensor; the same weights in the same order on every rank.
        add_ranks: Replaces a tensor by its sum over all ranks, which call it together.
    """

    fragments: Mapping[Tensor, Sequence[Fragment]] | None = None
    add_ranks: Callable[[Tensor], None] | None = None

    def of(self, param: Tensor) -> Sequence[Fragment]:
        """Return what lies in a tensor that the optimizer updates."""
        if self.fragments is None:
            return [Fragment(tuple(param.shape), 0, 0, param.numel())]
        return self.fragments[param]

    def parts(self, param: Tensor, tensor: Tensor) -> list[Tensor]:
        """Cut a tensor that is laid out as `param` is.

        Args:
            param: What the optimizer updates.
            tensor: `param` itself, its gradient, its state.

        Returns:
            A view of each fragment; without ZeRO the tensor itself.
        """
        if self.fragments is None:
            return [tensor]
        return [tensor.narrow(0, f.offset, f.numel) for f in self.fragments[param]]

    def add(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place."""
        if self.add_ranks is not None:
            self.add_ranks(tensor)
        return tensor

    def spread(self, part: Tensor, fragment: Fragment) -> Tensor:
        """Return a tensor of the whole weight's shape that holds this rank's part, else zeros.

        It is a view of the part where that is the whole.
        """
        if fragment.is_whole:
            return part.view(fragment.shape)
        whole = torch.zeros(math.prod(fragment.shape), dtype=part.dtype, device=part.device)
        whole.narrow(0, fragment.start, fragment.numel).copy_(part)
        return whole.view(fragment.shape)

    def take(self, whole: Tensor, fragment: Fragment) -> Tensor:
        """Return this rank's part of a whole weight, in the shape of `parts`."""
        if self.fragments is None:
            return whole
        return whole.reshape(-1).narrow(0, fragment.start, fragment.numel)


class ShapedOptimizer(torch.optim.Optimizer):
    """Base of the optimizers that look at whole weights.

    Args:
        groups: Parameter groups.
        defaults: Settings of a group that does not say otherwise.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        # The engine sets it where ZeRO cuts the weights.
        self.layout = Layout()


def with_gradient(group: dict[str, Any]) -> list[Tensor]:
    """Return the tensors of a group that have a gradient."""
    return [param for param in group["params"] if param.grad is not None]


def gradients(params: list[Tensor]) -> list[Tensor]:
    """Return the gradients of tensors that have one."""
    return [param.grad for param in params if param.grad is not None]
