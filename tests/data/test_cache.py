"""The shard cache: one download, checked bytes, no trace of the dead (promises P5, P6)."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.helpers.small_dataset import (
    RemoteFiles,
    flip_byte,
    local_dataset,
    remote_dataset,
    write_dataset,
)
from vitscale.config.errors import DataError, UserError, VitscaleError
from vitscale.data.cache import ShardCache
from vitscale.data.manifest import load_index
from vitscale.data.reader import ShardReader
from vitscale.data.storage import open_storage

FORK = multiprocessing.get_context("fork")
BIG = 10**9


class LoggedFiles(RemoteFiles):
    """Writes a line a download, and waits in the middle of it until it may go on."""

    def __init__(self, root, log, gate=None):
        super().__init__(root)
        self.log, self.gate = log, gate

    def download(self, name, path, first_byte=0, end_byte=None):
        with open(self.log, "a") as file:
            file.write(f"{os.getpid()} {name}\n")
        if self.gate is not None:
            data = self.read_bytes(name)
            Path(path).write_bytes(data[: len(data) // 2])
            wait_for(self.gate.exists)
        super().download(name, path, first_byte, end_byte)

    def downloads(self):
        return Path(self.log).read_text().split()[1::2] if Path(self.log).exists() else []


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def logged(tmp_path, sizes, gate=None):
    _, manifest = remote_dataset(tmp_path / "remote", sizes)
    return LoggedFiles(tmp_path / "remote", tmp_path / "log", gate), manifest


def content(cache, shard_id):
    descriptor = cache.open(shard_id)
    try:
        return os.pread(descriptor, BIG, 0)
    finally:
        os.close(descriptor)


def entries(cache):
    return {path.name for path in (cache.cache_dir / "shards").iterdir()}


def test_cache_reads_local_shards_in_place(tmp_path):
    storage, manifest = local_dataset(tmp_path / "local", [3, 2])
    cache = ShardCache(storage, manifest, tmp_path / "cache", 1)

    assert cache.path(1) == tmp_path / "local" / "shard-000001.tar"
    assert content(cache, 1) == cache.path(1).read_bytes()
    assert not (tmp_path / "cache").exists()


def test_cache_missing_local_shard_is_named(tmp_path):
    storage, manifest = local_dataset(tmp_path / "local", [3])
    (tmp_path / "local" / "shard-000000.tar").unlink()

    with pytest.raises(DataError, match=r"shard-000000\.tar: is missing"):
        ShardCache(storage, manifest, tmp_path / "cache", BIG).open(0)


def test_cache_downloads_once_and_names_by_content(tmp_path):
    storage, manifest = logged(tmp_path, [3, 2])
    cache = ShardCache(storage, manifest, tmp_path / "cache", BIG)

    first, path = content(cache, 1), cache.path(1)
    again = content(ShardCache(storage, manifest, tmp_path / "cache", BIG), 1)

    assert first == again == storage.read_bytes("shard-000001.tar")
    assert path.name == manifest.shards.sha256[1]
    assert storage.downloads() == ["shard-000001.tar"]
    assert not list((tmp_path / "cache" / "fill").iterdir())


def test_cache_processes_share_one_download(tmp_path):
    gate = tmp_path / "gate"
    storage, manifest = logged(tmp_path, [4] * 3, gate)
    expected = [storage.read_bytes(name) for name in manifest.shards.names]

    def fill(results, turn):
        cache = ShardCache(storage, manifest, tmp_path / "cache", BIG)
        order = [(turn + i) % 3 for i in range(3)]
        results.put(all(content(cache, i) == expected[i] for i in order))

    results = FORK.Queue()
    processes = [FORK.Process(target=fill, args=(results, turn)) for turn in range(6)]
    for process in processes:
        process.start()
    wait_for(lambda: len(storage.downloads()) == 3)  # all six are at work on three shards
    gate.touch()

    assert [results.get(timeout=30) for _ in processes] == [True] * 6
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 6
    assert sorted(storage.downloads()) == sorted(manifest.shards.names)


def test_cache_killed_filler_blocks_nobody(tmp_path):
    gate = tmp_path / "gate"
    storage, manifest = logged(tmp_path, [4, 4], gate)
    fill = tmp_path / "cache" / "fill" / manifest.shards.sha256[0]
    victim = FORK.Process(
        target=lambda: ShardCache(storage, manifest, tmp_path / "cache", BIG).open(0)
    )
    victim.start()
    wait_for(lambda: fill.exists() and any(path.stat().st_size for path in fill.iterdir()))
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(30)
    assert victim.exitcode == -signal.SIGKILL
    assert list(fill.iterdir()), "the killed process left half a shard"
    gate.touch()

    data = content(ShardCache(storage, manifest, tmp_path / "cache", BIG), 0)

    assert data == storage.read_bytes("shard-000000.tar")
    assert not fill.exists()


def test_cache_leftovers_of_other_shards_are_swept(tmp_path):
    storage, manifest = logged(tmp_path, [4, 4])
    dead = tmp_path / "cache" / "fill" / ("0" * 64)
    dead.mkdir(parents=True)
    (dead / "shard-000009.tar").write_bytes(bytes(1000))

    content(ShardCache(storage, manifest, tmp_path / "cache", BIG), 0)

    assert not dead.exists()


def test_cache_running_download_is_not_swept(tmp_path):
    gate = tmp_path / "gate"
    slow, manifest = logged(tmp_path, [4, 4], gate)
    thread = threading.Thread(
        target=lambda: content(ShardCache(slow, manifest, tmp_path / "cache", BIG), 0)
    )
    thread.start()
    half = tmp_path / "cache" / "fill" / manifest.shards.sha256[0] / manifest.shards.sha256[0]
    wait_for(lambda: half.exists() and half.stat().st_size)

    quick = RemoteFiles(tmp_path / "remote")
    cache = ShardCache(quick, manifest, tmp_path / "cache", BIG)
    content(cache, 1)

    assert half.exists()
    gate.touch()
    thread.join(30)
    assert entries(cache) == set(manifest.shards.sha256)


def sample_of(storage, manifest, cache, shard_id, index):
    reader = ShardReader(storage, manifest, cache, 2)
    try:
        return reader.read(shard_id, index).image
    finally:
        reader.close()


def test_cache_damaged_copy_is_fetched_again(tmp_path):
    storage, manifest = logged(tmp_path, [4])
    path = ShardCache(storage, manifest, tmp_path / "cache", BIG).path(0)
    row = load_index(storage, manifest, 0)
    intact = path.read_bytes()[row.offsets[2] :][: row.num_bytes[2]]
    flip_byte(path, int(row.offsets[2]) + 7)
    cache = ShardCache(storage, manifest, tmp_path / "cache", BIG)

    assert sample_of(storage, manifest, cache, 0, 2) == intact
    assert storage.downloads() == ["shard-000000.tar"] * 2
    assert cache.path(0).read_bytes() == storage.read_bytes("shard-000000.tar")


def test_cache_truncated_copy_is_fetched_again(tmp_path):
    storage, manifest = logged(tmp_path, [4])
    path = ShardCache(storage, manifest, tmp_path / "cache", BIG).path(0)
    os.truncate(path, 1024)

    data = content(ShardCache(storage, manifest, tmp_path / "cache", BIG), 0)

    assert data == storage.read_bytes("shard-000000.tar")


def test_cache_damaged_store_is_refused_after_two_downloads(tmp_path):
    storage, manifest = logged(tmp_path, [4])
    flip_byte(tmp_path / "remote" / "shard-000000.tar", 700)
    cache = ShardCache(storage, manifest, tmp_path / "cache", BIG)

    with pytest.raises(DataError, match=r"shard shard-000000\.tar: 2 downloads gave bytes"):
        cache.open(0)

    assert storage.downloads() == ["shard-000000.tar"] * 2
    assert not list((tmp_path / "cache" / "fill").iterdir())


def test_cache_missing_remote_shard_is_named(tmp_path):
    storage, manifest = logged(tmp_path, [4])
    storage.delete("shard-000000.tar")

    with pytest.raises(DataError, match=r"shard-000000\.tar: is missing"):
        ShardCache(storage, manifest, tmp_path / "cache", BIG).open(0)


def test_cache_discard_spares_a_copy_that_was_replaced(tmp_path):
    storage, manifest = logged(tmp_path, [4])
    one = ShardCache(storage, manifest, tmp_path / "cache", BIG)
    other = ShardCache(storage, manifest, tmp_path / "cache", BIG)
    held, late = one.open(0), other.open(0)

    assert one.discard(0, held)
    fresh = one.path(0)
    inode = fresh.stat().st_ino
    assert other.discard(0, late)

    assert fresh.stat().st_ino == inode
    assert storage.downloads() == ["shard-000000.tar"] * 2


def test_cache_evicts_the_least_recently_used(tmp_path):
    storage, manifest = logged(tmp_path, [5] * 4)
    sizes = manifest.shards.num_bytes
    cache = ShardCache(storage, manifest, tmp_path / "cache", int(sizes[:3].sum()))
    for shard_id in (0, 1, 2, 0):
        content(cache, shard_id)

    content(cache, 3)

    sha256 = manifest.shards.sha256
    assert sha256[1] not in entries(cache)
    assert {sha256[0], sha256[3]} <= entries(cache)
    used = sum(path.stat().st_size for path in (cache.cache_dir / "shards").iterdir())
    assert used <= cache.limit_bytes


@pytest.mark.parametrize("cached_before", [False, True])
def test_cache_never_evicts_what_another_process_holds(tmp_path, cached_before):
    storage, manifest = logged(tmp_path, [5] * 4)
    limit = int(manifest.shards.num_bytes.max())
    if cached_before:
        content(ShardCache(storage, manifest, tmp_path / "cache", limit), 0)

    def hold(ready, done):
        ShardCache(storage, manifest, tmp_path / "cache", limit).open(0)
        ready.set()
        done.wait(30)

    ready, done = FORK.Event(), FORK.Event()
    holder = FORK.Process(target=hold, args=(ready, done))
    holder.start()
    assert ready.wait(30)
    cache = ShardCache(storage, manifest, tmp_path / "cache", limit)

    for shard_id in (1, 2, 3):
        content(cache, shard_id)
        assert manifest.shards.sha256[0] in entries(cache)
    done.set()
    holder.join(30)
    content(cache, 1)

    assert entries(cache) == {manifest.shards.sha256[1]}


def test_cache_smaller_than_a_shard_is_refused(tmp_path):
    storage, manifest = logged(tmp_path, [5])

    with pytest.raises(UserError, match="cache_limit_bytes = 100 cannot hold"):
        ShardCache(storage, manifest, tmp_path / "cache", 100)


def test_cache_that_cannot_be_written_says_where(tmp_path):
    storage, manifest = logged(tmp_path, [5])
    (tmp_path / "cache").write_text("a file is in the way")

    with pytest.raises(VitscaleError, match=r"shard cache in .*cache cannot be used"):
        ShardCache(storage, manifest, tmp_path / "cache", BIG).open(0)


@pytest.mark.s3
def test_cache_processes_fill_from_s3(tmp_path, s3_uri):
    manifest = write_dataset(open_storage(s3_uri), [4] * 5)
    expected = [open_storage(s3_uri).read_bytes(name) for name in manifest.shards.names]

    def fill(results, turn):
        cache = ShardCache(open_storage(s3_uri), manifest, tmp_path / "cache", BIG)
        order = [(turn + i) % 5 for i in range(5)]
        results.put(all(content(cache, i) == expected[i] for i in order))

    results = FORK.Queue()
    processes = [FORK.Process(target=fill, args=(results, turn)) for turn in range(4)]
    for process in processes:
        process.start()

    assert [results.get(timeout=60) for _ in processes] == [True] * 4
    for process in processes:
        process.join(30)
    assert {p.name for p in (tmp_path / "cache" / "shards").iterdir()} == set(
        manifest.shards.sha256
    )
