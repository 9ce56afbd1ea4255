"""A rank that gets no data says which reader waits for which object, and ends in time (P8)."""

from functools import partial

import pytest

from tests.helpers.fault_proxy import fault_proxy
from tests.helpers.small_dataset import write_dataset
from vitscale.config.errors import VitscaleError
from vitscale.config.recipe import AugmentConfig, DataConfig
from vitscale.data.dataset import open_dataset
from vitscale.data.loader import build_train_loader
from vitscale.data.order import Order
from vitscale.data.stall import StallWatch
from vitscale.data.storage import open_storage

SIZES = [8, 8, 8]


def stalled(method: str, target: str) -> str:
    is_shard = ".tar" in target and "index" not in target
    return "stall:60" if method == "GET" and is_shard else ""


@pytest.mark.s3
def test_stalled_store_is_named_before_the_run_ends(
    s3_server, s3_uri, tmp_path, monkeypatch, capfd
):
    write_dataset(open_storage(s3_uri), SIZES)
    said = []
    with fault_proxy(s3_server.endpoint, stalled) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        data = open_dataset(s3_uri)
        config = DataConfig(train=s3_uri, num_workers=2, cache_dir=str(tmp_path / "cache"))
        loader = build_train_loader(
            config, AugmentConfig(), [data], order=Order(SIZES, 1, 8, 2, 1), img_size=8,
            in_chans=3, rank=0, world_size=1, micro_batch=8, start_step=0, seed=1,
        )  # fmt: skip
        loader.on_wait = StallWatch(3, 4.0, loader.states, loader.readers.print_stacks, said.append)

        with pytest.raises(VitscaleError, match="rank 3 has had no data for 4 s") as caught:
            next(loader)

    message = str(caught.value)
    for part in ("reader 0", f"of {s3_uri}", "shard-00000", "data.stall_limit_s = 4"):
        assert part in message
    assert "test_stall" not in message
    stacks = capfd.readouterr().err
    assert "Current thread" in stacks
    assert "examples.py" in stacks


def test_stall_watch_speaks_after_20_seconds_and_whenever_that_has_doubled():
    said = []
    watch = StallWatch(
        1, 900.0, lambda: ["reader 0 opens shard x, for 9 s"], lambda: None, said.append
    )

    for second in range(1, 100):
        watch(float(second))
    for second in range(1, 22):
        watch(float(second))

    assert [text.split(" for data")[0] for text in said] == [
        f"rank 1 has waited {second} s" for second in (20, 40, 80, 20)
    ]
    assert all("reader 0 opens shard x, for 9 s" in text for text in said)


def test_stall_watch_without_a_working_reader_says_so():
    watch = partial(StallWatch(0, 5.0, list, lambda: None, print), 5.0)

    with pytest.raises(VitscaleError, match="no reader is at work"):
        watch()
