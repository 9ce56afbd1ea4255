"""The shared cache under hundreds of random kills."""

import pytest

from tests.helpers.cache_kills import kill_jobs

pytestmark = pytest.mark.soak


@pytest.mark.timeout(1800)
def test_cache_survives_hundreds_of_kills(tmp_path):
    for seed in range(10):
        kill_jobs(tmp_path / str(seed), seed, count=40)
