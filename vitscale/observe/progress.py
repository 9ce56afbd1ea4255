"""Progress of long work: a bar on a terminal, plain lines in a log file."""

import sys
import time
from typing import Any, TextIO

from vitscale.observe.log import clock

LINE_EVERY_S = 2.0


class Progress:
    """Counts finished units and shows rate and time left.

    Args:
        total: Units in all; None when nobody knows yet.
        unit: What is counted, in the plural.
        label: First word of the line.
        stream: Where to write.
        show: False makes it silent.
    """

    def __init__(
        self,
        total: int | None,
        unit: str,
        label: str,
        *,
        stream: TextIO | None = None,
        show: bool = True,
    ) -> None:
        self._total, self._unit, self._label = total, unit, label
        self._stream = stream or sys.stderr
        self._show = show
        self._done = 0
        self._start = self._last = time.monotonic()
        self._bar: Any = None
        if show and self._stream.isatty():
            from tqdm import tqdm

            # No thread of its own: processes are forked while bars are open.
            tqdm.monitor_interval = 0
            self._bar = tqdm(total=total, unit=f" {unit}", desc=label, file=self._stream)

    def update(self, count: int = 1, **info: object) -> None:
        """Count finished units; further fields are shown beside them."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
            if info:
                self._bar.set_postfix(info, refresh=False)
            return
        now = time.monotonic()
        if self._show and (now - self._last >= LINE_EVERY_S or self._done == self._total):
            self._last = now
            self._stream.write(self._line(now, info) + "\n")
            self._stream.flush()

    def _line(self, now: float, info: dict[str, object]) -> str:
        rate = self._done / max(now - self._start, 1e-9)
        fields = "".join(f" {key}={value}" for key, value in info.items())
        if self._total is None:
            return f"{self._label} {self._done} {self._unit} rate={rate:.3g}/s{fields}"
        left = (self._total - self._done) / rate if rate else 0.0
        return (
            f"{self._label} {self._done}/{self._total} {self._unit} "
            f"rate={rate:.3g}/s eta={clock(left)}{fields}"
        )

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()
