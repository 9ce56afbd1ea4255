"""One rank's failure told to the others, so that all end with its exit code and one message."""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from vitscale.config.errors import (
    EXIT_FAILED,
    NumbersError,
    Stopped,
    UserError,
    VitscaleError,
)
from vitscale.observe.log import RunLog
from vitscale.training.checkpoint_folder import CheckpointError

# How long after a broken collective another rank's note may still be on its way.
WAIT_S = 5.0
# A rank that still runs this long after another one's failure waits for it on the device.
PATIENCE_S = 10.0
# Errors that all ranks raise together; the first rank says them.
_AGREED = (UserError, CheckpointError, NumbersError, Stopped)


class PeerError(VitscaleError):
    """Another rank failed, said why, and left this one without a partner."""

    def __init__(self, rank: int, exit_code: int) -> None:
        super().__init__(f"ended because rank {rank} failed; it has said why")
        self.exit_code = exit_code


def is_agreed(error: Exception) -> bool:
    """Whether all ranks raise this error at the same place."""
    return isinstance(error, _AGREED)


class FailureNote:
    """A small file in the run folder, written by the first rank that fails.

    Args:
        run_dir: The run folder.
        rank: This process.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path = run_dir / ".failure.json"
        self._rank = rank
        self._ended = threading.Event()

    def clear(self) -> None:
        """Forget an earlier start's failure."""
        self._path.unlink(missing_ok=True)

    def write(self, error: Exception, log: RunLog) -> None:
        """Leave the note, unless another rank was faster; say what this rank met alone."""
        log.record(f"failed: {type(error).__name__}: {error}")
        if self._rank and isinstance(error, VitscaleError) and not is_agreed(error):
            print(f"error: rank {self._rank}: {error}", file=sys.stderr, flush=True)
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except OSError:
            return  # it is there already, or the folder cannot be written: the exit code must do
        code = getattr(error, "exit_code", EXIT_FAILED)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"rank": self._rank, "exit_code": code}, file)

    def peer(self) -> PeerError | None:
        """Look whether another rank's failure explains a broken collective."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            note = self._read()
            if note is not None:
                return PeerError(note["rank"], note["exit_code"])
            time.sleep(0.1)
        return None

    def watch(self) -> None:
        """Begin to end this process when another rank failed and this one does not notice.

        The host learns of a lost partner from gloo, but not from a collective on the accelerator.
        """
        threading.Thread(target=self._watch, name="failure-watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            note = self._read()
            if note is not None and not self._ended.wait(PATIENCE_S):
                error = PeerError(note["rank"], note["exit_code"])
                print(f"error: rank {self._rank}: {error}", file=sys.stderr, flush=True)
                os._exit(error.exit_code)

    def _read(self) -> dict[str, Any] | None:
        """Another rank's note, if there is one."""
        try:
            note: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            return None
        return note if note["rank"] != self._rank else None
