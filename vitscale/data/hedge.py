"""A second request where the first one is late: what helps against the slow tail of a store.

A few answers in a hundred come seconds later than the others, and a connection can go silent. The
same bytes are then asked for once more on another connection; the first whole answer is taken, and
the other request is let go. What is late is measured by the answers before. Second requests are a
bounded share of all, so a store that is slow as a whole does not get twice the load (Dean and
Barroso, The Tail at Scale, CACM 56(2), 2013).
"""

import contextlib
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from statistics import median
from typing import Any

from vitscale.data import activity
from vitscale.data.file_storage import StorageError

# A silence of this long, or of this many times the usual one, is late; so is a whole answer that
# takes this many times the usual.
LATE_S = 0.5
LATE_TIMES = 3.0
# Second requests for each first one, and how many can be saved up.
SHARE = 0.1
SAVED = 4.0
# Answers that are remembered, and how many tell what is usual.
_REMEMBERED = 64
_ENOUGH = 8
_CHUNK_BYTES = 256 << 10


class Hedge:
    """Reads bodies of answers that are usually about as large as each other.

    May be shared by threads and copied to processes: it holds no lock, and a count that two threads
    spoil for each other only moves the moment of a second request.
    """

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=_REMEMBERED)
        self._times: deque[float] = deque(maxlen=_REMEMBERED)
        self._saved = SAVED / 2

    def read(self, ask: Callable[[], Any], stop: threading.Event | None = None) -> bytes:
        """Read one answer.

        Args:
            ask: Sends the request and gives the body, an open file; runs in another thread, and
                perhaps twice at a time.
            stop: Set when the result is no longer wanted.

        Returns:
            The whole body.

        Raises:
            Exception: What the last request raised that was under way.
            StorageError: Nobody wants it any more.
        """
        ended: SimpleQueue[_Request] = SimpleQueue()
        requests = [_Request(ask, ended)]
        self._saved = min(self._saved + SHARE, SAVED)
        failed = 0
        try:
            while True:
                try:
                    one = ended.get(timeout=self._look_in_s(requests[-1]))
                except Empty:
                    if stop is not None and stop.is_set():
                        raise StorageError("given up with the whole") from None
                    if len(requests) == 1 and self._is_late(requests[0]) and self._saved >= 1:
                        self._saved -= 1
                        activity.count("hedges")
                        activity.count("requests")
                        requests.append(_Request(ask, ended))
                    continue
                if one.error is None:
                    if one is not requests[0]:
                        activity.count("hedges_won")
                    self._waits.append(one.longest_silence_s)
                    self._times.append(one.seconds)
                    return b"".join(one.parts)
                failed += 1
                if failed == len(requests):
                    raise one.error
        finally:
            for one in requests:
                one.is_wanted = False

    def _limits(self) -> tuple[float, float]:
        if len(self._times) < _ENOUGH:
            return LATE_S, float("inf")
        usual = LATE_TIMES * median(list(self._waits)), LATE_TIMES * median(list(self._times))
        return max(usual[0], LATE_S), max(usual[1], LATE_S)

    def _is_late(self, request: "_Request") -> bool:
        silence, whole = self._limits()
        now = time.monotonic()
        return now - request.last > silence or now - request.start > whole

    def _look_in_s(self, request: "_Request") -> float:
        silence, whole = self._limits()
        due = min(request.last + silence, request.start + whole)
        return min(max(due - time.monotonic(), 0.02), LATE_S)


class _Request:
    """One request in a thread of its own, which ends by itself when nobody waits for it."""

    def __init__(self, ask: Callable[[], Any], ended: "SimpleQueue[_Request]") -> None:
        self._ask, self._ended = ask, ended
        self.parts: list[bytes] = []
        self.error: Exception | None = None
        self.is_wanted = True
        self.start = self.last = time.monotonic()
        self.longest_silence_s = self.seconds = 0.0
        # A daemon, so that a silent store does not keep the process from ending.
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._run,), daemon=True).start()

    def _run(self) -> None:
        try:
            # A connection in the middle of an answer is closed with it, one at its end is kept.
            with contextlib.closing(self._ask()) as body:
                self._heard()
                while self.is_wanted and (part := body.read(_CHUNK_BYTES)):
                    self.parts.append(part)
                    self._heard()
        except Exception as error:
            self.error = error
        self.seconds = time.monotonic() - self.start
        self._ended.put(self)

    def _heard(self) -> None:
        now = time.monotonic()
        self.longest_silence_s = max(self.longest_silence_s, now - self.last)
        self.last = now
