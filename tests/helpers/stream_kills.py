"""A job of two ranks that stream from a store through one cache, killed again and again."""

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.helpers.runs import CHECKOUT, environment
from vitscale.data.audit import hash_key
from vitscale.data.order import Order

SIZES = [10] * 40
BATCH, LANES, BLOCK = 20, 4, 2
# A row of every rank's file: the key hashes of its share of one step.
SHARE = BATCH // 2

RANK = """
import sys
from pathlib import Path
from vitscale.config.recipe import AugmentConfig, DataConfig
from vitscale.data.dataset import open_dataset
from vitscale.data.loader import build_train_loader
from vitscale.data.order import Order

uri, cache, out, rank, steps, limit = sys.argv[1:]
path = Path(out)
row = 8 * SHARE
done = path.stat().st_size // row if path.exists() else 0
file = open(path, "ab")
file.truncate(done * row)
data = open_dataset(uri)
config = DataConfig(
    train=uri, num_workers=2, cache_dir=cache, cache_limit_bytes=int(limit), shuffle_block=BLOCK,
    **PREFETCH,
)
order = Order(data.manifest.shards.num_samples, 1, BATCH, LANES, BLOCK)
loader = build_train_loader(
    config, AugmentConfig(), [data], order=order, img_size=16, in_chans=3, rank=int(rank),
    world_size=2, micro_batch=SHARE, start_step=done, seed=1,
)
for step in range(done, int(steps)):
    file.write(next(loader).key_hash.numpy().tobytes())
    file.flush()
loader.close()
"""


@dataclass
class Job:
    """Where a job reads and writes.

    Args:
        uri: The dataset.
        folder: Cache and results.
        steps: Length of the job.
        cache_bytes: Limit of the cache; below the dataset, so that shards come and go.
        prefetch: Leaves of the recipe for the readers ahead, as Python source.
        env: What reaches the store.
    """

    uri: str
    folder: Path
    steps: int
    cache_bytes: int
    prefetch: str
    env: dict[str, str]

    def start(self) -> list[subprocess.Popen]:
        constants = f"SHARE, BATCH, LANES, BLOCK, PREFETCH = {SHARE}, {BATCH}, {LANES}, {BLOCK}, "
        code = f"{constants}{self.prefetch}\n{RANK}"
        words = [str(self.steps), str(self.cache_bytes)]
        return [
            subprocess.Popen(
                [sys.executable, "-c", code, self.uri, str(self.folder / "cache"),
                 str(self.rows(rank)), str(rank), *words],
                cwd=CHECKOUT, env=environment(PYTHONPATH=str(CHECKOUT), **self.env),
                stderr=subprocess.PIPE, text=True,
            )
            for rank in (0, 1)
        ]  # fmt: skip

    def rows(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}"

    def run_with_kills(self, rng: random.Random, kills: int, whole_s: float) -> int:
        """Run to the end; returns how many kills hit a running job."""
        done = 0
        while True:
            ranks = self.start()
            wait_s = rng.uniform(0.3, 1.0) * whole_s if done < kills else 300
            deadline = time.monotonic() + wait_s
            while time.monotonic() < deadline and any(r.poll() is None for r in ranks):
                time.sleep(0.01)
            if all(rank.poll() is not None for rank in ranks):
                texts = [rank.communicate()[1] for rank in ranks]
                assert [rank.returncode for rank in ranks] == [0, 0], texts
                return done
            assert done < kills, "the job hangs"
            # One rank first, the other a moment later: what a launcher does; or both at once.
            first = rng.choice(ranks)
            first.kill()
            if rng.random() < 0.5:
                time.sleep(rng.uniform(0, 0.3))
            for rank in ranks:
                rank.kill()
                rank.communicate()
            done += 1

    def check(self) -> None:
        """Make sure that the ranks read what was due, and that nothing is left of the dead."""
        order = Order(SIZES, 1, BATCH, LANES, BLOCK)
        hashes = np.array([hash_key(f"{i:09d}") for i in range(sum(SIZES))], np.uint64)
        found = order.samples(np.arange(self.steps * BATCH)).sample_index
        due = hashes[found].view(np.int64).reshape(self.steps, BATCH)
        for rank in (0, 1):
            rows = np.fromfile(self.rows(rank), np.int64).reshape(-1, SHARE)
            assert (rows == due[:, order.rank_slots(rank, 2)]).all()
        for path in (self.folder / "cache").rglob("*"):
            if path.is_file():
                with open(path, "r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def shared_memory() -> set[str]:
    """Names in /dev/shm, without those of MPI jobs, which others on the machine may run."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("mpich_")}


def readers_left(folder: Path) -> list[int]:
    """Processes that still work for a job."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def end_all(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
