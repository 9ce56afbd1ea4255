"""Batches of uint8 images from reader processes, the same ones however many there are.

The random numbers of an example come from (seed, epoch, sample) alone. A bad sample ends the run
with a message that says where it lies, or is replaced, as the recipe says; a reader that stands
still is named with what it waits for. Normalisation is left to the training device.
"""

import atexit
import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Int64, UInt8
from numpy.typing import NDArray
from torch import Tensor

from vitscale.config.errors import VitscaleError
from vitscale.config.recipe import AugmentConfig, DataConfig
from vitscale.data.activity import Activity
from vitscale.data.cache import ShardCache
from vitscale.data.dataset import Dataset
from vitscale.data.examples import DamagePolicy, Examples
from vitscale.data.manifest import Manifest
from vitscale.data.mixture import Mixture
from vitscale.data.order import Order
from vitscale.data.prefetch import Prefetcher, build_prefetcher, node_lanes
from vitscale.data.quarantine import BadSample
from vitscale.data.reader import SetsReader, ShardReader
from vitscale.data.readers import Readers
from vitscale.data.requests import EvalRequests, Requests, TrainRequests
from vitscale.data.slots import BatchShape
from vitscale.data.storage import Storage
from vitscale.data.upcoming import Upcoming

# How often a wait for data is looked at.
_LOOK_EVERY_S = 1.0

# Takes the seconds that the rank has waited for a batch; called every _LOOK_EVERY_S.
OnWait = Callable[[float], None]


@dataclass(frozen=True)
class Batch:
    """A micro-batch in slot order.

    `images` is the readers' own memory: it is valid until the next but one batch is taken.
    """

    images: UInt8[Tensor, "b c h w"]
    # Class of each example; examples.PADDING_LABEL where there is none.
    labels: Int64[Tensor, " b"]
    # xxh64 of each key as a signed number; 0 for padding.
    key_hash: Int64[Tensor, " b"]
    epochs: Int64[Tensor, " b"]
    # Place of each example in the order of the run; in an evaluation its sample_index, or -1.
    positions: Int64[Tensor, " b"]
    # True where another sample stands in for a bad one.
    substitutes: Bool[Tensor, " b"]
    # There, the hash of the bad sample's key; else 0.
    replaced: Int64[Tensor, " b"]
    # Samples that were found to be bad on the way.
    found_bad: tuple[BadSample, ...] = ()
    # Micro-batches that were ready when this one was asked for, itself included.
    num_ready: int = 0


class TrainLoader:
    """Iterates over the micro-batches of one rank; its readers start at once.

    Build it in the main thread: readers end with the thread that started them.

    Args:
        examples: Makes the examples.
        requests: What to make, in order.
        shape: Sizes of a micro-batch.
        num_workers: Reader processes; 0 reads in this process.
        prefetch_batches: Micro-batches that each reader prepares ahead.
        pin_memory: Copy images to page-locked memory, for fast copies to a GPU.
        prefetcher: Fetches ahead for the readers of this node; ended with them.
    """

    def __init__(
        self,
        examples: Examples,
        requests: Iterable[Requests],
        shape: BatchShape,
        num_workers: int,
        prefetch_batches: int,
        pin_memory: bool,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        self._prefetcher = prefetcher
        # Told again and again while a batch is not there.
        self.on_wait: OnWait | None = None
        self.activity = Activity(num_workers)
        self.readers = Readers(
            examples, iter(requests), shape, num_workers, prefetch_batches, self.activity
        )
        # Page-locking copies: it is done one batch ahead, while the device computes.
        self._pinner = ThreadPoolExecutor(1, "pin-memory") if pin_memory else None
        self._pinned: Future[Batch | None] | None = None
        self._is_open = True
        # Readers ignore SIGTERM, so an exit without close() must not wait for a stuck one.
        self._at_exit = _CloseAtExit(self)
        atexit.register(self._at_exit)

    def __iter__(self) -> "TrainLoader":
        return self

    def __next__(self) -> Batch:
        if not self._is_open:
            raise StopIteration
        try:
            batch = self._take() if self._pinner is None else self._take_pinned()
        except VitscaleError:
            self.close()
            raise
        if batch is None:
            raise StopIteration
        return batch

    def _take_pinned(self) -> Batch | None:
        assert self._pinner is not None
        due = self._pinned or self._pinner.submit(self._pin)
        batch = due.result()
        self._pinned = self._pinner.submit(self._pin)
        return batch

    def _pin(self) -> Batch | None:
        batch = self._take()
        return batch and replace(
            batch, images=batch.images.pin_memory(), labels=batch.labels.pin_memory()
        )

    def _take(self) -> Batch | None:
        start, num_ready = time.monotonic(), self.readers.num_ready
        while True:
            try:
                reply = self.readers.take(_LOOK_EVERY_S)
            except StopIteration:
                return None
            if reply is not None:
                break
            if not self._is_open:
                return None
            if self.on_wait is not None:
                self.on_wait(time.monotonic() - start)
        if isinstance(reply.outcome, VitscaleError):
            raise reply.outcome
        if isinstance(reply.outcome, str):
            raise RuntimeError(f"a reader process failed:\n{reply.outcome}")
        slot = self.readers.slots[reply.slot]
        filled, asked = slot.filled, slot.requests
        if self._prefetcher is not None:
            self._prefetcher.advance(int(asked.positions.min()))
        return Batch(
            images=torch.from_numpy(filled.images),
            labels=_copied(filled.labels),
            key_hash=_copied(filled.key_hash),
            epochs=_copied(asked.epochs),
            positions=_copied(asked.positions),
            substitutes=_copied(filled.substitutes),
            replaced=_copied(filled.replaced),
            found_bad=tuple(reply.outcome),
            num_ready=num_ready,
        )

    def counters(self) -> dict[str, float]:
        """Give what readers and prefetcher have done so far, by the names of activity.COUNTERS."""
        totals = self.activity.totals()
        if self._prefetcher is not None:
            more = self._prefetcher.activity.totals()
            totals = {name: value + more[name] for name, value in totals.items()}
        return totals

    def states(self) -> list[str]:
        """Say what every reader and every download ahead is doing."""
        parts = [("reader", self.activity)]
        if self._prefetcher is not None:
            parts.append(("download", self._prefetcher.activity))
        return [
            f"{name} {state.slot} {state.text}, for {state.seconds:.0f} s"
            for name, slots in parts
            for state in slots.states()
        ]

    def close(self) -> None:
        """Stop the readers and close the shards; the loader is finished afterwards."""
        self._is_open = False
        self.readers.stop()
        if self._prefetcher is not None:
            self._prefetcher.close()
        if self._pinner is not None:
            self._pinner.shutdown(cancel_futures=True)
        self.readers.close()
        atexit.unregister(self._at_exit)


def _copied(values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.copy(values))


class _CloseAtExit:
    def __init__(self, loader: TrainLoader) -> None:
        self.loader = weakref.ref(loader)

    def __call__(self) -> None:
        loader = self.loader()
        if loader is not None:
            loader.close()


class EvalLoader:
    """An evaluation set as batches; every iteration starts readers of its own.

    Args:
        examples: Makes the examples.
        requests: What to make.
        shape: Sizes of a micro-batch.
        num_workers: Reader processes; 0 reads in this process.
        prefetch_batches: Micro-batches that each reader prepares ahead.
        pin_memory: Copy images to page-locked memory.
    """

    def __init__(
        self,
        examples: Examples,
        requests: EvalRequests,
        shape: BatchShape,
        num_workers: int,
        prefetch_batches: int,
        pin_memory: bool,
    ) -> None:
        self._requests = requests
        self._arguments = (examples, requests, shape, num_workers, prefetch_batches, pin_memory)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Batch]:
        with contextlib.closing(TrainLoader(*self._arguments)) as batches:
            yield from batches


def build_train_loader(
    config: DataConfig,
    augment: AugmentConfig,
    sets: Sequence[Dataset],
    *,
    order: Order | Mixture,
    img_size: int,
    in_chans: int,
    rank: int,
    world_size: int,
    micro_batch: int,
    start_step: int,
    seed: int,
    num_workers: int | None = None,
    pin_memory: bool = False,
    node_ranks: range | None = None,
) -> TrainLoader:
    """Build the endless loader of one rank: all micro-batches of a step, then the next step.

    Args:
        config: Readers, prefetching and cache.
        augment: How an example is made of an image.
        sets: The training sets, as `open_train_sets` gives them.
        order: The order of the run, built from the same manifests.
        img_size: Side of an example, px.
        in_chans: Channels of an example.
        rank: This process.
        world_size: All processes.
        micro_batch: Examples of one micro-batch.
        start_step: Completed updates; the first batch is that of the next update.
        seed: Seed of the random crops and flips.
        num_workers: Reader processes; None takes the config's.
        pin_memory: Copy images to page-locked memory, for a GPU.
        node_ranks: All ranks of this node, which share a cache; None: this one alone.

    Returns:
        The loader; close it when done.

    Raises:
        UserError: The sizes do not divide, or the cache is too small.
    """
    requests = TrainRequests(order, rank, world_size, micro_batch, start_step)
    node = range(rank, rank + 1) if node_ranks is None else node_ranks
    lanes = node_lanes(order, node, world_size)
    orders = [order] if isinstance(order, Order) else [source.order for source in order.sources]
    caches = [_cache(config, one.storage, one.manifest) for one in sets]
    reader = SetsReader(
        [
            ShardReader(
                one.storage, one.manifest, cache, requests.shards_at_a_time, Upcoming(own, lanes)
            )
            for one, cache, own in zip(sets, caches, orders, strict=True)
        ]
    )
    prefetcher = build_prefetcher(
        config,
        order,
        caches,
        ranks=node,
        world_size=world_size,
        is_first=rank == min(node),
        position=start_step * order.global_batch,
    )
    policy = DamagePolicy(config.on_bad_sample, config.max_bad_in_a_row)
    examples = Examples(reader, augment, config.jpeg_scale, seed, order, policy)
    shape = BatchShape(micro_batch, in_chans, img_size)
    workers = config.num_workers if num_workers is None else num_workers
    return TrainLoader(
        examples, requests, shape, workers, config.prefetch_batches, pin_memory, prefetcher
    )


def _cache(config: DataConfig, storage: Storage, manifest: Manifest) -> ShardCache:
    return ShardCache(
        storage, manifest, config.cache_dir, config.cache_limit_bytes, config.downloads_per_node
    )


def build_eval_loader(
    config: DataConfig,
    augment: AugmentConfig,
    storage: Storage,
    manifest: Manifest,
    *,
    img_size: int,
    in_chans: int,
    rank: int,
    world_size: int,
    micro_batch: int,
    num_workers: int | None = None,
    pin_memory: bool = False,
) -> EvalLoader:
    """Build the loader of one rank's part of an evaluation.

    Args:
        config: Readers, prefetching and cache.
        augment: How an example is made of an image.
        storage: The evaluation set.
        manifest: Its manifest.
        img_size: Side of an example, px.
        in_chans: Channels of an example.
        rank: This process.
        world_size: All processes.
        micro_batch: Samples of one batch, padding included.
        num_workers: Reader processes; None takes the config's.
        pin_memory: Copy batches to page-locked memory, for a GPU.

    Returns:
        A loader that can be iterated over again and again; equally many batches on every rank.

    Raises:
        UserError: The cache is too small for a shard.
    """
    requests = EvalRequests(manifest, rank, world_size, micro_batch)
    cache = _cache(config, storage, manifest)
    reader = SetsReader([ShardReader(storage, manifest, cache, requests.shards_at_a_time)])
    workers = config.num_workers if num_workers is None else num_workers
    examples = Examples(reader, augment, "exact", seed=None)
    shape = BatchShape(micro_batch, in_chans, img_size)
    return EvalLoader(examples, requests, shape, workers, config.prefetch_batches, pin_memory)
