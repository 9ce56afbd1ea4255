"""Large files in parts, several at a time."""

import contextvars
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Part:
    """A range of a file, in bytes; number counts from 0."""

    number: int
    offset: int
    num_bytes: int


def cut(num_bytes: int, part_bytes: int) -> list[Part]:
    """Cut a file into parts; only the last may be smaller."""
    return [
        Part(number, offset, min(part_bytes, num_bytes - offset))
        for number, offset in enumerate(range(0, num_bytes, part_bytes))
    ]


def run_parts(
    parts: Sequence[Part], work: Callable[[Part, threading.Event], Result], num_threads: int
) -> list[Result]:
    """Do the same with every part, in threads that end here.

    Args:
        parts: The parts.
        work: Takes a part and an event that is set when another part failed.
        num_threads: How many parts are in work at a time.

    Returns:
        The results in the order of `parts`.

    Raises:
        BaseException: The failure that came first; nothing is in work any more.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(num_threads) as threads:
        # Each thread has the caller's context, so that its activity is counted there.
        futures = [
            threads.submit(contextvars.copy_context().run, work, part, stop) for part in parts
        ]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:  # an interrupt too: it must not wait for minutes of patience
            stop.set()
            for future in futures:
                future.cancel()
            raise
    return [future.result() for future in futures]
