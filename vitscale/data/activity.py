"""What processes are doing and how much they have done, where their parent can read it.

The memory is mapped before the processes are forked and has no name: nothing is left of it in
/dev/shm, however they end. Each slot has one writing process and needs no lock between processes; a
reader that meets a text half written looks again.

Code that downloads or waits says so through `count`, `doing` and `note`, which write to the slot
that the process has taken with `use`, and do nothing where it has taken none. Threads inherit the
slot through their context (contextvars), not through arguments.
"""

import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

COUNTERS = (
    # HTTP requests, those that were repeated after a failure, those sent a second time because the
    # first was late, and second ones that answered first.
    "requests",
    "retries",
    "hedges",
    "hedges_won",
    # Objects copied into the cache, their bytes, and the time of it; several at a time add up, s.
    "fetches",
    "bytes_fetched",
    "fetch_s",
    # Opened without a download; waits for the download of another process; damaged copies that were
    # fetched anew; entries removed to make room; fetches ahead of need that failed.
    "cache_hits",
    "waits",
    "refetched",
    "evictions",
    "failed_prefetches",
)
_TEXT_BYTES = 480
# Looks at a text that is being written; then the line is shown as it is.
_LOOKS = 100

_SLOT = np.dtype(
    [
        ("counters", np.float64, (len(COUNTERS),)),
        # Odd while the text is being written.
        ("turn", np.int64),
        ("since", np.float64),
        ("text", f"S{_TEXT_BYTES}"),
    ]
)


class State(NamedTuple):
    """What a slot says it is doing."""

    slot: int
    text: str
    # For how long.
    seconds: float


class Activity:
    """Counters and texts of several processes; build it before they are forked.

    Args:
        num_slots: Processes that write.
    """

    def __init__(self, num_slots: int) -> None:
        memory = mmap.mmap(-1, max(num_slots, 1) * _SLOT.itemsize)
        self._slots: NDArray[Any] = np.frombuffer(memory, _SLOT, num_slots)

    def slot(self, number: int) -> "Writer":
        """Give the writing side of a slot; one process may hold it.

        Args:
            number: From 0.
        """
        return Writer(self._slots[number : number + 1])

    def totals(self) -> dict[str, float]:
        """Add up the counters of all slots."""
        sums = self._slots["counters"].sum(axis=0)
        return dict(zip(COUNTERS, sums.tolist(), strict=True))

    def states(self) -> list[State]:
        """Say what each slot is doing; idle ones are left out."""
        now = time.monotonic()
        found = []
        for number in range(len(self._slots)):
            since, text = self._read(number)
            if text:
                found.append(State(number, text, max(now - since, 0.0)))
        return found

    def _read(self, number: int) -> tuple[float, str]:
        row = self._slots[number : number + 1]
        for _ in range(_LOOKS):
            turn = int(row["turn"][0])
            since, text = float(row["since"][0]), bytes(row["text"][0])
            if turn % 2 == 0 and turn == int(row["turn"][0]):
                break
        return since, text.decode(errors="ignore")


class _Doing:
    def __init__(self, text: str) -> None:
        self.text, self.detail, self.since = text, "", time.monotonic()

    def shown(self) -> str:
        return f"{self.text} ({self.detail})" if self.detail else self.text


class Writer:
    """The writing side of a slot, for the threads of one process.

    Args:
        row: The slot, as an array of one row.
    """

    def __init__(self, row: NDArray[Any]) -> None:
        self._counters, self._row = row["counters"][0], row
        self._lock = threading.Lock()
        self._stack: list[_Doing] = []

    def count(self, name: str, number: float = 1) -> None:
        """Add to a counter.

        Args:
            name: One of COUNTERS.
            number: How much.
        """
        with self._lock:
            self._counters[COUNTERS.index(name)] += number

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Show a text while the body runs; the innermost one is shown."""
        one = _Doing(text)
        with self._lock:
            self._stack.append(one)
            self._show()
        try:
            yield
        finally:
            with self._lock:
                self._stack.remove(one)
                self._show()

    def note(self, detail: str) -> None:
        """Add in parentheses how the current thing goes; replaces an earlier note."""
        with self._lock:
            if self._stack:
                self._stack[-1].detail = detail
                self._show()

    def _show(self) -> None:
        last = self._stack[-1] if self._stack else None
        row = self._row
        row["turn"] += 1
        row["since"] = last.since if last else 0.0
        row["text"] = last.shown().encode(errors="replace")[:_TEXT_BYTES] if last else b""
        row["turn"] += 1


_current: ContextVar[Writer | None] = ContextVar("activity", default=None)


def use(writer: Writer | None) -> None:
    """Make this thread, and those that inherit its context, write to a slot; None: to none."""
    _current.set(writer)


def count(name: str, number: float = 1) -> None:
    """Add to a counter of the current slot; see `Writer.count`."""
    writer = _current.get()
    if writer is not None:
        writer.count(name, number)


@contextmanager
def doing(text: str) -> Iterator[None]:
    """Show a text in the current slot while the body runs; see `Writer.doing`."""
    writer = _current.get()
    if writer is None:
        yield
    else:
        with writer.doing(text):
            yield


def note(detail: str) -> None:
    """Say in the current slot how the current thing goes; see `Writer.note`."""
    writer = _current.get()
    if writer is not None:
        writer.note(detail)
