"""One epoch of the order: its shards end to end, cut into lanes, and the lanes into windows."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitscale.data.permute import mix64, permutation, permute, stream

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Windows:
    """The shuffle windows of some places; arrays of one length."""

    # First place of the window in the epoch's sequence, and how many places it has.
    start: Int64
    size: Int64
    key: NDArray[np.uint64]

    def repeated(self, i: int, count: int) -> "Windows":
        """Repeat one window.

        Args:
            i: Which one.
            count: How often.

        Returns:
            As many equal windows.
        """
        return Windows(
            np.full(count, self.start[i]), np.full(count, self.size[i]), np.full(count, self.key[i])
        )


class EpochTable:
    """Where the samples of one epoch lie; 12 bytes a shard.

    Args:
        sizes: Samples of each shard, by shard_id.
        seed: Seed of the run.
        epoch: Which epoch.
        usable: Samples that the epoch feeds.
        lanes: Stretches into which the epoch is cut.
        shuffle_block: Shards of a window.
    """

    def __init__(
        self, sizes: Int64, seed: int, epoch: int, usable: int, lanes: int, shuffle_block: int
    ) -> None:
        self.usable, self.lanes, self.shuffle_block = usable, lanes, shuffle_block
        # Shards in this epoch's order, and where each begins when they are laid end to end.
        order = permutation(len(sizes), stream(seed, "shards", epoch))
        self.shards = order.astype(np.int32)
        self.starts = np.zeros(len(sizes) + 1, dtype=np.int64)
        np.cumsum(sizes.take(order), out=self.starts[1:])
        self.window_key = stream(seed, "window", epoch)
        # Place in `shards` of the shard in which each lane begins.
        lane_starts, _ = self._lane_bounds(np.arange(lanes, dtype=np.int64))
        self.lane_first = np.searchsorted(self.starts, lane_starts, side="right") - 1

    def windows(self, q: Int64) -> tuple[Windows, Int64]:
        """Find the windows of some positions of the epoch.

        Args:
            q: Positions counted from the beginning of the epoch, below `usable`.

        Returns:
            Their windows, and their places counted from the window's start.
        """
        place, lane = np.divmod(q, self.lanes)
        lane_start, lane_end = self._lane_bounds(lane)
        sequence = lane_start + place
        shard = np.searchsorted(self.starts, sequence, side="right") - 1
        # Counted from the lane's own first shard, so only the last window of a lane is short.
        block, first = self.shuffle_block, self.lane_first[lane]
        number = (shard - first) // block
        start = np.maximum(self.starts[first + number * block], lane_start)
        last = np.minimum(first + (number + 1) * block, len(self.shards))
        end = np.minimum(self.starts[last], lane_end)
        key = np.full(len(q), self.window_key, dtype=np.uint64)
        key = mix64(mix64(key ^ lane.astype(np.uint64)) ^ number.astype(np.uint64))
        return Windows(start, end - start, key), sequence - start

    def at(self, windows: Windows, within: Int64) -> tuple[Int64, Int64]:
        """Find the samples that the permutations of their windows send some places to.

        Args:
            windows: The window of each place.
            within: Each place, counted from its window's start.

        Returns:
            shard_id of each sample, and its index in the shard.
        """
        sequence = windows.start + permute(within, windows.size, windows.key)
        shard = np.searchsorted(self.starts, sequence, side="right") - 1
        return self.shards[shard].astype(np.int64), sequence - self.starts[shard]

    def _lane_bounds(self, lane: Int64) -> tuple[Int64, Int64]:
        whole, rest = divmod(self.usable, self.lanes)
        starts = lane * whole + np.minimum(lane, rest)
        ends = starts + whole + (lane < rest)
        # What "drop" leaves out takes part in the permutation of the last window.
        return starts, np.where(lane == self.lanes - 1, self.starts[-1], ends)
