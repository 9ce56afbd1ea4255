"""The cache beyond whole shards: stretches, indexes, turns, room, full and read-only disks."""

import errno
import multiprocessing
import os
import time

import pytest

from tests.helpers.small_dataset import RemoteFiles, flip_byte, remote_dataset
from vitscale.config.errors import DataError, VitscaleError
from vitscale.data import activity
from vitscale.data.activity import Activity
from vitscale.data.cache import ShardCache
from vitscale.data.cache_folder import CacheFolder
from vitscale.data.manifest import index_name, load_index

FORK = multiprocessing.get_context("fork")
BIG = 10**9


@pytest.fixture
def counters():
    slots = Activity(1)
    activity.use(slots.slot(0))
    yield slots.totals
    activity.use(None)


class CountedFiles(RemoteFiles):
    """Remembers what is read."""

    def __init__(self, root):
        super().__init__(root)
        self.read = []

    def download(self, name, path, first_byte=0, end_byte=None):
        self.read.append((name, first_byte, end_byte))
        super().download(name, path, first_byte, end_byte)

    def read_bytes(self, name):
        self.read.append(name)
        return super().read_bytes(name)


@pytest.fixture
def dataset(tmp_path):
    _, manifest = remote_dataset(tmp_path / "remote", [6, 6, 6, 6])
    return CountedFiles(tmp_path / "remote"), manifest


def cache_of(dataset, tmp_path, limit=BIG, **options):
    return ShardCache(*dataset, tmp_path / "cache", limit, **options)


def stretch_of(dataset, shard_id, first, last):
    index = load_index(*dataset, shard_id)
    return int(index.offsets[first]), int(index.offsets[last] + index.num_bytes[last])


def names_in(cache):
    return {path.name for path in (cache.cache_dir / "shards").iterdir()}


def test_cache_stretch_is_fetched_alone_and_lies_in_its_place(dataset, tmp_path):
    storage, manifest = dataset
    first, end = stretch_of(dataset, 1, 2, 3)
    cache = cache_of(dataset, tmp_path)

    descriptors = [cache.open(1, first, end), cache_of(dataset, tmp_path).open(1, first, end)]

    whole = (tmp_path / "remote" / manifest.shards.names[1]).read_bytes()
    for descriptor in descriptors:
        assert os.pread(descriptor, end - first, first) == whole[first:end]
        os.close(descriptor)
    assert storage.read.count((manifest.shards.names[1], first, end)) == 1


def test_cache_stretch_is_read_from_a_whole_copy_where_there_is_one(dataset, tmp_path):
    cache = cache_of(dataset, tmp_path)
    os.close(cache.open(1))
    os.close(cache.open(1, *stretch_of(dataset, 1, 2, 3)))

    assert names_in(cache) == {dataset[1].shards.sha256[1]}


def test_cache_damaged_stretch_is_discarded_alone(dataset, tmp_path, counters):
    cache = cache_of(dataset, tmp_path)
    one, two = stretch_of(dataset, 1, 0, 1), stretch_of(dataset, 1, 4, 5)
    os.close(cache.open(1, *one))
    descriptor = cache.open(1, *two)

    assert cache.discard(1, descriptor)

    assert names_in(cache) == {f"{dataset[1].shards.sha256[1]}.{one[0]}-{one[1]}"}
    assert counters()["refetched"] == 1


def test_cache_stretch_of_a_shard_that_is_too_short_is_refused(dataset, tmp_path):
    storage, manifest = dataset
    first, end = stretch_of(dataset, 1, 4, 5)
    os.truncate(tmp_path / "remote" / manifest.shards.names[1], end - 10)

    with pytest.raises(DataError, match=rf"had {end - 10} bytes, {end} are due"):
        cache_of(dataset, tmp_path).open(1, first, end)

    assert storage.read.count((manifest.shards.names[1], first, end)) == 2


def test_cache_room_counts_stretches_without_their_holes(dataset, tmp_path):
    first, end = stretch_of(dataset, 1, 5, 5)
    cache = cache_of(dataset, tmp_path)
    os.close(cache.open(1, first, end))
    os.close(cache.open(2))

    used = int((cache.cache_dir / "locks" / "room").read_text())
    assert used == end - first + int(dataset[1].shards.num_bytes[2])


# --- indexes ---


def test_cache_indexes_are_fetched_once_and_compared_at_every_use(dataset, tmp_path):
    storage, manifest = dataset
    name = index_name(manifest.shards.names[1])
    for _ in range(3):
        cache = cache_of(dataset, tmp_path)
        assert load_index(cache.index_of(1), manifest, 1).keys[0] == "000000006"
    assert storage.read.count(name) == 1

    flip_byte(cache.cache_dir / "shards" / manifest.shards.index_sha256[1], 30)
    assert load_index(cache.index_of(1), manifest, 1).keys[0] == "000000006"
    assert storage.read.count(name) == 2


def test_cache_index_that_is_damaged_in_the_store_is_refused(dataset, tmp_path):
    storage, manifest = dataset
    name = index_name(manifest.shards.names[1])
    flip_byte(tmp_path / "remote" / name, 30)
    cache = cache_of(dataset, tmp_path)

    with pytest.raises(DataError, match=r"shard-000001\.index\.parquet: sha256 is"):
        load_index(cache.index_of(1), manifest, 1)
    storage.delete(name)
    with pytest.raises(DataError, match=r"shard-000001\.index\.parquet: is missing"):
        load_index(cache.index_of(1), manifest, 1)
    assert storage.read.count(name) == 3


# --- turns ---


def test_cache_downloads_of_all_processes_keep_to_the_turns(dataset, tmp_path):
    running, most = FORK.Value("i", 0), FORK.Value("i", 0)

    class Slow(RemoteFiles):
        def download(self, name, path, first_byte=0, end_byte=None):
            with running.get_lock():
                running.value += 1
                most.value = max(most.value, running.value)
            time.sleep(0.1)
            with running.get_lock():
                running.value -= 1
            super().download(name, path, first_byte, end_byte)

    def fill(shard_id):
        slow = Slow(tmp_path / "remote"), dataset[1]
        os.close(cache_of(slow, tmp_path, downloads_per_node=2).open(shard_id))

    processes = [FORK.Process(target=fill, args=(n,)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)

    assert [process.exitcode for process in processes] == [0] * 4
    assert most.value == 2


def test_cache_fetching_ahead_leaves_a_turn_to_those_who_wait(tmp_path):
    folder = CacheFolder(tmp_path / "cache", BIG, 2)

    with folder.turn(ahead=True):
        assert not can_take(folder, ahead=True)
        assert can_take(folder, ahead=False)


def can_take(folder, ahead):
    def take():
        with folder.turn(ahead):
            pass

    process = FORK.Process(target=take)
    process.start()
    process.join(0.4)
    process.kill()
    process.join()
    return process.exitcode == 0


# --- disks ---


class FullUntilEvicted(RemoteFiles):
    """The disk is full while more entries than these are there."""

    def __init__(self, root, shards, most):
        super().__init__(root)
        self.shards, self.most, self.tries = shards, most, 0

    def download(self, name, path, first_byte=0, end_byte=None):
        self.tries += 1
        if len(list(self.shards.iterdir())) > self.most:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().download(name, path, first_byte, end_byte)


def test_cache_full_disk_is_made_room_on_once(dataset, tmp_path, counters):
    cache = cache_of(dataset, tmp_path)
    for shard_id in (0, 1):
        os.close(cache.open(shard_id))
    cache.storage = FullUntilEvicted(tmp_path / "remote", cache.cache_dir / "shards", 1)

    os.close(cache.open(2))

    assert names_in(cache) == {dataset[1].shards.sha256[n] for n in (1, 2)}
    assert cache.storage.tries == 2
    assert counters()["evictions"] == 1


def test_cache_full_disk_without_anything_to_evict_is_an_error(dataset, tmp_path):
    cache = cache_of(dataset, tmp_path)
    held = cache.open(0)
    cache.storage = FullUntilEvicted(tmp_path / "remote", cache.cache_dir / "shards", 0)

    with pytest.raises(
        VitscaleError, match=r"the disk is full; make room, lower data\.cache_limit"
    ):
        cache.open(1)
    os.close(held)
    assert list((cache.cache_dir / "fill").iterdir()) == []


def test_cache_entries_by_the_thousand_need_few_lock_files(tmp_path):
    folder = CacheFolder(tmp_path / "cache", BIG, 8)
    for number in range(100):
        name = f"abc{number % 3}{number:060d}"
        with folder.turn(ahead=False):
            pass
        descriptor = folder.make(
            name, 1, lambda path: path.write_bytes(b"x") and None, folder.turn(False)
        )
        os.close(descriptor)

    assert len(list((tmp_path / "cache" / "locks").iterdir())) <= 3 + 8


def test_cache_killed_while_it_wrote_the_room_counts_anew(dataset, tmp_path):
    cache = cache_of(dataset, tmp_path)
    os.close(cache.open(0))
    (cache.cache_dir / "locks" / "room").write_text("")
    os.close(cache.open(1))

    used = int((cache.cache_dir / "locks" / "room").read_text())
    assert used == int(dataset[1].shards.num_bytes[:2].sum())
