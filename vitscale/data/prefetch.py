"""A process that fetches what a node will read next, ahead of its readers.

There is one a node, forked by the node's first rank, for the lanes of all its ranks: they go
through the order in step, so one walk in the order of need spends the bytes that may be ahead on
what is due first, and no two ranks wait for each other's downloads. It holds what it fetched, and
so keeps it from eviction, until the readers are past it; they say where they are through shared
memory. A fetch that fails is left to the reader, who meets the error itself and knows what to do.
"""

import heapq
import itertools
import mmap
import os
import resource
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from vitscale.config.errors import UserError, VitscaleError
from vitscale.config.recipe import DataConfig
from vitscale.data import activity
from vitscale.data.activity import Activity
from vitscale.data.cache import ShardCache
from vitscale.data.forked import settle
from vitscale.data.manifest import load_index
from vitscale.data.mixture import Mixture
from vitscale.data.order import Order
from vitscale.data.upcoming import Need, Upcoming, stretch_bytes

# How often the process looks where the readers are.
_LOOK_S = 0.1


@dataclass(frozen=True)
class Walk:
    """One remote dataset that is fetched ahead.

    Args:
        cache: Its cache.
        upcoming: What the node's lanes read of it.
        own_position: Position in its own order at which it stands when the run begins.
        share: Its share of the positions of the run: 1 where there is one dataset.
    """

    cache: ShardCache
    upcoming: Upcoming
    own_position: int = 0
    share: float = 1.0

    @property
    def window_bytes(self) -> int:
        """Bytes that the lanes read from at a time: a window each, and the end of a shard."""
        sizes = self.cache.manifest.shards.num_bytes
        order = self.upcoming.order
        count = min(len(self.upcoming.lanes) * (order.shuffle_block + 1), len(sizes))
        return int(np.ceil(sizes.mean() * count))


def node_lanes(order: Order | Mixture, ranks: Collection[int], world_size: int) -> list[int]:
    """Give the lanes that some ranks read.

    Args:
        order: The order of the run.
        ranks: Those of a node.
        world_size: All ranks.

    Returns:
        The lanes, ascending.
    """
    slots = np.concatenate([order.rank_slots(rank, world_size) for rank in ranks])
    lanes: list[int] = np.unique(slots % order.lanes).tolist()
    return lanes


def build_walks(
    order: Order | Mixture, caches: Sequence[ShardCache], lanes: Collection[int], position: int
) -> list[Walk]:
    """Give the walks through the remote datasets of a run.

    Args:
        order: The order of the run.
        caches: Of its datasets.
        lanes: The node's lanes.
        position: Where the run begins.

    Returns:
        One a remote dataset.
    """
    if isinstance(order, Order):
        walks = [Walk(caches[0], Upcoming(order, lanes), position)]
    else:
        walks = [
            Walk(cache, Upcoming(source.order, lanes), own, share)
            for cache, source, own, share in zip(
                caches, order.sources, order.own_positions(position), order.shares, strict=True
            )
        ]
    return [walk for walk in walks if walk.cache.is_remote]


def choose_prefetch_bytes(walks: Sequence[Walk], limit_bytes: int, wish: int | None) -> int:
    """Check that the cache holds what the node reads at a time, and say how much may be ahead.

    Args:
        walks: What the node reads.
        limit_bytes: Size of the cache.
        wish: Bytes to fetch ahead, from the recipe; None: the next window of every lane, as far
            as there is room.

    Returns:
        Bytes to fetch ahead.

    Raises:
        UserError: The cache is too small.
    """
    total = sum(int(walk.cache.manifest.shards.num_bytes.sum()) for walk in walks)
    largest = max(int(walk.cache.manifest.shards.num_bytes.max()) for walk in walks)
    window = min(sum(walk.window_bytes for walk in walks), total)
    ahead = min(window if wish is None else wish, total - window)
    least = window + min(largest if wish is None else ahead, total - window)
    if limit_bytes < least:
        orders = [walk.upcoming.order for walk in walks]
        raise UserError(
            f"data.cache_limit_bytes = {limit_bytes} cannot hold what this node reads at a time: "
            f"{len(walks[0].upcoming.lanes)} lanes with windows of data.shuffle_block = "
            f"{orders[0].shuffle_block} shards take {window} bytes, and {least - window} are "
            f"fetched ahead. Raise data.cache_limit_bytes to {least}, lower data.shuffle_block"
            + (" or data.prefetch_bytes" if wish is not None else "")
            + ", or use more nodes"
        )
    return min(ahead, limit_bytes - window)


class Prefetcher:
    """Fetches ahead in a process of its own; build it in the main thread, which it ends with.

    Args:
        walks: What to fetch.
        position: Where the run begins.
        prefetch_bytes: Bytes that may be fetched before anybody reads them.
        num_downloads: Downloads at a time.
    """

    def __init__(
        self, walks: Sequence[Walk], position: int, prefetch_bytes: int, num_downloads: int
    ) -> None:
        self._position: NDArray[np.int64] = np.frombuffer(mmap.mmap(-1, 8), np.int64)
        self._position[0] = position
        # One slot a download.
        self.activity = Activity(num_downloads)
        ahead = _Ahead(walks, self._position, prefetch_bytes, self.activity, num_downloads)
        self.process = get_context("fork").Process(
            target=_serve, args=(ahead, os.getpid()), name="prefetcher", daemon=True
        )
        self.process.start()
        # It ignores SIGTERM, so an exit without close() must not wait for it.
        self._end = weakref.finalize(self, _kill, self.process)

    def advance(self, position: int) -> None:
        """Say where the readers are.

        Args:
            position: Below it nothing will be read any more.
        """
        self._position[0] = position

    def close(self) -> None:
        """End the process; what it fetched stays in the cache."""
        self._end()


def build_prefetcher(
    config: DataConfig,
    order: Order | Mixture,
    caches: Sequence[ShardCache],
    *,
    ranks: Collection[int],
    world_size: int,
    is_first: bool,
    position: int,
) -> Prefetcher | None:
    """Check the size of the cache on every rank, and start the node's prefetcher on its first.

    Args:
        config: The recipe's [data].
        order: The order of the run.
        caches: Of its datasets.
        ranks: All ranks of this node.
        world_size: All ranks.
        is_first: Whether this rank is the first of its node.
        position: Where the run begins.

    Returns:
        The prefetcher; None on other ranks, and where all datasets are read in place.

    Raises:
        UserError: The cache cannot hold what the node reads at a time.
    """
    walks = build_walks(order, caches, node_lanes(order, ranks, world_size), position)
    if not walks:
        return None
    ahead = choose_prefetch_bytes(walks, config.cache_limit_bytes, config.prefetch_bytes)
    if not is_first:
        return None
    # One of the node's downloads is left to readers that wait.
    return Prefetcher(walks, position, ahead, max(config.downloads_per_node - 1, 1))


def _kill(process: ForkProcess) -> None:
    process.kill()
    process.join()


def _serve(ahead: "_Ahead", parent: int) -> None:
    settle(parent)
    ahead.run()


@dataclass
class _Fetched:
    """A shard that is fetched or being fetched."""

    # Positions of the run from which on, and before which, it is read; about.
    position: float
    end_position: float
    num_bytes: int
    # Gives the descriptor; None: it failed.
    descriptor: Future[int | None]


@dataclass(frozen=True, order=True)
class _Due:
    """A need by the position of the run at which it is due."""

    position: float
    # Breaks ties, so that nothing behind it is compared.
    number: int
    end_position: float
    num_bytes: int
    walk: Walk
    need: Need


class _Ahead:
    """What the process does."""

    def __init__(
        self,
        walks: Sequence[Walk],
        position: NDArray[np.int64],
        prefetch_bytes: int,
        slots: Activity,
        num_downloads: int,
    ) -> None:
        self._walks, self._position, self._prefetch_bytes = walks, position, prefetch_bytes
        self._start = int(position[0])
        # Positions that are read at the same time as the first of them.
        self._reach = walks[0].upcoming.order.global_batch
        self._slots, self._num_downloads = slots, num_downloads
        self._fetched: list[_Fetched] = []

    def run(self) -> None:
        """Fetch until the process is ended."""
        writers: SimpleQueue[activity.Writer] = SimpleQueue()
        for number in range(self._num_downloads):
            writers.put(self._slots.slot(number))
        dues = heapq.merge(*(self._dues(number, walk) for number, walk in enumerate(self._walks)))
        # Half of the files that the process may have open are left to downloads.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        with ThreadPoolExecutor(
            self._num_downloads, initializer=lambda: activity.use(writers.get())
        ) as threads:
            due = next(dues, None)
            while True:
                position = int(self._position[0])
                self._let_go(position)
                running = [one.descriptor for one in self._fetched if not one.descriptor.done()]
                if (
                    due is not None
                    and len(running) < self._num_downloads
                    and len(self._fetched) < most
                    and self._may_fetch(due, position)
                ):
                    future = threads.submit(_fetch, due.walk, due.need)
                    self._fetched.append(
                        _Fetched(due.position, due.end_position, due.num_bytes, future)
                    )
                    due = next(dues, None)
                elif running:
                    wait(running, _LOOK_S, FIRST_COMPLETED)
                else:
                    time.sleep(_LOOK_S)

    def _dues(self, number: int, walk: Walk) -> Iterator[_Due]:
        """Give the needs of one dataset with the positions of the run that they stand for."""
        shards = walk.cache.manifest.shards
        ties = itertools.count(number, len(self._walks))
        for need in walk.upcoming.after(walk.own_position):
            first, end = (
                self._start + (own - walk.own_position) / walk.share
                for own in (need.position, need.end_position)
            )
            share = len(need.samples) / int(shards.num_samples[need.shard_id])
            num_bytes = int(share * int(shards.num_bytes[need.shard_id]))
            yield _Due(first, next(ties), end, num_bytes, walk, need)

    def _may_fetch(self, due: _Due, position: int) -> bool:
        """Tell whether a shard is being read now, or may be ahead."""
        reached = position + self._reach
        if due.position < reached:
            return True
        ahead = sum(one.num_bytes for one in self._fetched if one.position >= reached)
        return ahead + due.num_bytes <= self._prefetch_bytes

    def _let_go(self, position: int) -> None:
        """Close what the readers are past."""
        kept = []
        for one in self._fetched:
            if one.end_position > position or not one.descriptor.done():
                kept.append(one)
                continue
            descriptor = one.descriptor.result()
            if descriptor is not None:
                os.close(descriptor)
        self._fetched = kept


def _fetch(walk: Walk, need: Need) -> int | None:
    cache, shard_id = walk.cache, need.shard_id
    try:
        if len(need.samples) == int(cache.manifest.shards.num_samples[shard_id]):
            cache.read_index(shard_id)
            return cache.open(shard_id, ahead=True)
        index = load_index(cache.index_of(shard_id), cache.manifest, shard_id)
        first_byte, end_byte = stretch_bytes(index.offsets, index.num_bytes, need.samples)
        return cache.open(shard_id, first_byte, end_byte, ahead=True)
    except VitscaleError:
        activity.count("failed_prefetches")
        return None
