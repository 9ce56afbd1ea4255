import threading
import time

import pytest

from data_prep.sources.build import Entry
from data_prep.sources.lookups import NUM_THREADS, look_up

TASKS = range(200)


def entry(task):
    return Entry(str(task), task, ())


def test_quick_answers_need_no_threads():
    used = set()

    def work(task):
        used.add(threading.current_thread())
        return [entry(task)] * 1000

    found = list(look_up(TASKS, work))

    assert found == [entry(task) for task in TASKS for _ in range(1000)]
    assert used == {threading.main_thread()}


@pytest.mark.parametrize("is_remote", [False, True])
def test_slow_answers_are_waited_for_together_and_keep_their_order(is_remote):
    def work(task):
        time.sleep(0.01 if task % 3 else 0.02)
        return [entry(task)]

    start = time.monotonic()
    found = list(look_up(TASKS, work, is_remote))

    assert found == [entry(task) for task in TASKS]
    # One after the other, they take 2.7 s.
    assert time.monotonic() - start < 1.5


def test_few_are_asked_ahead():
    asked = []

    def work(task):
        asked.append(task)
        return [entry(task)]

    results = look_up(TASKS, work, True)
    next(results)
    results.close()

    assert len(asked) <= 2 * NUM_THREADS + 1


def test_an_outage_ends_the_listing():
    def work(task):
        if task == 100:
            raise OSError("no route")
        return [entry(task)]

    with pytest.raises(OSError, match="no route"):
        list(look_up(TASKS, work, True))
