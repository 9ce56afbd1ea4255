"""Batches of uint8 images from worker processes, the same ones however many processes there are.

Readers are forked from the rank by torch's DataLoader and hand over whole micro-batches in shared
memory. The random numbers of an example come from (seed, epoch, sample) alone. A bad sample ends
the run with a message that says where it lies; normalisation is left to the training device.
"""

import atexit
import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import resource
import signal
import sys
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch.utils.data import DataLoader

from vitscale.config.errors import VitscaleError
from vitscale.config.recipe import AugmentConfig, DataConfig
from vitscale.data.cache import ShardCache
from vitscale.data.examples import Batch, Examples
from vitscale.data.manifest import Manifest
from vitscale.data.order import Order
from vitscale.data.reader import ShardReader
from vitscale.data.requests import EvalRequests, Requests, TrainRequests
from vitscale.data.storage import Storage

# Files a reader process may have open, where the system allows it to ask for so many.
_MAX_FILES = 8192
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# How long a reader whose connection broke may take to be seen as dead.
_REAP_S = 1.0


class _WorkerSetup:
    """Prepares a forked reader process; made in the rank, called in the reader."""

    def __init__(self) -> None:
        self.parent = os.getpid()

    def __call__(self, worker_id: int) -> None:
        # A batch system signals the whole process group. The rank then saves and stops its readers
        # itself; it needs their batches until it does.
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            signal.signal(name, signal.SIG_IGN)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self.parent:  # it died before prctl took effect
            os._exit(1)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wish = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wish), hard))
        torch.set_num_threads(1)


class TrainLoader:
    """Iterates over the micro-batches of one rank; its readers start at once.

    Build it in the main thread: readers end with the thread that started them.

    Args:
        examples: Makes the batches.
        requests: What to make, in order.
        num_workers: Reader processes; 0 reads in this process.
        prefetch_batches: Micro-batches that each reader prepares ahead.
        pin_memory: Copy batches to page-locked memory, for fast copies to a GPU.
    """

    def __init__(
        self,
        examples: Examples,
        requests: Iterable[Requests],
        num_workers: int,
        prefetch_batches: int,
        pin_memory: bool,
    ) -> None:
        self._examples = examples
        others = set(multiprocessing.active_children())
        loader = DataLoader(
            examples,
            batch_sampler=requests,  # type: ignore[arg-type]  # one request object a batch
            collate_fn=_unchanged,
            num_workers=num_workers,
            pin_memory=pin_memory,
            worker_init_fn=_WorkerSetup() if num_workers else None,
            multiprocessing_context="fork" if num_workers else None,
            prefetch_factor=prefetch_batches if num_workers else None,
        )
        self._batches: Iterator[object] | None = iter(loader)
        self._workers = set(multiprocessing.active_children()) - others
        # Readers ignore SIGTERM, so an exit without close() must not wait for a stuck one.
        self._at_exit = _CloseAtExit(self)
        atexit.register(self._at_exit)

    def __iter__(self) -> "TrainLoader":
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            raise StopIteration
        try:
            batch = next(self._batches)
        except (RuntimeError, OSError, EOFError) as error:
            batch = self._loss_of_reader()
            if batch is None:
                raise
            self.close()
            raise batch from error
        if isinstance(batch, VitscaleError):
            self.close()
            raise batch
        assert isinstance(batch, Batch)
        return batch

    def _loss_of_reader(self) -> VitscaleError | None:
        # torch notices a dead reader in several ways, some of them a bare "connection reset"; its
        # handler of SIGCHLD may then raise in the middle of this, once for each dead reader.
        for _ in range(len(self._workers) + 1):
            with contextlib.suppress(RuntimeError):
                return self._find_dead_reader()
        return None

    def _find_dead_reader(self) -> VitscaleError | None:
        closed = multiprocessing.connection.wait([w.sentinel for w in self._workers], _REAP_S)
        for worker in self._workers:
            how = _end_of(worker) if worker.sentinel in closed else None
            if how is None:
                continue
            return VitscaleError(
                f"reader process {worker.pid} was ended from outside ({how}); if the machine ran "
                "out of memory, lower data.num_workers or data.prefetch_batches; if /dev/shm did "
                "(SIGBUS), make it larger"
            )
        return None

    def close(self) -> None:
        """Stop the readers and close the shards; the loader is finished afterwards."""
        self._batches = None  # torch stops its workers when the iterator goes
        for worker in self._workers:
            if worker.is_alive():
                worker.kill()
            worker.join()
        self._workers.clear()
        self._examples.reader.close()
        atexit.unregister(self._at_exit)


def _end_of(worker: multiprocessing.process.BaseProcess) -> str | None:
    # Looks without reaping: were Process.is_alive() interrupted by torch's handler right after its
    # waitpid(2), the exit status would be lost. Torch itself may have reaped it before.
    assert worker.pid is not None
    try:
        end = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        code = worker.exitcode
    else:
        killed = end is not None and end.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        code = end and (-end.si_status if killed else end.si_status)
    if code == 0:
        return None
    if code is None:
        return "cause unknown"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


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
        examples: Makes the batches.
        requests: What to make.
        num_workers: Reader processes; 0 reads in this process.
        prefetch_batches: Micro-batches that each reader prepares ahead.
        pin_memory: Copy batches to page-locked memory.
    """

    def __init__(
        self,
        examples: Examples,
        requests: EvalRequests,
        num_workers: int,
        prefetch_batches: int,
        pin_memory: bool,
    ) -> None:
        self._requests = requests
        self._arguments = (examples, requests, num_workers, prefetch_batches, pin_memory)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Batch]:
        with contextlib.closing(TrainLoader(*self._arguments)) as batches:
            yield from batches


def build_train_loader(
    config: DataConfig,
    augment: AugmentConfig,
    storage: Storage,
    manifest: Manifest,
    *,
    order: Order,
    img_size: int,
    in_chans: int,
    rank: int,
    world_size: int,
    micro_batch: int,
    start_step: int,
    seed: int,
    num_workers: int | None = None,
    pin_memory: bool = False,
) -> TrainLoader:
    """Build the endless loader of one rank: all micro-batches of a step, then the next step.

    Args:
        config: Readers, prefetching and cache.
        augment: How an example is made of an image.
        storage: The training set.
        manifest: Its manifest.
        order: The order of the run, built from the same manifest.
        img_size: Side of an example, px.
        in_chans: Channels of an example.
        rank: This process.
        world_size: All processes.
        micro_batch: Examples of one micro-batch.
        start_step: Completed updates; the first batch is that of the next update.
        seed: Seed of the random crops and flips.
        num_workers: Reader processes; None takes the config's.
        pin_memory: Copy batches to page-locked memory, for a GPU.

    Returns:
        The loader; close it when done.

    Raises:
        UserError: The sizes do not divide, or the cache is too small for a shard.
    """
    requests = TrainRequests(order, rank, world_size, micro_batch, start_step)
    cache = ShardCache(storage, manifest, config.cache_dir, config.cache_limit_bytes)
    reader = ShardReader(storage, manifest, cache, max_open=requests.shards_at_a_time)
    workers = config.num_workers if num_workers is None else num_workers
    examples = Examples(reader, augment, img_size, in_chans, seed)
    return TrainLoader(examples, requests, workers, config.prefetch_batches, pin_memory)


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
    cache = ShardCache(storage, manifest, config.cache_dir, config.cache_limit_bytes)
    reader = ShardReader(storage, manifest, cache, max_open=requests.shards_at_a_time)
    workers = config.num_workers if num_workers is None else num_workers
    examples = Examples(reader, augment, img_size, in_chans, seed=None)
    return EvalLoader(examples, requests, workers, config.prefetch_batches, pin_memory)


def _unchanged(batch: object) -> object:
    return batch
