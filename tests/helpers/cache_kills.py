"""Kill -9 of whole jobs that fetch, hold and read through one cache, at random moments."""

import contextlib
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

from tests.helpers.small_dataset import RemoteFiles, remote_dataset
from vitscale.data.cache import ShardCache
from vitscale.data.order import Order
from vitscale.data.prefetch import Prefetcher, build_walks

FORK = multiprocessing.get_context("fork")
SHARDS = 8


class SlowFiles(RemoteFiles):
    """Takes a while over each download."""

    def download(self, name, path, first_byte=0, end_byte=None):
        data = self.read_bytes(name)
        with open(path, "wb") as file:
            for start in range(0, len(data), 4096):
                file.write(data[start : start + 4096])
                file.flush()
                time.sleep(0.001)


def kill_jobs(folder: Path, seed: int, count: int) -> None:
    """Start and kill jobs of two processes each, over a cache that holds half of the dataset.

    Args:
        folder: Empty.
        seed: Of the moments and of whom to kill.
        count: Kills.
    """
    rng = random.Random(seed)
    _, manifest = remote_dataset(folder / "remote", [12] * SHARDS)
    storage = SlowFiles(folder / "remote")
    limit = int(manifest.shards.num_bytes.sum()) // 2

    def cache():
        return ShardCache(storage, manifest, folder / "cache", limit)

    def job(turn):
        own = cache()
        order = Order(manifest.shards.num_samples, turn, 4, 2, 2)
        with contextlib.closing(
            Prefetcher(build_walks(order, [own], range(2), 0), 0, limit // 3, 2)
        ):
            mine = random.Random(turn)
            while True:
                check_shard(own, storage, mine.randrange(SHARDS))

    jobs = [FORK.Process(target=job, args=(turn,)) for turn in range(2)]
    for one in jobs:
        one.start()
    for turn in range(2, 2 + count):
        time.sleep(rng.uniform(0.02, 0.15))
        victim = jobs.pop(rng.randrange(len(jobs)))
        assert victim.is_alive(), "a job failed by itself"
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(30)
        assert victim.exitcode == -signal.SIGKILL
        jobs.append(FORK.Process(target=job, args=(turn,)))
        jobs[-1].start()
    for one in jobs:
        one.kill()
        one.join(30)

    start = time.monotonic()
    for shard_id in range(SHARDS):
        check_shard(cache(), storage, shard_id)
    assert time.monotonic() - start < 10, "somebody's lock is still held"
    assert list((folder / "cache" / "fill").iterdir()) == []
    # What the dead held could exceed the limit; the next entry makes the room.
    cache().path(0).unlink()
    cache().path(0)
    used = sum(path.stat().st_size for path in (folder / "cache" / "shards").iterdir())
    assert used <= limit


def check_shard(cache: ShardCache, storage: RemoteFiles, shard_id: int) -> None:
    """Compare a shard, as it is read through the cache, with the store's."""
    descriptor = cache.open(shard_id)
    try:
        data = os.pread(descriptor, 1 << 30, 0)
    finally:
        os.close(descriptor)
    assert data == storage.read_bytes(cache.manifest.shards.names[shard_id])
