"""The loader: the same bits whoever reads them, and nothing damaged gets through (P2, P4, P5)."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.small_dataset import (
    encoded,
    flip_byte,
    local_dataset,
    picture,
    remote_dataset,
    write_dataset,
)
from vitscale.config.errors import DataError, VitscaleError
from vitscale.config.recipe import AugmentConfig, DataConfig
from vitscale.data.audit import EpochAudit, hash_key
from vitscale.data.dataset import Dataset, open_dataset
from vitscale.data.loader import build_eval_loader, build_train_loader
from vitscale.data.order import Order
from vitscale.data.permute import stream
from vitscale.data.picture import eval_example, train_example
from vitscale.data.storage import open_storage

SIZES = [7, 0, 12, 3, 9]  # 31 samples
FIELDS = ("images", "labels", "key_hash", "epochs", "positions", "substitutes", "replaced")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return local_dataset(tmp_path_factory.mktemp("data") / "local", SIZES)


def train_loader(dataset, tmp_path, *, batch=12, order=None, **options):
    storage, manifest = dataset
    workers, prefetch = options.pop("num_workers", 0), options.pop("prefetch", 2)
    config = DataConfig(
        train=storage.uri,
        num_workers=workers,
        prefetch_batches=prefetch,
        cache_dir=str(tmp_path / "cache"),
    )
    arguments = {
        "order": order or Order(manifest.shards.num_samples, 1, batch, 4, 2),
        "img_size": 24,
        "in_chans": 3,
        "rank": 0,
        "world_size": 1,
        "micro_batch": batch,
        "start_step": 0,
        "seed": 1,
        **options,
    }
    return build_train_loader(config, AugmentConfig(), [Dataset(storage, manifest)], **arguments)


def eval_loader(dataset, tmp_path, **options):
    storage, manifest = dataset
    config = DataConfig(train=storage.uri, num_workers=0, cache_dir=str(tmp_path / "cache"))
    arguments = {
        "img_size": 24,
        "in_chans": 3,
        "rank": 0,
        "world_size": 1,
        "micro_batch": 4,
        **options,
    }
    return build_eval_loader(config, AugmentConfig(), storage, manifest, **arguments)


def take(loader, count):
    """The first batches joined into one, field by field; closes the loader."""
    try:
        # An image is the readers' memory, and soon the next one's.
        parts = [replace(batch, images=batch.images.clone()) for batch in islice(loader, count)]
    finally:
        loader.close()
    return {name: torch.cat([getattr(part, name) for part in parts]) for name in FIELDS}


def assert_same(one, other):
    for name in FIELDS:
        assert torch.equal(one[name], other[name]), name


def key_hashes():
    return [np.uint64(hash_key(f"{i:09d}")).astype(np.int64) for i in range(sum(SIZES))]


def test_train_loader_makes_the_examples_of_the_order(dataset, tmp_path):
    storage, manifest = dataset
    order = Order(manifest.shards.num_samples, 1, 12, 4, 2)
    samples = open_dataset(storage.uri)

    got = take(train_loader(dataset, tmp_path), 4)

    found = order.samples(np.arange(48))
    for i in range(48):
        sample_index, epoch = int(found.sample_index[i]), int(found.epoch[i])
        sample = samples[sample_index]
        rng = np.random.default_rng(stream(1, "augment", epoch, sample_index))
        expected = np.empty((3, 24, 24), np.uint8)
        train_example(sample.image, expected, AugmentConfig(), "exact", rng)
        assert (got["images"][i].numpy() == expected).all()
        assert got["labels"][i] == sample.label
        assert got["key_hash"][i] == key_hashes()[sample_index]
    assert got["epochs"].tolist() == found.epoch.tolist()
    assert got["positions"].tolist() == list(range(48))
    assert got["images"].dtype == torch.uint8
    assert len({image.numpy().tobytes() for image in got["images"]}) == 48


@pytest.mark.parametrize(
    "view",
    [
        {"num_workers": 1, "prefetch": 1},
        {"num_workers": 2, "prefetch": 3},
        {"num_workers": 3},
        {"micro_batch": 4},
        {"micro_batch": 3, "num_workers": 2},
    ],
    ids=lambda view: "-".join(f"{name}{value}" for name, value in view.items()),
)
def test_train_loader_readers_and_micro_batch_are_only_a_view(dataset, tmp_path, view):
    expected = take(train_loader(dataset, tmp_path), 6)

    micro_batch = view.get("micro_batch", 12)

    assert_same(take(train_loader(dataset, tmp_path, **view), 6 * 12 // micro_batch), expected)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_train_loader_ranks_are_only_a_view(dataset, tmp_path, world_size):
    expected = take(train_loader(dataset, tmp_path), 6)
    share = 12 // world_size

    parts = [
        take(
            train_loader(dataset, tmp_path, rank=rank, world_size=world_size, micro_batch=share), 6
        )
        for rank in range(world_size)
    ]

    joined = {name: torch.cat([part[name] for part in parts]) for name in FIELDS}
    by_position = joined["positions"].argsort()
    assert_same({name: values[by_position] for name, values in joined.items()}, expected)


@pytest.mark.parametrize("start_step", [1, 2, 3, 5])
def test_train_loader_restart_equals_the_tail(dataset, tmp_path, start_step):
    expected = take(train_loader(dataset, tmp_path), 7)

    tail = take(
        train_loader(dataset, tmp_path, start_step=start_step, num_workers=1), 7 - start_step
    )

    assert_same(tail, {name: values[12 * start_step :] for name, values in expected.items()})


def test_train_loader_feeds_every_key_once_an_epoch(dataset, tmp_path):
    _, manifest = dataset
    order = Order(manifest.shards.num_samples, 1, 12, 4, 2)
    audit = EpochAudit.expecting(manifest, order)

    got = take(train_loader(dataset, tmp_path, micro_batch=6, num_workers=2), 2 * 8)  # 96 of 93

    names = ("epochs", "key_hash", "substitutes", "replaced")
    audit.add(*(got[name].numpy() for name in names))
    assert [audit.verdict(row) for row in audit.totals([0, 1, 2])] == [None] * 3
    counts = Counter(got["key_hash"][got["epochs"] < 3].tolist())
    assert counts == {int(key_hash): 3 for key_hash in key_hashes()}


def test_train_loader_augments_an_image_differently_each_epoch(dataset, tmp_path):
    got = take(train_loader(dataset, tmp_path), 8)

    first = {}
    for image, key, epoch in zip(got["images"], got["key_hash"], got["epochs"], strict=True):
        first.setdefault(int(key), {})[int(epoch)] = image

    pairs = [images for images in first.values() if {0, 1} <= set(images)]
    assert len(pairs) == 31
    assert all(not torch.equal(images[0], images[1]) for images in pairs)


def test_train_loader_grey_model_gets_one_channel(dataset, tmp_path):
    assert take(train_loader(dataset, tmp_path, in_chans=1), 1)["images"].shape == (12, 1, 24, 24)


def test_train_loader_feeds_substitutes_for_the_quarantined(dataset, tmp_path):
    _, manifest = dataset
    order = Order(manifest.shards.num_samples, 1, 12, 4, 2, quarantine={4, 9})

    got = take(train_loader(dataset, tmp_path, order=order), 3)

    assert int(got["substitutes"][:31].sum()) == 2
    assert not {key_hashes()[4], key_hashes()[9]} & set(got["key_hash"].tolist())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_damaged_sample_ends_the_run_with_its_place(tmp_path, num_workers):
    dataset = local_dataset(tmp_path / "local", SIZES)
    sample = open_dataset(tmp_path / "local")[10]
    flip_byte(tmp_path / "local" / sample.shard, sample.offset + 100)
    loader = train_loader(dataset, tmp_path, num_workers=num_workers)

    with pytest.raises(DataError) as caught:
        take(loader, 10)

    message = str(caught.value)
    place = f"shard shard-000002.tar, key 000000010, offset {sample.offset}: xxh3_64 of the image"
    assert message.startswith(f"{tmp_path / 'local'}: {place}")
    assert "Traceback" not in message


def test_truncated_shard_ends_the_run_with_its_place(tmp_path):
    dataset = local_dataset(tmp_path / "local", SIZES)
    sample = open_dataset(tmp_path / "local")[30]
    os.truncate(tmp_path / "local" / sample.shard, sample.offset + 100)

    with pytest.raises(DataError, match=r"key 000000030, offset \d+: the file ends after 100 of"):
        take(train_loader(dataset, tmp_path), 10)


def test_undecodable_sample_ends_the_run_with_its_place(tmp_path):
    whole = encoded(picture(0))
    dataset = local_dataset(tmp_path / "local", SIZES, images={3: whole[: len(whole) // 2]})

    with pytest.raises(DataError, match=r"shard-000000\.tar, key 000000003, offset \d+: cannot"):
        take(train_loader(dataset, tmp_path), 10)


def test_remote_dataset_gives_the_same_batches(dataset, tmp_path):
    remote = remote_dataset(tmp_path / "remote", SIZES)

    expected = take(train_loader(dataset, tmp_path), 4)

    assert_same(take(train_loader(remote, tmp_path, num_workers=2), 4), expected)


def test_cached_shard_damaged_while_in_use_is_fetched_again(dataset, tmp_path):
    expected = take(train_loader(dataset, tmp_path), 6)
    remote = remote_dataset(tmp_path / "remote", SIZES)
    loader = train_loader(remote, tmp_path)
    first = next(loader)
    first = replace(first, images=first.images.clone())
    for path in (tmp_path / "cache" / "shards").iterdir():
        path.write_bytes(bytes(path.stat().st_size))

    rest = take(loader, 5)

    for name in FIELDS:
        assert torch.equal(torch.cat([getattr(first, name), rest[name]]), expected[name])


@pytest.mark.s3
def test_dataset_on_s3_gives_the_same_batches(dataset, tmp_path, s3_uri):
    storage = open_storage(s3_uri)
    manifest = write_dataset(storage, SIZES)

    expected = take(train_loader(dataset, tmp_path), 4)

    got = take(train_loader((storage, manifest), tmp_path, num_workers=2), 4)
    assert_same(got, expected)


@pytest.mark.parametrize("world_size", [1, 2, 3, 40])
def test_eval_loader_counts_each_sample_once(dataset, tmp_path, world_size):
    samples = open_dataset(dataset[0].uri)
    loaders = [
        eval_loader(dataset, tmp_path, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]

    steps = [[replace(b, images=b.images.clone()) for b in loader] for loader in loaders]

    assert {len(batches) for batches in steps} == {len(loaders[0])}
    seen = []
    for batch in (batch for batches in steps for batch in batches):
        for i, position in enumerate(batch.positions.tolist()):
            if position < 0:
                assert batch.labels[i] == -1
                assert batch.key_hash[i] == 0
                assert not batch.images[i].any()
                continue
            expected = np.empty((3, 24, 24), np.uint8)
            eval_example(samples[position].image, expected, AugmentConfig())
            assert (batch.images[i].numpy() == expected).all()
            assert batch.labels[i] == samples[position].label
            seen.append(position)
    assert sorted(seen) == list(range(31))


def test_eval_loader_can_be_repeated_and_uses_readers(dataset, tmp_path):
    loader = eval_loader(dataset, tmp_path, num_workers=2)

    one, other = ([batch.images.clone() for batch in loader] for _ in range(2))

    assert torch.equal(torch.cat(one), torch.cat(other))
    plain = [batch.images.clone() for batch in eval_loader(dataset, tmp_path)]
    assert torch.equal(torch.cat(one), torch.cat(plain))


def children():
    """Process ids of our living children."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return set(found)


def test_readers_outlive_signals_to_the_group_and_end_with_close(dataset, tmp_path):
    before = children()
    loader = train_loader(dataset, tmp_path, num_workers=2)
    expected = take(train_loader(dataset, tmp_path), 8)
    readers = children() - before
    assert len(readers) == 2

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        for reader in readers:
            os.kill(reader, number)
    got = take(loader, 8)

    assert_same(got, expected)
    assert not children() & readers
    assert list(loader) == []


def test_killed_reader_is_an_error_not_a_hang(dataset, tmp_path):
    before = children()
    loader = train_loader(dataset, tmp_path, num_workers=1)
    next(loader)
    (reader,) = children() - before

    def read_on():
        os.kill(reader, signal.SIGKILL)
        take(loader, 100)

    with pytest.raises(VitscaleError, match=rf"reader process {reader} was .* \(SIGKILL\)"):
        read_on()
    assert not children() & {reader}


SCRIPT = """
import os, sys, time
from pathlib import Path
from tests.data.test_loader import children, train_loader
from vitscale.data.manifest import load_manifest
from vitscale.data.storage import open_storage

storage = open_storage(sys.argv[1])
loader = train_loader((storage, load_manifest(storage)), Path(sys.argv[2]), num_workers=2)
next(loader)
print(*children(), flush=True)
if sys.argv[3] == "wait":
    sys.stdin.read()
"""


def start_script(dataset, tmp_path, mode):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, dataset[0].uri, tmp_path, mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def is_gone(pid):
    try:
        return re.search(r"^State:\s+Z", Path(f"/proc/{pid}/status").read_text(), re.M)
    except FileNotFoundError:
        return True


def test_readers_die_with_a_killed_rank(dataset, tmp_path):
    script = start_script(dataset, tmp_path, "wait")
    readers = [int(pid) for pid in script.stdout.readline().split()]
    assert len(readers) == 2

    script.kill()
    script.wait(30)

    # At once, by the kernel.
    deadline = time.monotonic() + 2
    while not all(is_gone(pid) for pid in readers):
        assert time.monotonic() < deadline, f"{readers} outlived their rank"
        time.sleep(0.01)
    script.communicate()


def test_rank_that_forgets_to_close_still_ends_cleanly(dataset, tmp_path):
    script = start_script(dataset, tmp_path, "exit")

    output, errors = script.communicate(timeout=60)

    assert script.returncode == 0, errors
    assert errors == ""
    assert all(is_gone(int(pid)) for pid in output.split())


def test_loader_rate_is_reported(tmp_path, record_property):
    noise = np.random.default_rng(0).normal(0, 20, (375, 500, 3))
    pixels = np.clip(np.asarray(picture(0, 500, 375)) + noise, 0, 255).astype(np.uint8)
    big = encoded(Image.fromarray(pixels), quality=80)
    dataset = local_dataset(tmp_path / "local", [64], images=dict.fromkeys(range(64), big))
    loader = train_loader(dataset, tmp_path, batch=64, img_size=224)
    next(loader)

    started = time.perf_counter()
    next(loader)
    rate = 64 / (time.perf_counter() - started)
    loader.close()

    record_property("examples_per_s", rate)
    print(f"{rate:.0f} examples/s a core, {len(big)} bytes each")
    assert rate > 1
