"""Packing to a store that fails, and under kill -9: the same objects, and nothing else left."""

import random
import subprocess
import time

import pytest

from tests.helpers.corpus import make_folder
from tests.helpers.fault_proxy import fault_proxy, sometimes
from tests.helpers.pack_kills import (
    make_large_images,
    object_hashes_at,
    pack_command,
    pack_with_kills,
)
from tests.helpers.runs import CHECKOUT
from tests.helpers.s3 import open_uploads
from vitscale.data.storage import open_storage

pytestmark = [pytest.mark.s3, pytest.mark.slow]


def run(command: list[str]) -> float:
    start = time.monotonic()
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return time.monotonic() - start


@pytest.mark.parametrize("seed", [0, 1])
def test_pack_through_a_bad_network_gives_same_bytes(
    tmp_path, s3_uri, s3_server, monkeypatch, seed
):
    source = make_folder(tmp_path / "in", {"a": 40, "b": 30})
    words = ["--shard-bytes", "20KB"]
    run(pack_command(source, f"{s3_uri}/whole", 0, *words))

    choose = sometimes(seed, 0.1)
    requests = [0]

    def with_stall(method: str, target: str) -> str:
        requests[0] += 1
        return "stall:10" if requests[0] == 30 else choose(method, target)

    with fault_proxy(s3_server.endpoint, with_stall) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        run(pack_command(source, f"{s3_uri}/spoilt", 0, *words))

    assert proxy.counts["stall"] == 1
    assert len(proxy.counts) > 5
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint)
    assert object_hashes_at(f"{s3_uri}/spoilt") == object_hashes_at(f"{s3_uri}/whole")


@pytest.mark.parametrize("ranks", [0, 3], ids=["processes", "mpi"])
def test_pack_to_s3_survives_kills(tmp_path, s3_uri, s3_server, ranks):
    source = make_large_images(tmp_path / "in", 24, 3_500_000)
    words = ["--shard-bytes", "28MB"]
    whole_s = run(pack_command(source, f"{s3_uri}/whole", ranks, *words))
    hit = []

    def look() -> None:
        hit.extend(open_uploads(s3_server, s3_uri.split("/", 3)[3]))

    command = pack_command(source, f"{s3_uri}/killed", ranks, *words)
    kills, rng = 0, random.Random(ranks)
    for _ in range(5):  # until a kill hits a running job: a slow start can hide from all four
        kills = pack_with_kills(command, rng, whole_s, 4, look)
        if kills:
            break
        storage = open_storage(f"{s3_uri}/killed")
        for name in storage.list():
            storage.delete(name)

    assert kills > 0
    assert object_hashes_at(f"{s3_uri}/killed") == object_hashes_at(f"{s3_uri}/whole")
    assert open_uploads(s3_server, s3_uri.split("/", 3)[3]) == []
