"""One rank's failure told to the others, so that all end with its exit code and one message."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from vitscale.config.errors import DataError, VitscaleError
from vitscale.data.storage import StorageError

# How long after a broken collective another rank's note may still be on its way.
WAIT_S = 5.0


def met_alone(error: VitscaleError) -> bool:
    """Whether one rank meets such an error alone; all others are agreed on by all ranks."""
    return isinstance(error, DataError | StorageError)


class PeerError(VitscaleError):
    """Another rank failed, said why, and left this one without a partner."""

    def __init__(self, rank: int, exit_code: int) -> None:
        super().__init__(f"ended because rank {rank} failed; its message is above or in its log")
        self.exit_code = exit_code


class FailureNote:
    """A small file in the run folder, written by the first rank that fails.

    Args:
        run_dir: The run folder.
        rank: This process.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path = run_dir / ".failure.json"
        self._rank = rank

    def clear(self) -> None:
        """Forget an earlier start's failure."""
        self._path.unlink(missing_ok=True)

    def write(self, error: VitscaleError) -> None:
        """Leave the note, unless another rank was faster; say what this rank met alone."""
        if self._rank and met_alone(error):
            print(f"error: rank {self._rank}: {error}", file=sys.stderr, flush=True)
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except OSError:
            return  # it is there already, or the folder cannot be written: the exit code must do
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"rank": self._rank, "exit_code": error.exit_code}, file)

    def peer(self) -> PeerError | None:
        """Look whether another rank's failure explains a broken collective."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            note = self._read()
            if note is not None and note["rank"] != self._rank:
                return PeerError(note["rank"], note["exit_code"])
            time.sleep(0.1)
        return None

    def _read(self) -> dict[str, Any] | None:
        try:
            note: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            return None
        return note
