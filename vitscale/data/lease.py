"""One live job to a prefix, on any store, without comparing clocks.

    _commit/lease-000001.json    who works here; the highest number holds

A job takes the next number with a write that only one of several racers can win. While it lives it
counts a beat up in its lease. Another one that comes along refuses when it sees that the holder
lives, and takes over when it is gone: at once if that was a process of this machine, otherwise when
the count has stood still for a while. The time in a lease is for the reader of a message only.
"""

import json
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from vitscale.config.errors import UserError, VitscaleError
from vitscale.data.patience import warn
from vitscale.data.storage import Storage, StorageError

PREFIX = "_commit/lease-"
_NAME = re.compile(r"^_commit/lease-(\d{6})\.json$")
BEAT_S = 10.0
# A holder whose count stands still for so long is gone.
SILENCE_S = 35.0
# A store that fails holds the end of a job up no longer than this.
LAST_BEAT_S = 30.0


class Lease:
    """The right to write below a prefix.

    Threads and processes: `acquire` starts no thread; call `start` when all processes are forked.

    Args:
        storage: The prefix.
        purpose: What the job does, for the message that another one shows.
        beat_s: Pause between two beats, s.
        silence_s: Silence after which a holder on another machine counts as gone, s.
    """

    def __init__(
        self,
        storage: Storage,
        purpose: str,
        beat_s: float = BEAT_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._storage, self._purpose = storage, purpose
        self._beat_s, self._silence_s = beat_s, silence_s
        self._number = 0
        self._beats = 0
        self._since = ""
        self._lost = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Become the holder.

        Raises:
            UserError: Another job holds it and lives.
        """
        self._since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        while True:
            number, holder = self._newest()
            if holder is not None and not self._outwait(number, holder):
                continue
            self._number = number + 1
            if self._storage.create_once(self._name(self._number), self._content()):
                return
            time.sleep(0.1)  # a folder on NFS may show old names for a while

    def start(self) -> None:
        """Beat from a thread until `release`."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Make sure that the lease still is ours.

        Raises:
            VitscaleError: Another job has taken over.
        """
        if self._lost:
            raise VitscaleError(self._lost)

    def release(self) -> None:
        """Give it up: remove it and those of the dead before it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(LAST_BEAT_S)
            if self._thread.is_alive():
                warn(f"a lease stays behind: {self._storage.uri} does not answer")
                return
            self._thread = None
        if self._lost:
            return
        try:
            for number in self._numbers():
                if number <= self._number:
                    self._storage.delete(self._name(number))
        except StorageError as error:
            warn(f"a lease stays behind: {error}")

    def __enter__(self) -> "Lease":
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def _name(self, number: int) -> str:
        return f"{PREFIX}{number:06d}.json"

    def _content(self) -> bytes:
        value = {
            "host": socket.gethostname(),
            "boot": _boot_id(),
            "pid": os.getpid(),
            "started": _start_ticks(os.getpid()),
            "purpose": self._purpose,
            "since": self._since,
            "beats": self._beats,
        }
        return json.dumps(value, sort_keys=True).encode()

    def _numbers(self) -> list[int]:
        return sorted(int(m[1]) for m in map(_NAME.match, self._storage.list(PREFIX)) if m)

    def _newest(self) -> tuple[int, dict[str, Any] | None]:
        numbers = self._numbers()
        return (numbers[-1], self._read(numbers[-1])) if numbers else (0, None)

    def _read(self, number: int) -> dict[str, Any] | None:
        try:
            value = json.loads(self._storage.read_bytes(self._name(number)))
        except (FileNotFoundError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def _outwait(self, number: int, holder: dict[str, Any]) -> bool:
        """Give True when the holder is gone, False when it has ended or another one came.

        Raises:
            UserError: It lives.
        """
        who = (
            f"process {holder.get('pid')} on {holder.get('host')} ({holder.get('purpose')}, since "
            f"{holder.get('since')})"
        )
        busy = (
            f"{self._storage.uri}: another job works there: {who}; wait for it or stop it, or use "
            "another --out"
        )
        lives = _lives(holder)
        if lives:
            raise UserError(busy)
        if lives is False:
            return True
        print(
            f"{self._storage.uri} was in the hands of {who}; seeing whether it lives, "
            f"{self._silence_s:.0f} s at most",
            file=sys.stderr,
            flush=True,
        )
        end = time.monotonic() + self._silence_s
        while time.monotonic() < end:
            time.sleep(min(1.0, self._silence_s / 5))
            latest, seen = self._newest()
            if latest != number or seen is None:
                return False
            if seen.get("beats") != holder.get("beats"):
                raise UserError(busy)
        return True

    def _run(self) -> None:
        while not self._stop.wait(self._beat_s):
            try:
                # Gone counts as well: who took over may have finished, and removed it.
                if self._numbers()[-1:] != [self._number]:
                    self._lost = (
                        f"{self._storage.uri}: another job has taken over, because this one was "
                        "silent for long; see what it did, and start this one again if need be"
                    )
                    return
                self._beats += 1
                self._storage.put(self._name(self._number), self._content())
            except StorageError as error:
                # Work may still succeed; an outage that lasts ends it there.
                warn(str(error))


def _boot_id() -> str:
    # Two containers on one machine share it but not their processes: the namespace tells them
    # apart.
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _start_ticks(pid: int) -> int | None:
    """Give when a process started, in ticks since the boot; None when there is none to see."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _lives(holder: dict[str, Any]) -> bool | None:
    """Say whether the process of a lease lives; None: it cannot be seen from here."""
    pid, started = holder.get("pid"), holder.get("started")
    if holder.get("boot") != _boot_id() or not isinstance(pid, int) or started is None:
        return None
    ticks = _start_ticks(pid)
    if ticks is None and _is_hidden(pid):
        return None
    return ticks == started


def _is_hidden(pid: int) -> bool:
    """Tell whether there is such a process of somebody else, which /proc may not show."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return False
