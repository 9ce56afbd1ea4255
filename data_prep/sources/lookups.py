"""Many small questions to a file system, store or server, asked by threads where that pays."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from data_prep.sources.build import Entry

NUM_THREADS = 32
# Threads do not pay where an answer takes less than this, as on a local disk.
QUICK_S = 100e-6

Task = TypeVar("Task")


def look_up(
    tasks: Iterable[Task], work: Callable[[Task], list[Entry]], is_remote: bool = False
) -> Iterator[Entry]:
    """Give what work makes of each task, in the order of the tasks; few are done ahead.

    Args:
        tasks: Parts of a listing.
        work: Lists one part.
        is_remote: Take threads at once; else when a part has taken long.
    """
    queue: deque[Future[list[Entry]]] = deque()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        try:
            for task in tasks:
                if not is_remote:
                    start = time.perf_counter()
                    entries = work(task)
                    is_remote = time.perf_counter() - start > QUICK_S * max(1, len(entries))
                    yield from entries
                    continue
                queue.append(pool.submit(work, task))
                if len(queue) > 2 * NUM_THREADS:
                    yield from queue.popleft().result()
            while queue:
                yield from queue.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
