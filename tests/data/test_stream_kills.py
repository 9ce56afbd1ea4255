"""kill -9 of ranks and jobs over one cache: no hang, no stale lock, nothing left (P6)."""

import random
import time

import pytest

from tests.helpers.small_dataset import write_dataset
from tests.helpers.stream_kills import SIZES, Job, readers_left, shared_memory
from vitscale.data.storage import open_storage

pytestmark = [pytest.mark.s3, pytest.mark.slow]


def job_of(tmp_path, s3_server, s3_uri, steps):
    manifest = write_dataset(open_storage(s3_uri), SIZES)
    folder = tmp_path / "job"
    folder.mkdir()
    # Less than the dataset: shards come, go and come again.
    return Job(s3_uri, folder, steps, manifest.num_bytes * 2 // 3, "{}", s3_server.env)


def survive(job, rng, kills):
    before = shared_memory()
    began = time.monotonic()
    for rank in job.start():
        assert rank.wait(timeout=120) == 0
        rank.stderr.close()
    whole_s = time.monotonic() - began
    job.check()
    hit = 0
    while hit < kills:
        for rank in (0, 1):
            job.rows(rank).unlink()
        hit += job.run_with_kills(rng, kills - hit, whole_s)
        job.check()
        assert readers_left(job.folder) == []
        assert shared_memory() <= before
    return hit


@pytest.mark.timeout(240)
def test_streaming_survives_kills(tmp_path, s3_server, s3_uri):
    assert survive(job_of(tmp_path, s3_server, s3_uri, 60), random.Random(0), 5) == 5


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
def test_streaming_survives_hundreds_of_kills(tmp_path, s3_server, s3_uri):
    assert survive(job_of(tmp_path, s3_server, s3_uri, 120), random.Random(1), 200) == 200
