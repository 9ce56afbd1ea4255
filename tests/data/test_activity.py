"""What forked processes tell their parent."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

from vitscale.data import activity
from vitscale.data.activity import Activity
from vitscale.data.parts import cut, run_parts

FORK = multiprocessing.get_context("fork")


def test_activity_of_forked_processes_adds_up():
    slots = Activity(3)

    def work(number):
        activity.use(slots.slot(number))
        for _ in range(1000):
            activity.count("fetches")
        activity.count("fetch_s", 0.5)

    processes = [FORK.Process(target=work, args=(n,)) for n in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)

    assert slots.totals()["fetches"] == 3000
    assert slots.totals()["fetch_s"] == 1.5
    assert slots.totals()["retries"] == 0
    assert slots.states() == []


def test_activity_says_what_a_killed_process_was_doing():
    slots = Activity(2)
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert not [m for m in maps if "/dev/shm" in m and "(deleted)" not in m], "it has no name"
    ready = FORK.Event()

    def work():
        activity.use(slots.slot(1))
        with activity.doing("reads a batch"), activity.doing("downloads shard-000012.tar"):
            activity.note("try 3: SlowDown")
            ready.set()
            time.sleep(60)

    process = FORK.Process(target=work)
    process.start()
    assert ready.wait(20)
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.join(20)

    (state,) = slots.states()
    assert (state.slot, state.text) == (1, "downloads shard-000012.tar (try 3: SlowDown)")
    assert 0.05 < state.seconds < 20


def test_activity_goes_back_to_what_was_done_before():
    slots = Activity(1)
    activity.use(slots.slot(0))
    with activity.doing("outer"):
        with activity.doing("inner"):
            activity.note("deep")
        assert [state.text for state in slots.states()] == ["outer"]
    activity.use(None)

    assert slots.states() == []


def test_activity_without_a_slot_does_nothing():
    activity.count("fetches")
    activity.note("x")
    with activity.doing("x"):
        pass


def test_activity_threads_of_a_download_count_for_their_process():
    slots = Activity(1)
    activity.use(slots.slot(0))
    run_parts(cut(80, 10), lambda part, stop: activity.count("requests", part.num_bytes), 4)
    activity.use(None)

    assert slots.totals()["requests"] == 80


def test_activity_texts_that_are_too_long_are_cut_between_letters():
    slots = Activity(1)
    writer = slots.slot(0)
    with writer.doing("\u00e4" * 1000):
        assert set(slots.states()[0].text) == {"\u00e4"}


def test_activity_texts_are_never_mixed():
    slots, stop = Activity(1), threading.Event()
    writer = slots.slot(0)

    def write():
        while not stop.is_set():
            for letter in "ab":
                with writer.doing(letter * 400):
                    pass

    thread = threading.Thread(target=write)
    thread.start()
    seen = [state.text for _ in range(2000) for state in slots.states()]
    stop.set()
    thread.join()

    assert {len(set(text)) for text in seen} <= {1}
