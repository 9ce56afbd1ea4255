"""Log lines of a run: `key=value`, to the terminal by the first rank and to a file by each."""

import sys
import time
from pathlib import Path
from typing import TextIO


class RunLog:
    """Writes one line an event.

    Args:
        path: File to append to; None for the terminal only.
        echo: Whether lines also go to standard output.
    """

    def __init__(self, path: Path | None, *, echo: bool) -> None:
        self._file: TextIO | None = path.open("a", encoding="utf-8") if path else None
        self._echo = echo

    def line(self, event: str, **fields: object) -> None:
        """Write an event and its fields; floats are shortened to five digits."""
        text = " ".join([event, *(f"{key}={_short(value)}" for key, value in fields.items())])
        if self._echo:
            print(text, flush=True)
        self.record(text)

    def warn(self, text: str) -> None:
        """Write a sentence that the user should see, on standard error too."""
        print(f"warning: {text}", file=sys.stderr, flush=True)
        self.record(f"warning: {text}")

    def record(self, text: str) -> None:
        """Write a line to the file alone."""
        if self._file:
            self._file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()


def _short(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def clock(seconds: float) -> str:
    """Write seconds as 1:02:03 or 02:03."""
    total = max(0, round(seconds))
    hours, rest = divmod(total, 3600)
    minutes, second = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{second:02}" if hours else f"{minutes:02}:{second:02}"
