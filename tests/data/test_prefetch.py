"""Fetching ahead: each shard once a node, within its bytes, held until read, gone with its rank."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tests.helpers.cache_kills import kill_jobs
from tests.helpers.fault_proxy import fault_proxy
from tests.helpers.small_dataset import RemoteFiles, encoded, picture, remote_dataset, write_dataset
from vitscale.config.errors import DataError, UserError
from vitscale.config.recipe import DataConfig
from vitscale.data.cache import ShardCache
from vitscale.data.manifest import load_index, load_manifest
from vitscale.data.mixture import Mixture, Source
from vitscale.data.order import Order
from vitscale.data.prefetch import (
    Prefetcher,
    build_prefetcher,
    build_walks,
    choose_prefetch_bytes,
    node_lanes,
)
from vitscale.data.storage import open_storage
from vitscale.data.upcoming import Upcoming, stretch_bytes

FORK = multiprocessing.get_context("fork")
BIG = 10**9


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def cached(cache):
    folder = cache.cache_dir / "shards"
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def shards_in(cache):
    names = cached(cache)
    return {n for n, sha in enumerate(cache.manifest.shards.sha256) if sha in names}


class Setting:
    """A dataset in a folder treated as remote, and an order over it."""

    def __init__(self, tmp_path, sizes, lanes=2, block=2, batch=8, limit=BIG):
        self.storage, self.manifest = remote_dataset(tmp_path / "remote", sizes)
        self.cache = ShardCache(self.storage, self.manifest, tmp_path / "cache", limit)
        self.order = Order(sizes, 5, batch, lanes, block)
        self.lanes = range(lanes)

    def prefetcher(self, position=0, ahead=BIG, downloads=2):
        walks = build_walks(self.order, [self.cache], self.lanes, position)
        return contextlib.closing(Prefetcher(walks, position, ahead, downloads))

    def shards_of(self, start, end):
        return set(self.order.places(np.arange(start, end)).shard_id.tolist())


def read_all(cache, order, lanes, positions):
    """Read samples as a reader process does; return the bytes that were right."""
    upcoming = Upcoming(order, lanes)
    found = order.places(positions)
    good, manifest = 0, cache.manifest
    indexes = {n: load_index(cache.index_of(n), manifest, n) for n in set(found.shard_id.tolist())}
    for epoch, shard_id, row in zip(found.epoch, found.shard_id, found.index, strict=True):
        index = indexes[int(shard_id)]
        samples = upcoming.samples(int(epoch), int(shard_id))
        stretch = stretch_bytes(index.offsets, index.num_bytes, samples)
        descriptor = cache.open(int(shard_id), *stretch)
        image = os.pread(descriptor, int(index.num_bytes[row]), int(index.offsets[row]))
        os.close(descriptor)
        good += xxhash.xxh3_64_intdigest(image) == int(index.xxh3[row])
    return good


def test_prefetch_brings_what_is_read_now_and_then_what_its_bytes_allow(tmp_path):
    setting = Setting(tmp_path, [10] * 12)
    one = int(setting.manifest.shards.num_bytes[0])
    now = setting.shards_of(0, 8 * 2)  # the first windows of both lanes

    with setting.prefetcher(ahead=one + one // 2):
        wait_for(lambda: len(shards_in(setting.cache)) > len(now))
        time.sleep(0.3)
        there = shards_in(setting.cache)

    assert now < there
    assert len(there) == len(now) + 1


def test_prefetch_goes_on_as_the_readers_do(tmp_path):
    setting = Setting(tmp_path, [10] * 12)

    with setting.prefetcher(ahead=1) as prefetcher:
        for position in range(0, setting.order.usable, 8):
            prefetcher.advance(position)
            due = setting.shards_of(position, min(position + 8, setting.order.usable))
            wait_for(lambda due=due: due <= shards_in(setting.cache))

    assert prefetcher.activity.totals()["fetches"] == 2 * 12, "each shard and its index"
    assert prefetcher.activity.totals()["bytes_fetched"] > setting.manifest.num_bytes


def test_prefetch_begins_where_the_run_goes_on(tmp_path):
    setting = Setting(tmp_path, [10] * 12)
    position = setting.order.usable - 8
    due = setting.shards_of(position, position + 8)

    with setting.prefetcher(position, ahead=1):
        wait_for(lambda: due <= shards_in(setting.cache))

    assert len(shards_in(setting.cache)) <= len(due) + 1


def test_prefetch_holds_what_will_be_read_and_lets_go_of_the_rest(tmp_path):
    setting = Setting(tmp_path, [10] * 12, lanes=1, block=1)
    shards = setting.manifest.shards
    setting.cache = ShardCache(
        setting.storage, setting.manifest, tmp_path / "cache", int(shards.num_bytes.max()) * 2
    )
    first = setting.shards_of(0, 10)
    others = [n for n in range(12) if n not in setting.shards_of(0, 30)]

    with setting.prefetcher(ahead=1) as prefetcher:
        wait_for(lambda: first <= shards_in(setting.cache))
        for shard_id in others:
            os.close(setting.cache.open(shard_id))
        assert first <= shards_in(setting.cache), "too many for the cache, and still there"
        prefetcher.advance(10)
        wait_for(lambda: setting.shards_of(10, 20) <= shards_in(setting.cache))
        time.sleep(0.3)
        for shard_id in others:
            os.close(setting.cache.open(shard_id))

    assert not first & shards_in(setting.cache)


def test_prefetch_that_fails_is_left_to_the_reader(tmp_path):
    setting = Setting(tmp_path, [10] * 6)
    setting.storage.delete("shard-000003.tar")

    with setting.prefetcher() as prefetcher:
        wait_for(lambda: shards_in(setting.cache) == {0, 1, 2, 4, 5})
        wait_for(lambda: prefetcher.activity.totals()["failed_prefetches"] > 0)
        assert prefetcher.process.is_alive()

    with pytest.raises(DataError, match=r"shard-000003\.tar: is missing"):
        setting.cache.open(3)


def test_prefetch_of_a_mixture_brings_all_datasets(tmp_path):
    one, two = Setting(tmp_path / "1", [10] * 6), Setting(tmp_path / "2", [10] * 6)
    mixture = Mixture([Source("a", one.order, 3.0), Source("b", two.order, 1.0)])
    caches = [one.cache, two.cache]
    position = 48
    walks = build_walks(mixture, caches, range(2), position)
    shards = mixture.places(np.arange(position, position + 8)).shard_id

    prefetcher = Prefetcher(walks, position, 1, 2)
    with contextlib.closing(prefetcher):
        due = {int(s) for s in shards if s < 6}, {int(s) - 6 for s in shards if s >= 6}
        wait_for(lambda: due[0] <= shards_in(one.cache) and due[1] <= shards_in(two.cache))
        time.sleep(0.3)

    assert len(shards_in(one.cache)) < 6
    assert len(shards_in(two.cache)) < 6


def test_prefetch_leaves_local_datasets_alone(tmp_path):
    storage = open_storage(tmp_path / "local")
    manifest = write_dataset(storage, [3, 3])
    cache = ShardCache(storage, manifest, tmp_path / "cache", 1)

    assert build_walks(Order([3, 3], 1, 2), [cache], [0], 0) == []


# --- the process ---


def test_prefetch_ends_with_its_rank_and_leaves_nothing_that_blocks(tmp_path):
    setting = Setting(tmp_path, [10] * 6)

    class Slow(RemoteFiles):
        def download(self, name, path, first_byte=0, end_byte=None):
            Path(path).write_bytes(b"half")
            time.sleep(30)

    def rank(pids):
        setting.cache = ShardCache(
            Slow(tmp_path / "remote"), setting.manifest, tmp_path / "cache", BIG
        )
        with setting.prefetcher() as prefetcher:
            wait_for(lambda: list((tmp_path / "cache" / "fill").glob("*/*")))
            pid = prefetcher.process.pid
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            named = [m for m in maps if "/dev/shm" in m and "(deleted)" not in m]
            pids.put((pid, named))
            time.sleep(60)

    pids = FORK.Queue()
    process = FORK.Process(target=rank, args=(pids,))
    process.start()
    pid, named = pids.get(timeout=30)
    assert named == []
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    wait_for(lambda: not alive(pid))

    whole = ShardCache(setting.storage, setting.manifest, tmp_path / "cache", BIG)
    start = time.monotonic()
    for shard_id in range(6):
        os.close(whole.open(shard_id))
    assert time.monotonic() - start < 5
    assert list((tmp_path / "cache" / "fill").iterdir()) == []


def alive(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_prefetch_outlives_the_signals_of_its_rank(tmp_path):
    setting = Setting(tmp_path, [10] * 6)

    with setting.prefetcher() as prefetcher:
        wait_for(lambda: len(shards_in(setting.cache)) == 6)
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            os.kill(prefetcher.process.pid, name)
        time.sleep(0.2)
        assert prefetcher.process.is_alive()
    assert not prefetcher.process.is_alive()


UNCLOSED = """
import sys
from pathlib import Path
from tests.data.test_prefetch import Setting, wait_for, shards_in
from vitscale.data.prefetch import Prefetcher, build_walks
setting = Setting(Path(sys.argv[1]), [10] * 4)
walks = build_walks(setting.order, [setting.cache], setting.lanes, 0)
prefetcher = Prefetcher(walks, 0, 10**9, 2)
wait_for(lambda: len(shards_in(setting.cache)) == 4)
print("done")
"""


def test_prefetch_that_is_not_closed_does_not_keep_its_rank(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", UNCLOSED, str(tmp_path)], capture_output=True, text=True, timeout=30
    )

    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


# --- room ---


def test_prefetch_room_is_checked_against_what_is_read_at_a_time(tmp_path):
    setting = Setting(tmp_path, [10] * 40, lanes=4, block=3)
    walks = build_walks(setting.order, [setting.cache], range(4), 0)
    mean = setting.manifest.num_bytes / 40
    window = 4 * 4 * mean

    assert choose_prefetch_bytes(walks, BIG, None) == pytest.approx(window, abs=1)
    assert choose_prefetch_bytes(walks, BIG, 1000) == 1000
    assert choose_prefetch_bytes(walks, int(window + 2 * mean), None) == pytest.approx(
        2 * mean, abs=1
    )
    with pytest.raises(UserError, match=r"4 lanes with windows of data.shuffle_block = 3 shards"):
        choose_prefetch_bytes(walks, int(window), None)
    with pytest.raises(UserError, match=r"are fetched ahead\. Raise data.cache_limit_bytes to"):
        choose_prefetch_bytes(walks, int(window + mean), int(2 * mean))


def test_prefetch_room_of_a_small_dataset_is_the_dataset(tmp_path):
    setting = Setting(tmp_path, [10] * 3, lanes=2, block=16)
    walks = build_walks(setting.order, [setting.cache], range(2), 0)

    assert choose_prefetch_bytes(walks, setting.manifest.num_bytes, None) == 0


def test_prefetch_is_started_once_a_node_and_checked_on_every_rank(tmp_path):
    setting = Setting(tmp_path, [10] * 40, lanes=4, block=3)
    folder = {"train": str(tmp_path / "remote"), "cache_dir": str(tmp_path / "cache")}

    def built(is_first, **config):
        return build_prefetcher(
            DataConfig(**folder, **config), setting.order, [setting.cache],
            ranks=[2, 3], world_size=4, is_first=is_first, position=0,
        )  # fmt: skip

    assert built(False) is None
    prefetcher = built(True, downloads_per_node=3, prefetch_bytes=1)
    with contextlib.closing(prefetcher):
        wait_for(lambda: prefetcher.activity.totals()["fetches"] >= 2)
    with pytest.raises(UserError, match="2 lanes with windows"):
        built(False, cache_limit_bytes=int(setting.manifest.shards.num_bytes.max()))


# --- through a store ---


@pytest.fixture
def remote(s3_server, s3_uri, monkeypatch):
    """Write a dataset to S3 and talk to it through a proxy: remote(sizes, choose)."""
    with contextlib.ExitStack() as proxies:

        def make(sizes, choose=lambda method, target: ""):
            images = {n: encoded(picture(n % 7, 90, 80), quality=95) for n in range(sum(sizes))}
            write_dataset(open_storage(s3_uri), sizes, images)
            proxy = proxies.enter_context(fault_proxy(s3_server.endpoint, choose))
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
            storage = open_storage(s3_uri)
            return storage, load_manifest(storage), proxy

        yield make


def run_ranks(tmp_path, storage, manifest, order, nodes, ranks, ahead):
    """Let processes read their slots of an epoch, each node through a cache of its own."""
    positions = np.arange(order.usable)

    def rank_of(node, number, results):
        cache = ShardCache(storage, manifest, tmp_path / f"node-{node}", BIG)
        lanes = node_lanes(order, range(node * ranks, (node + 1) * ranks), nodes * ranks)
        slots = order.rank_slots(node * ranks + number, nodes * ranks)
        mine = positions[np.isin(positions % order.global_batch, slots)]
        with contextlib.ExitStack() as stack:
            if number == 0:
                walks = build_walks(order, [cache], lanes, 0)
                stack.enter_context(contextlib.closing(Prefetcher(walks, 0, ahead, 3)))
            results.put(read_all(cache, order, lanes, mine) == len(mine))

    results = FORK.Queue()
    processes = [
        FORK.Process(target=rank_of, args=(node, number, results))
        for node in range(nodes)
        for number in range(ranks)
    ]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [True] * len(processes)
    for process in processes:
        process.join(30)
        assert process.exitcode == 0


@pytest.mark.s3
def test_prefetch_ranks_of_a_node_fetch_every_object_once(tmp_path, remote):
    storage, manifest, proxy = remote([20] * 8)
    order = Order(manifest.shards.num_samples, 1, 16, 2, 2)
    run_ranks(tmp_path, storage, manifest, order, 1, 2, ahead=BIG)

    for ending in (".tar", ".index.parquet"):
        fetched = proxy.gets(ending)
        twice = len(fetched) - len(set(fetched))
        assert len(set(fetched)) == 8
        assert twice <= 1, "a second request for a late one"


@pytest.mark.s3
def test_prefetch_nodes_fetch_only_their_part_of_shards_that_they_share(tmp_path, remote):
    storage, manifest, _ = remote([96] * 2)
    order = Order(manifest.shards.num_samples, 1, 16, 16, 2)
    run_ranks(tmp_path, storage, manifest, order, 4, 1, ahead=1)

    used = []
    for node in range(4):
        names = [path.name for path in (tmp_path / f"node-{node}" / "shards").iterdir()]
        spans = [name.partition(".")[2].split("-") for name in names if "." in name]
        used.append(sum(int(end) - int(first) for first, end in spans))
        assert not set(manifest.shards.sha256) & set(names), "no shard is there as a whole"
    assert 0.9 * manifest.num_bytes < sum(used) < manifest.num_bytes
    assert max(used) < 0.3 * manifest.num_bytes


@pytest.mark.s3
def test_prefetch_through_a_bad_network_brings_the_right_bytes(tmp_path, remote):
    faults = ["busy", "busy", "reset_answer", "short_answer", "stall:10", "expired"]
    seen = []

    def choose(method, target):
        seen.append(target)
        # From the beginning so that all come; then one in fifty is slow.
        if len(seen) % 5 == 3 and faults:
            return faults.pop()
        return "stall:5" if len(seen) % 50 == 0 else "stall:0.2"

    storage, manifest, proxy = remote([20] * 12, choose)
    order = Order(manifest.shards.num_samples, 1, 16, 2, 2)
    start = time.monotonic()
    run_ranks(tmp_path, storage, manifest, order, 1, 2, ahead=BIG)

    assert time.monotonic() - start < 20
    assert not faults
    assert proxy.counts["expired"] == 1


def test_prefetch_and_cache_survive_kills_of_their_jobs(tmp_path):
    kill_jobs(tmp_path, seed=1, count=12)
