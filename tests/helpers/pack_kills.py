"""Packing under random kill -9, to any store: all of the job, one rank, during uploads."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.helpers.corpus import encoded
from tests.helpers.runs import CHECKOUT, environment
from vitscale.data.manifest import sha256_hex
from vitscale.data.storage import open_storage


def make_large_images(root: Path, count: int, num_bytes: int) -> Path:
    """Write an image folder of noise: a few of them fill a shard that is uploaded in parts."""
    side = int((num_bytes / 2.2) ** 0.5)
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), np.uint8)
        (root / f"c{number % 3}").mkdir(parents=True, exist_ok=True)
        (root / f"c{number % 3}" / f"{number}.jpg").write_bytes(encoded(pixels, quality=95))
    return root


def object_hashes_at(uri: str) -> dict[str, str]:
    """Give name -> sha256 of every object of a dataset, wherever it is."""
    storage = open_storage(uri)
    return {name: sha256_hex(storage.read_bytes(name)) for name in storage.list()}


def pack_command(source: Path, out: str, ranks: int, *more: str) -> list[str]:
    words = ["--source", f"imagefolder:{source}", "--out", out, *more]
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    launcher = [mpiexec, "-n", str(ranks)] if ranks else []
    return [*launcher, sys.executable, "-m", "data_prep.pack", *words]


def pack_with_kills(
    command: list[str], rng: random.Random, whole_s: float, kills: int, after: Callable[[], None]
) -> int:
    """Run a pack until it ends well, killing it again and again.

    Args:
        command: The pack.
        rng: Decides when, and whether the whole job or one process of it is hit.
        whole_s: Seconds that a run without kills takes.
        kills: At most so many.
        after: Called after every kill.

    Returns:
        The kills that hit a running job.
    """
    done = 0
    while True:
        process = subprocess.Popen(
            command, cwd=CHECKOUT, env=environment(), stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            wait_s = rng.uniform(0.3, 0.8) * whole_s if done < kills else 300
            _, text = process.communicate(timeout=wait_s)
            if process.returncode == 0:
                return done
            raise AssertionError(text.decode())
        except subprocess.TimeoutExpired:
            assert done < kills, "the pack hangs"
        victims = _processes_of(process.pid)
        if rng.random() < 0.5 and len(victims) > 1:
            # One of them: the others must notice and end.
            os.kill(rng.choice(victims[1:]), signal.SIGKILL)
            deadline = time.monotonic() + 60
            while process.poll() is None:
                assert time.monotonic() < deadline, "the job outlives a rank"
                time.sleep(0.02)
        _kill_group(process.pid)
        process.communicate()
        done += 1
        after()


def _processes_of(group: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == group and fields[0] != "Z":  # its session
            found.append(int(path.parent.name))
    return sorted(found)


def _kill_group(session: int) -> None:
    for pid in _processes_of(session):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
