"""What a rank asks its reader processes for: micro-batch by micro-batch, in the order of the steps.

Only these few integers travel to the readers; they know nothing of steps, ranks or each other, so
their number and how far they read ahead cannot change what comes out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from vitscale.config.errors import UserError
from vitscale.data.manifest import Manifest
from vitscale.data.mixture import Mixture
from vitscale.data.order import Order, eval_slots

# Positions that are looked up at once: alone, each would cost a hundred times as much.
_LOOKED_UP = 4096


@dataclass(frozen=True)
class Requests:
    """The samples of one micro-batch in slot order; arrays of one length."""

    # Place in the order of the run; in an evaluation the sample_index. -1 is padding.
    positions: NDArray[np.int64]
    epochs: NDArray[np.int64]
    shard_ids: NDArray[np.int64]
    indexes: NDArray[np.int64]
    sample_indexes: NDArray[np.int64]
    # True where the sample is in quarantine: another one has to stand in for it.
    quarantined: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, part: slice) -> "Requests":
        return Requests(*(getattr(self, field.name)[part] for field in fields(self)))


class TrainRequests:
    """The endless micro-batches of one rank.

    Args:
        order: The order of the run.
        rank: This process.
        world_size: All processes.
        micro_batch: Examples of one micro-batch.
        start_step: Completed updates before the first micro-batch.

    Raises:
        UserError: micro_batch does not divide the rank's share of the batch.
    """

    def __init__(
        self, order: Order | Mixture, rank: int, world_size: int, micro_batch: int, start_step: int
    ) -> None:
        self.order, self.micro_batch, self.start_step = order, micro_batch, start_step
        self.slots = order.rank_slots(rank, world_size)
        if micro_batch < 1 or len(self.slots) % micro_batch:
            raise UserError(
                f"micro_batch = {micro_batch} must divide the {len(self.slots)} examples that each "
                f"of {world_size} ranks has of global_batch = {order.global_batch}"
            )

    @property
    def shards_at_a_time(self) -> int:
        """Shards of one dataset from which the rank reads at any moment, at most."""
        return len(np.unique(self.slots % self.order.lanes)) * (self.order.shuffle_block + 1)

    def __iter__(self) -> Iterator[Requests]:
        step, at_once = self.start_step, 1
        while True:
            first = self.order.step_positions(step)[self.slots]
            later = np.arange(at_once, dtype=np.int64) * self.order.global_batch
            positions = (later[:, None] + first).reshape(-1)
            found = self.order.places(positions)
            share = Requests(
                positions,
                found.epoch,
                found.shard_id,
                found.index,
                found.sample_index,
                found.substitute,
            )
            for start in range(0, len(positions), self.micro_batch):
                yield share[start : start + self.micro_batch]
            step += at_once
            # The first batch is wanted at once.
            at_once = min(2 * at_once, max(_LOOKED_UP // len(self.slots), 1))


class EvalRequests:
    """The micro-batches of one rank in an evaluation; as many on every rank.

    Args:
        manifest: The dataset.
        rank: This process.
        world_size: All processes.
        micro_batch: Samples of one micro-batch, padding included.
    """

    shards_at_a_time = 2

    def __init__(self, manifest: Manifest, rank: int, world_size: int, micro_batch: int) -> None:
        self.starts = manifest.shards.starts
        self.slots = eval_slots(manifest.num_samples, rank, world_size, micro_batch)

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[Requests]:
        for sample_index in self.slots:
            shard_id = np.searchsorted(self.starts, sample_index, side="right") - 1
            index = np.where(sample_index < 0, -1, sample_index - self.starts[shard_id])
            zeros = np.zeros_like(sample_index)
            yield Requests(sample_index, zeros, shard_id, index, sample_index, zeros.astype(bool))
