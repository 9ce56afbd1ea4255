"""The slow tail of a store: a second request where the first is late, and not many of them."""

import threading
import time

import pytest

from tests.helpers.fault_proxy import fault_proxy
from vitscale.data import activity
from vitscale.data.activity import Activity
from vitscale.data.file_storage import StorageError
from vitscale.data.hedge import SAVED, SHARE, Hedge
from vitscale.data.storage import open_storage

pytestmark = pytest.mark.s3
LARGE = bytes(range(256)) * (20 << 12)  # three ranges


@pytest.fixture
def counters():
    """What this thread's requests are counted in."""
    slots = Activity(1)
    activity.use(slots.slot(0))
    yield slots.totals
    activity.use(None)


@pytest.fixture
def behind(s3_server, s3_uri, monkeypatch):
    """Give a storage that has "small" and "large" behind a proxy with faults."""
    open_storage(s3_uri).put("small", LARGE[:5000])
    open_storage(s3_uri).put("large", LARGE)
    proxies = []

    def make(choose):
        proxies.append(fault_proxy(s3_server.endpoint, choose))
        proxy = proxies[-1].__enter__()
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        return open_storage(s3_uri), proxy

    yield make
    for proxy in proxies:
        proxy.__exit__(None, None, None)


def nth(number, fault):
    """Spoil the n-th request alone."""
    seen = []

    def choose(method, target):
        seen.append(target)
        return fault if len(seen) == number else ""

    return choose


def test_hedge_late_answers_are_overtaken(behind, counters, tmp_path):
    storage, _ = behind(nth(1, "stall:10"))
    start = time.monotonic()
    assert storage.read_bytes("small") == LARGE[:5000]
    storage, _ = behind(nth(2, "stall:10"))
    storage.download("large", tmp_path / "copy", 0, len(LARGE))

    assert time.monotonic() - start < 6
    assert (tmp_path / "copy").read_bytes() == LARGE
    assert counters()["hedges_won"] == 2


def test_hedge_body_that_stops_in_the_middle_is_overtaken(behind, counters):
    storage, _ = behind(nth(1, "stall_answer:10"))
    start = time.monotonic()

    assert storage.read_bytes("large") == LARGE
    assert time.monotonic() - start < 5
    assert counters()["hedges_won"] == 1


def test_hedge_quick_answers_need_no_second_request(behind, counters):
    storage, proxy = behind(lambda method, target: "")
    for _ in range(20):
        storage.read_range("small", 5, 100)

    assert counters()["hedges"] <= 1, "a busy machine may be late once"
    assert len(proxy.requests) == counters()["requests"] == 20 + counters()["hedges"]


def test_hedge_reuses_connections(behind):
    storage, proxy = behind(lambda method, target: "")
    for _ in range(30):
        storage.read_range("small", 5, 100)

    assert proxy.connections <= 3


def test_hedge_store_that_is_slow_as_a_whole_gets_few_more_requests(behind, counters):
    storage, proxy = behind(lambda method, target: "stall:0.7")
    readers = [
        threading.Thread(target=storage.read_range, args=("small", n, 100)) for n in range(30)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    activity.use(None)

    assert len(proxy.requests) <= 30 + SAVED / 2 + 30 * SHARE


def test_hedge_failure_of_both_is_the_one_of_the_last():
    def ask():
        raise ConnectionError("no way")

    with pytest.raises(ConnectionError, match="no way"):
        Hedge().read(ask)


def test_hedge_is_given_up_with_the_whole():
    stop, released = threading.Event(), threading.Event()
    stop.set()
    start = time.monotonic()

    with pytest.raises(StorageError, match="given up with the whole"):
        Hedge().read(lambda: released.wait(20), stop)

    assert time.monotonic() - start < 5
    released.set()


def test_hedge_silent_requests_do_not_keep_the_process(behind, tmp_path):
    import subprocess
    import sys

    storage, _proxy = behind(nth(1, "stall:20"))
    code = "import sys; from vitscale.data.storage import open_storage;"
    code += "print(len(open_storage(sys.argv[1]).read_bytes('small')))"
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, storage.uri], capture_output=True, text=True, timeout=30
    )

    assert (done.returncode, done.stdout.strip()) == (0, "5000")
    assert time.monotonic() - start < 15
