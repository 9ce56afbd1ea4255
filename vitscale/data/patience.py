"""Waiting between attempts at what may pass: ever longer, bounded by the clock, told once."""

import random
import sys
import threading
import time

from vitscale.data import activity
from vitscale.data.file_storage import StorageError

# How long an operation is repeated after it first failed; how long before the user is told, unless
# a tenth of its time is less.
PATIENCE_S = 180.0
QUIET_S = 5.0
LONGEST_PAUSE_S = 15.0


class Patience:
    """The waits of one operation that is tried again and again.

    Args:
        what: What could not be done, for messages.
        seconds: Time from the first failure until it is given up, s.
        stop: Set when the result is no longer wanted.
    """

    def __init__(self, what: str, seconds: float, stop: threading.Event | None = None) -> None:
        self._what, self._seconds = what, seconds
        self._stop = stop or threading.Event()
        # Work that went well for an hour before it failed has used up nothing.
        self._start: float | None = None
        self._attempts = 0
        self._told = False

    def wait(self, text: str, error: Exception) -> None:
        """Pause before the next attempt.

        Args:
            text: How the last one failed.
            error: The same as an exception.

        Raises:
            StorageError: There were enough, or nobody wants it any more.
        """
        now = time.monotonic()
        self._start = now if self._start is None else self._start
        self._attempts += 1
        spent = now - self._start
        if spent > self._seconds:
            raise StorageError(
                f"{self._what} in {self._attempts} tries over {spent:.0f} s: {text}"
            ) from error
        pause = min(0.05 * 2**self._attempts, LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
        if spent + pause > min(QUIET_S, self._seconds / 10) and not self._told:
            self._told = True
            warn(f"{self._what}, trying for {self._seconds:.0f} s: {text}")
        activity.count("retries")
        activity.note(f"try {self._attempts + 1}: {text}")
        if self._stop.wait(pause):
            raise StorageError(f"{self._what}: given up with the whole; last: {text}") from error


def warn(text: str) -> None:
    """Show a sentence on standard error."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
