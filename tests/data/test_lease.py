import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from vitscale.config.errors import UserError, VitscaleError
from vitscale.data.lease import PREFIX, Lease
from vitscale.data.storage import open_storage


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def storage(request, tmp_path):
    if request.param == "file":
        return open_storage(tmp_path / "store")
    return open_storage(request.getfixturevalue("s3_uri"))


def other_machine(storage, beats: int) -> None:
    """Leave the lease of a job on a machine that cannot be looked at."""
    value = {"host": "far", "boot": "x", "pid": 1, "started": 1, "purpose": "p", "beats": beats}
    storage.put(f"{PREFIX}000004.json", json.dumps(value).encode())


def test_lease_is_gone_after_release(storage):
    with Lease(storage, "test") as lease:
        lease.check()
        assert storage.list() == [f"{PREFIX}000001.json"]

    assert storage.list() == []


def test_lease_of_a_live_process_refuses_the_next(storage):
    with (
        Lease(storage, "first"),
        pytest.raises(UserError, match=rf"process {os.getpid()} on .* \(first, since 20\d\d-.*Z\)"),
    ):
        Lease(storage, "second").acquire()


CHILD = """
import sys, time
from vitscale.data.lease import Lease
from vitscale.data.storage import open_storage
Lease(open_storage(sys.argv[1]), "child").acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_lease_of_a_killed_process_is_taken_over_at_once(storage):
    command = [sys.executable, "-c", CHILD, storage.uri]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="child"):
            Lease(storage, "next").acquire()
        child.send_signal(signal.SIGKILL)

    start = time.monotonic()
    with Lease(storage, "next"):
        assert time.monotonic() - start < 5

    assert storage.list() == []


def test_lease_of_a_silent_job_elsewhere_is_taken_over(storage, capsys):
    other_machine(storage, beats=7)

    with Lease(storage, "next", silence_s=0.5):
        assert f"{PREFIX}000005.json" in storage.list()

    assert "seeing whether it lives" in capsys.readouterr().err
    assert storage.list() == []


def test_lease_of_a_beating_job_elsewhere_refuses(storage):
    other_machine(storage, beats=7)
    thread = threading.Timer(0.4, other_machine, (storage, 8))
    thread.start()

    with pytest.raises(UserError, match="on far"):
        Lease(storage, "next", silence_s=2).acquire()
    thread.join()


def test_lease_has_one_winner_among_racers(storage):
    won, lost = [], []
    barrier = threading.Barrier(6)

    def race() -> None:
        lease = Lease(open_storage(storage.uri), "racer")
        barrier.wait()
        try:
            lease.acquire()
            won.append(lease)
        except UserError:
            lost.append(lease)

    threads = [threading.Thread(target=race) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (len(won), len(lost)) == (1, 5)
    won[0].release()


def test_lease_notices_that_another_took_over(storage):
    lease = Lease(storage, "slow", beat_s=0.05)
    lease.acquire()
    lease.start()
    other_machine(storage, beats=0)

    _wait(lambda: lease._lost)
    with pytest.raises(VitscaleError, match="another job has taken over"):
        lease.check()
    lease.release()

    assert f"{PREFIX}000004.json" in storage.list(), "the new holder's lease stays"


def test_lease_notices_that_another_took_over_and_has_finished(storage):
    lease = Lease(storage, "slow", beat_s=0.05)
    lease.acquire()
    storage.delete(f"{PREFIX}000001.json")
    lease.start()

    _wait(lambda: lease._lost)
    lease.release()

    assert storage.list() == [], "the lost one is not written again"


def test_lease_that_is_given_up_while_watched_is_free(storage):
    other_machine(storage, beats=7)
    thread = threading.Timer(0.4, storage.delete, [f"{PREFIX}000004.json"])
    thread.start()

    with Lease(storage, "next", silence_s=2):
        assert storage.list() == [f"{PREFIX}000001.json"]
    thread.join()


def _wait(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_lease_beats(storage):
    def beats() -> int:
        return json.loads(storage.read_bytes(f"{PREFIX}000001.json"))["beats"]

    lease = Lease(storage, "lively", beat_s=0.05)
    with lease:
        assert beats() == 0
        lease.start()
        _wait(lambda: beats() >= 2)
        assert beats() >= 2
