"""What ends a run from outside: signals, a vanished launcher, and a second run in one folder."""

import fcntl
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from vitscale.config.errors import UserError

WATCH_EVERY_S = 0.5
# After the launcher vanished: this long for the joint save, then the process ends itself.
ORPHAN_GRACE_S = 300.0


class StopFlag:
    """Remembers that somebody asked this process to stop.

    Handlers only set a flag: the deepspeed launcher signals its ranks one after another, so a
    collective inside a handler would wait for ranks that have not been told yet.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)  # not USR1, which NCCL uses

    def __init__(self) -> None:
        self.reason: str | None = None

    def install(self) -> None:
        """Take over the stop signals of this process."""
        for number in self.SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT:  # a second Ctrl-C does not wait for anything
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.request(signal.Signals(number).name)

    def request(self, reason: str) -> None:
        """Ask for a stop at the next step boundary; the first reason stays."""
        self.reason = self.reason or reason


def _parent_of(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])


def _command_of(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return ""


class LauncherWatch:
    """Asks for a stop when the launcher that started this rank is gone.

    The single-node deepspeed launcher is two processes: the `deepspeed` command, which has no
    signal handlers, and its child, which starts the ranks and survives it. Either's death leaves
    the ranks behind as orphans that nobody waits for, so both are watched. A process that was not
    started by a launcher has no watch: a shell may end before its background job.

    Args:
        stop: Where to ask.
    """

    LAUNCHERS = (
        "deepspeed.launcher.launch",
        "deepspeed/launcher/launch.py",
        "torch.distributed.run",
        "torchrun",
    )

    def __init__(self, stop: StopFlag) -> None:
        self._stop = stop
        self._parent = os.getppid()
        command = _command_of(self._parent)
        self.watches = any(name in command for name in self.LAUNCHERS)
        # The command that started the launcher, where it is deepspeed's own runner.
        above = _parent_of(self._parent) if self.watches else None
        self._above = above if above and "deepspeed" in _command_of(above) else None
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to watch, in a daemon thread."""
        if self.watches:
            threading.Thread(target=self._watch, name="launcher-watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _gone(self) -> bool:
        if os.getppid() != self._parent:
            return True
        return self._above is not None and _parent_of(self._parent) != self._above

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_EVERY_S):
            if self._gone():
                self._stop.request("launcher vanished")
                if not self._ended.wait(ORPHAN_GRACE_S):
                    os._exit(1)  # a rank that hangs must not outlive its launcher for ever
                return


class RunLock:
    """Keeps a run folder for one live run; the kernel lets go when the holder dies.

    Args:
        run_dir: The folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / ".lock"
        self._file: IO[str] | None = None

    def acquire(self, wait_s: float = 10.0) -> None:
        """Take the lock.

        Args:
            wait_s: How long a run that was just told to stop may take to leave.

        Raises:
            UserError: A live process holds it.
        """
        file = self._path.open("a+", encoding="utf-8")
        deadline = time.monotonic() + wait_s
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                file.seek(0)
                holder = file.read().strip() or "another process"
                if time.monotonic() > deadline:
                    file.close()
                    raise UserError(
                        f"{self._path.parent} is in use by {holder}; wait for it, stop it, "
                        "or choose another --run-dir"
                    ) from error
                if not told:
                    print(f"waiting for {holder} to leave {self._path.parent}", file=sys.stderr)
                    told = True
                time.sleep(0.5)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        self._file = file

    def release(self) -> None:
        """Let go."""
        if self._file is not None:
            self._file.close()
            self._file = None
