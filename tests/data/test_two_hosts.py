"""Two hosts read one bucket: each downloads its half, and a cut cable changes nothing (P2)."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.runs import CHECKOUT, environment
from tests.helpers.small_dataset import encoded, write_dataset
from vitscale.data.audit import hash_key
from vitscale.data.order import Order
from vitscale.data.storage import open_storage

pytestmark = [pytest.mark.s3, pytest.mark.slow, pytest.mark.timeout(240)]

SIZES = [12] * 48
BATCH, LANES, STEPS = 24, 4, 24  # one epoch of 576 samples

READER = """
import sys, time
from itertools import islice
import numpy as np
from vitscale.config.recipe import AugmentConfig, DataConfig
from vitscale.data.dataset import open_dataset
from vitscale.data.loader import build_train_loader
from vitscale.data.order import Order

uri, cache, rank, pause, out = sys.argv[1:]
data = open_dataset(uri)
config = DataConfig(train=uri, num_workers=1, cache_dir=cache, shuffle_block=2, **PREFETCH)
order = Order(data.manifest.shards.num_samples, 1, BATCH, LANES, 2)
loader = build_train_loader(
    config, AugmentConfig(), [data], order=order, img_size=24, in_chans=3, rank=int(rank),
    world_size=2, micro_batch=BATCH // 2, start_step=0, seed=1,
)
keys = []
for number, batch in enumerate(islice(loader, STEPS)):
    keys.append(np.stack([batch.positions.numpy(), batch.key_hash.numpy()]))
    print(number, flush=True)
    time.sleep(float(pause))
loader.close()
np.save(out, np.concatenate(keys, axis=1))
"""


@pytest.fixture
def bucket(s3_uri):
    noise = np.random.default_rng(0)
    images = {
        i: encoded_noise(noise.integers(0, 256, (60, 60, 3), np.uint8)) for i in range(sum(SIZES))
    }
    write_dataset(open_storage(s3_uri), SIZES, images=images)
    return s3_uri


def encoded_noise(pixels):
    from PIL import Image

    return encoded(Image.fromarray(pixels), quality=95)


def start(network, s3_server, bucket, tmp_path, rank, pause):
    constants = f"BATCH, LANES, STEPS, PREFETCH = {BATCH}, {LANES}, {STEPS}, {{}}\n"
    env = environment(PYTHONPATH=str(CHECKOUT), **s3_server.env)
    env["AWS_ENDPOINT_URL_S3"] = network.endpoint
    words = [
        bucket,
        str(tmp_path / f"cache-{rank}"),
        str(rank),
        str(pause),
        str(out(tmp_path, rank)),
    ]
    return subprocess.Popen(
        network.hosts[rank].command(sys.executable, "-c", constants + READER, *words),
        env=env, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def out(tmp_path: Path, rank: int) -> Path:
    return tmp_path / f"keys-{rank}.npy"


def fed(tmp_path):
    """Key hash by position of both hosts together."""
    positions, keys = np.concatenate([np.load(out(tmp_path, r)) for r in (0, 1)], axis=1)
    return keys[np.argsort(positions)]


def due():
    order = Order(SIZES, 1, BATCH, LANES, 2)
    samples = order.samples(np.arange(STEPS * BATCH)).sample_index
    hashes = np.array([hash_key(f"{i:09d}") for i in range(sum(SIZES))], np.uint64)
    return hashes[samples].view(np.int64)


def test_each_host_downloads_half(network, s3_server, bucket, tmp_path):
    total = sum(open_storage(bucket).sizes("shard-").values())

    readers = [start(network, s3_server, bucket, tmp_path, rank, 0) for rank in (0, 1)]

    assert [reader.wait(timeout=120) for reader in readers] == [0, 0]
    for reader in readers:
        reader.stdout.close()
    assert (fed(tmp_path) == due()).all()
    shares = [host.received / total for host in network.hosts]
    # Headers, manifest and the shard in which a lane ends come on top of the half.
    assert all(0.45 < share < 0.65 for share in shares), shares


def test_cut_cable_delays_and_changes_nothing(network, s3_server, bucket, tmp_path):
    readers = [start(network, s3_server, bucket, tmp_path, rank, 0.2) for rank in (0, 1)]
    readers[0].stdout.readline()  # it has its first batch

    network.hosts[0].cut()
    time.sleep(20)
    assert readers[0].poll() is None
    network.hosts[0].mend()

    assert [reader.wait(timeout=150) for reader in readers] == [0, 0]
    for reader in readers:
        reader.stdout.close()
    assert (fed(tmp_path) == due()).all()
