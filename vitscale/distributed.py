"""Who am I among the ranks, and the few things that all ranks do together.

The only reader of RANK, LOCAL_RANK and WORLD_SIZE. Control messages (flags, small sums, objects)
travel over gloo on the host, so that they never wait for the accelerator's queue.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from vitscale.config.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class World:
    """Place of this process among all ranks.

    Args:
        rank: 0 to world_size - 1.
        world_size: Ranks of the run.
        local_rank: Rank on this node.
        local_world_size: Ranks on this node.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def node_ranks(self) -> range:
        """Ranks of this node, as launchers number them: neighbouring ones."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.rank == 0


def world_from_env() -> World:
    """Read the place of this process from what the launcher set; alone if nothing is set.

    Raises:
        UserError: Only a part of the variables is set, or they contradict each other.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    given = {name: os.environ[name] for name in names if os.environ.get(name)}
    if not given:
        return World()
    missing = [name for name in names if name not in given]
    if missing or not all(value.isdigit() for value in given.values()):
        raise UserError(
            f"the launcher's variables are incomplete: {given}, missing {missing}; "
            "start with deepspeed or torchrun, or unset them for one process"
        )
    rank, world_size, local_rank = (int(given[name]) for name in names)
    # The deepspeed launcher says LOCAL_SIZE, torchrun LOCAL_WORLD_SIZE.
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or str(world_size)
    if not rank < world_size:
        raise UserError(f"RANK = {rank} must be below WORLD_SIZE = {world_size}")
    return World(rank, world_size, local_rank, int(local))


def fill_env(world: World) -> None:
    """Set for a lone process what a launcher would have set.

    DeepSpeed guesses missing ones through MPI, which must not happen.
    """
    if world.world_size == 1:
        os.environ.setdefault("RANK", "0")
        os.environ.setdefault("WORLD_SIZE", "1")
        os.environ.setdefault("LOCAL_RANK", "0")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(_free_port()))


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end_process(code: int) -> None:
    """End at once if a process group is still up; else do nothing.

    A rank that fails alone cannot take its group down in good order, and an ordinary exit would
    abort in the group's threads, with another exit code.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Collectives:
    """Control messages between all ranks; every call is a meeting point of all of them.

    Args:
        world: This process's place. The default process group must exist.
        timeout_s: After this long a missing rank is an error, not a longer wait.
    """

    def __init__(self, world: World, timeout_s: float = 1800.0) -> None:
        import torch.distributed as dist

        self.world = world
        timeout = timedelta(seconds=timeout_s)
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        self._group = group

    def any(self, flag: bool) -> bool:
        """Return whether any rank says yes."""
        return self.sum([int(flag)])[0] > 0

    def sum(self, values: Sequence[int]) -> list[int]:
        """Return element-wise sums over the ranks, modulo 2^64 as signed integers."""
        import torch
        import torch.distributed as dist

        total = torch.tensor(list(values), dtype=torch.int64)
        if self.world.world_size > 1:
            dist.all_reduce(total, group=self._group)
        return [int(value) for value in total]

    def sum_float(self, values: "torch.Tensor") -> "torch.Tensor":
        """Return the float64 sum over the ranks of a tensor; costs a host sync."""
        import torch
        import torch.distributed as dist

        total = values.detach().to("cpu", torch.float64)
        if self.world.world_size > 1:
            dist.all_reduce(total, group=self._group)
        return total

    def gather_tensor(self, values: "torch.Tensor") -> "torch.Tensor":
        """Return the host tensors of all ranks, same shape on each, stacked in rank order."""
        import torch
        import torch.distributed as dist

        if self.world.world_size == 1:
            return values.unsqueeze(0)
        parts = [torch.empty_like(values) for _ in range(self.world.world_size)]
        dist.all_gather(parts, values.contiguous(), group=self._group)
        return torch.stack(parts)

    def gather(self, item: Any) -> list[Any]:
        """Return the items of all ranks in rank order."""
        import torch.distributed as dist

        if self.world.world_size == 1:
            return [item]
        items: list[Any] = [None] * self.world.world_size
        dist.all_gather_object(items, item, group=self._group)
        return items

    def from_first(self, item: Any) -> Any:
        """Return rank 0's item on every rank."""
        return self.gather(item if self.world.is_first else None)[0]

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.sum([0])
