"""Which shards some lanes will need next, and how much of each: from the order, by arithmetic.

A window of a lane is read from its first position on from all its shards at once, so shards are
needed window by window. Lanes are cut out of the epoch's shards without regard to where shards end;
of a shard that lies across a cut, each side needs only a stretch. Nothing is kept but the tables of
two epochs and one window a lane.
"""

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitscale.data.order import Order
from vitscale.data.windows import EpochTable

_KEPT_EPOCHS = 2
# Of a shard that is needed by more than this part, the rest is fetched too: another epoch wants it.
_WORTH_CUTTING = 0.5

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Need:
    """A shard that will be read."""

    # Positions from which on, and before which, samples of it are wanted.
    position: int
    end_position: int
    epoch: int
    shard_id: int
    # The samples of it that the lanes want in this epoch, counted in the shard.
    samples: range


class Upcoming:
    """What some lanes of an order read.

    Args:
        order: The order of one dataset.
        lanes: The lanes, usually those of all ranks of a node.
    """

    def __init__(self, order: Order, lanes: Collection[int]) -> None:
        self.order = order
        self.lanes = np.unique(np.fromiter(lanes, dtype=np.int64))
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()

    def samples(self, epoch: int, shard_id: int) -> range:
        """Say which samples of a shard the lanes read in an epoch.

        Args:
            epoch: The epoch.
            shard_id: Ordinal of the shard.

        Returns:
            The shortest stretch that has them all; the whole shard when that is over half of it.
        """
        return self._epoch(epoch).samples(shard_id, self.lanes)

    def after(self, position: int) -> Iterator[Need]:
        """Give the shards that are read from a position on, in the order of need, without end.

        Args:
            position: The next position that will be read.

        Yields:
            The shards of the windows under way, then of each window that begins. A shard across a
            cut between two of the lanes comes once for each.
        """
        usable, step = self.order.usable, self.order.lanes
        # Position of each lane's next window, and the lane; whoever is first comes first.
        due = []
        for lane in self.lanes.tolist():
            epoch, q = divmod(position, usable)
            q += (lane - q) % step
            due.append((epoch * usable + q if q < usable else (epoch + 1) * usable + lane, lane))
        due = [(first, lane) for first, lane in due if lane < usable]
        heapq.heapify(due)
        while due:
            first, lane = due[0]
            epoch, q = divmod(first, usable)
            end, shard_ids = self._epoch(epoch).window(q)
            for shard_id in shard_ids:
                yield Need(
                    first, epoch * usable + end, epoch, shard_id, self.samples(epoch, shard_id)
                )
            following = epoch * usable + end if end < usable else (epoch + 1) * usable + lane
            heapq.heapreplace(due, (following, lane))

    def _epoch(self, epoch: int) -> "_Epoch":
        if epoch not in self._epochs:
            self._epochs[epoch] = _Epoch(self.order, epoch)
            if len(self._epochs) > _KEPT_EPOCHS:
                self._epochs.popitem(last=False)
        self._epochs.move_to_end(epoch)
        return self._epochs[epoch]


class _Epoch:
    """One epoch of an order, looked at by shard; 16 bytes a shard."""

    def __init__(self, order: Order, epoch: int) -> None:
        table = EpochTable(
            order.shard_sizes, order.seed, epoch, order.usable, order.lanes, order.shuffle_block
        )
        self._table = table
        self._place = np.empty_like(table.shards)
        self._place[table.shards] = np.arange(len(table.shards), dtype=np.int32)
        starts = table.windows(np.arange(order.lanes, dtype=np.int64))[0].start
        # The stretch of the epoch's sequence that each lane has.
        self._lane_starts, self._lane_ends = starts, np.append(starts[1:], table.starts[-1])

    def samples(self, shard_id: int, lanes: Int64) -> range:
        place = int(self._place[shard_id])
        first, end = (int(x) for x in self._table.starts[place : place + 2])
        starts = np.maximum(self._lane_starts[lanes], first)
        ends = np.minimum(self._lane_ends[lanes], end)
        hits = starts < ends
        size = end - first
        if not hits.any():
            return range(size)
        wanted = range(int(starts[hits].min()) - first, int(ends[hits].max()) - first)
        return wanted if len(wanted) <= _WORTH_CUTTING * size else range(size)

    def window(self, q: int) -> tuple[int, list[int]]:
        """Find what is read from one position of the epoch to the end of its window.

        Args:
            q: The position, counted from the beginning of the epoch.

        Returns:
            The position at which the window ends, and the shards. In a window under way shards
            may have been read to the end already: those are left out.
        """
        window, within = self._table.windows(np.array([q], dtype=np.int64))
        start, size, done = int(window.start[0]), int(window.size[0]), int(within[0])
        end = min(q + (size - done) * self._table.lanes, self._table.usable)
        if done:
            places = np.arange(done, size, dtype=np.int64)
            shards, _ = self._table.at(window.repeated(0, len(places)), places)
            return end, np.unique(shards).tolist()
        bounds = np.searchsorted(self._table.starts, [start, start + size - 1], side="right") - 1
        found = slice(int(bounds[0]), int(bounds[1]) + 1)
        sizes = np.diff(self._table.starts[found.start : found.stop + 1])
        return end, self._table.shards[found][sizes > 0].tolist()


def stretch_bytes(offsets: Int64, num_bytes: Int64, samples: range) -> tuple[int, int | None]:
    """Give the stretch of a shard's bytes in which some of its samples lie.

    Args:
        offsets: Of all its samples.
        num_bytes: Of all its samples.
        samples: Which ones.

    Returns:
        First byte and end, for `ShardCache.open`; 0 and None for all samples.
    """
    if len(samples) == len(offsets):
        return 0, None
    part = slice(samples.start, samples.stop)
    return int(offsets[part].min()), int((offsets[part] + num_bytes[part]).max())
