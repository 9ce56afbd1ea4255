"""The folder of the shard cache: whole entries, locks that die with their owner, a size limit.

    cache_dir/shards/NAME     an entry
    cache_dir/fill/NAME/      one being made, or what a killed process left of it
    cache_dir/locks/XYZ       empty; who holds its lock is making an entry whose name begins so
    cache_dir/locks/room      who holds its lock is making room; holds the bytes in use, at most
    cache_dir/locks/turn-N    empty; who holds its lock is downloading: the folder has so many turns

Locks are flock(2): the kernel frees them with the process, so a killed one blocks nobody. An entry
that is open is held by a shared lock on its file and is not evicted.
"""

import contextlib
import errno
import fcntl
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from vitscale.config.errors import VitscaleError
from vitscale.data import activity

_FULL = (errno.ENOSPC, errno.EDQUOT)
# Setting the time of access fails where one may only read.
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
# A full cache is cut by this part more than is needed, so that not every new entry looks at all.
_SLACK = 64
_NO_LIMIT = 1 << 62
_TURN_LOOK_S = 0.02
# Of the hexadecimal name of an entry.
_LOCK_DIGITS = 3
_MIDDLE = "."


def whole_name(sha256: str) -> str:
    """Name the entry of a whole object."""
    return sha256


def stretch_name(sha256: str, first_byte: int, end_byte: int) -> str:
    """Name the entry of a stretch of an object: a file with a hole before it."""
    return f"{sha256}{_MIDDLE}{first_byte}-{end_byte}"


class CacheFolder:
    """Entries by name.

    Args:
        path: The folder; made at first use.
        limit_bytes: Size to which it is trimmed, least recently used first.
        num_turns: Downloads at a time of all processes that use the folder.
    """

    def __init__(self, path: Path, limit_bytes: int, num_turns: int) -> None:
        self.path, self.limit_bytes, self.num_turns = path, limit_bytes, num_turns
        self._has_counted = False

    def entry(self, name: str) -> Path:
        """Give the place of an entry."""
        return self.path / "shards" / name

    def open(self, name: str) -> int | None:
        """Open an entry; it is kept from eviction until it is closed.

        Args:
            name: Of the entry.

        Returns:
            A file descriptor, or None when there is no such entry.
        """
        try:
            descriptor = os.open(self.entry(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if self.entry(name).stat().st_ino == os.fstat(descriptor).st_ino:
                _touch(descriptor)
                return descriptor
        # Evicted or replaced between the two calls: the lock is on a file without a name.
        os.close(descriptor)
        return None

    def make(
        self,
        name: str,
        num_bytes: int,
        fill: Callable[[Path], None],
        turn: contextlib.AbstractContextManager[None],
    ) -> int:
        """Open an entry that is made first if no other process has made it meanwhile.

        Args:
            name: Of the entry.
            num_bytes: Room that it needs.
            fill: Writes it to a path, or raises.
            turn: Held while it is made; see `turn`.

        Returns:
            A file descriptor, as `open` gives it.
        """
        folder = self.path / "fill" / name
        with self._entry_lock(name):
            descriptor = self.open(name)
            if descriptor is not None:
                return descriptor
            with turn:
                try:
                    self._make_room(num_bytes)
                    try:
                        self._fill(folder, fill)
                    except OSError as error:
                        # Others fill the disk too, so room below the limit may be no room.
                        if error.errno not in _FULL or not self._evict_for(num_bytes):
                            raise
                        self._fill(folder, fill)
                    descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
                    self.entry(name).parent.mkdir(parents=True, exist_ok=True)
                    # The shared lock is there before the name is: nobody can evict in between.
                    fcntl.flock(descriptor, fcntl.LOCK_SH)
                    os.replace(folder / name, self.entry(name))
                    return descriptor
                finally:
                    shutil.rmtree(folder, ignore_errors=True)

    def _fill(self, folder: Path, fill: Callable[[Path], None]) -> None:
        # What a killed process left goes; the lock says that nobody else is writing here.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        fill(folder / folder.name)

    def remove(self, name: str, descriptor: int) -> bool:
        """Remove an entry if it is still the copy that is open as `descriptor`."""
        # Another process may have replaced it in the meantime: only the bad copy goes. It is still
        # open here, so that its inode cannot be the new copy's.
        with self._entry_lock(name), contextlib.suppress(FileNotFoundError):
            if self.entry(name).stat().st_ino == os.fstat(descriptor).st_ino:
                self.entry(name).unlink()
                return True
        return False

    def names_like(self, sha256: str) -> list[str]:
        """Give the names of the entries of an object: of the whole, and of stretches."""
        found = [path.name for path in _listed(self.path / "shards")]
        return [name for name in found if name.partition(_MIDDLE)[0] == sha256]

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn failures of the disk into an error that says what to do."""
        try:
            yield
        except OSError as error:
            reason = "the disk is full" if error.errno in _FULL else str(error)
            raise VitscaleError(
                f"the shard cache in {self.path} cannot be used: {reason}; make room, lower "
                "data.cache_limit_bytes, or set data.cache_dir to another folder"
            ) from error

    def _make_room(self, num_bytes: int) -> None:
        """Reserve room, evicting what is needed."""
        with self._locked("room") as file:
            used = _number(file)
            if not self._has_counted or used is None or used + num_bytes > self.limit_bytes:
                slack = self.limit_bytes // _SLACK
                used = self._trim(self.limit_bytes - num_bytes, slack)
                self._has_counted = True
            # Of those that reserved and failed it is too much, until somebody counts again.
            file.seek(0)
            file.truncate()
            file.write(b"%d" % (used + num_bytes))

    def _evict_for(self, num_bytes: int) -> bool:
        """Evict so many bytes, whatever the limit; False: nothing could go."""
        with self._locked("room"):
            used = self._trim(_NO_LIMIT)
            return self._trim(used - num_bytes) < used

    def _trim(self, target: int, slack: int = 0) -> int:
        """Evict entries until at most `target` bytes are in use, if they can go; count the rest.

        Once at it, entries that are smaller than the slack go until that is free too.
        """
        used = sum(self._sweep(folder) for folder in _listed(self.path / "fill") if folder.is_dir())
        entries = self._entries()
        used += sum(size for _, _, size in entries)
        if used <= target:
            return used
        for _, path, size in sorted(entries):
            if used <= target and (used <= target - slack or size > slack):
                break
            if _remove_unless_held(path):
                activity.count("evictions")
                used -= size
        return used

    def _entries(self) -> list[tuple[int, Path, int]]:
        """Give time of use, path and bytes of every entry."""
        entries = []
        for path in _listed(self.path / "shards"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                entries.append((stat.st_atime_ns, path, _size(path.name, stat.st_size)))
        return entries

    def _sweep(self, folder: Path) -> int:
        """Remove a download that nobody is working on, or say how many bytes a live one has."""
        lock = folder.name[:_LOCK_DIGITS]
        with contextlib.suppress(BlockingIOError), self._locked(lock, wait=False):
            shutil.rmtree(folder, ignore_errors=True)
        sizes = 0
        for path in _listed(folder):
            with contextlib.suppress(FileNotFoundError):
                sizes += _size(folder.name, path.stat().st_size)
        return sizes

    @contextlib.contextmanager
    def turn(self, ahead: bool) -> Iterator[None]:
        """Hold one of the turns to download.

        Args:
            ahead: Nobody waits for it: leave one turn to those for whom somebody does.
        """
        # Who is waited for takes the one that is left to him last.
        numbers = range(self.num_turns - 1, 0 if ahead and self.num_turns > 1 else -1, -1)
        with contextlib.ExitStack() as held:
            while not any(self._took_turn(number, held) for number in numbers):
                activity.note("waits for another download on this node to end")
                time.sleep(_TURN_LOOK_S * random.uniform(0.5, 1.5))
            yield

    def _took_turn(self, number: int, held: contextlib.ExitStack) -> bool:
        try:
            held.enter_context(self._locked(f"turn-{number}", wait=False))
        except BlockingIOError:
            return False
        return True

    @contextlib.contextmanager
    def _entry_lock(self, name: str) -> Iterator[None]:
        # A bounded number of lock files for any number of entries: two that share one wait for each
        # other now and then. Whoever holds one takes no other and waits for nobody but the store.
        lock = name[:_LOCK_DIGITS]
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self._locked(lock, wait=False))
            except BlockingIOError:
                activity.count("waits")
                activity.note("another process is at it")
                held.enter_context(self._locked(lock))
            yield

    @contextlib.contextmanager
    def _locked(self, name: str, wait: bool = True) -> Iterator[IO[bytes]]:
        path = self.path / "locks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.seek(0)
            yield file


def _touch(descriptor: int) -> None:
    # Only the time of access is set: it is what eviction goes by.
    try:
        os.utime(descriptor, ns=(time.time_ns(), os.fstat(descriptor).st_mtime_ns))
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise


def _number(file: IO[bytes]) -> int | None:
    """Read the bytes in use; None: a process was killed while it wrote them."""
    text = file.read(32)
    return int(text) if text.isdigit() else None


def _size(name: str, num_bytes: int) -> int:
    """Give the bytes that an entry takes on the disk: a stretch has a hole before it."""
    stretch = name.partition(_MIDDLE)[2]
    return num_bytes - int(stretch.partition("-")[0]) if stretch else num_bytes


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []


def _remove_unless_held(path: Path) -> bool:
    try:
        with open(path, "r+b") as file:  # NFS grants an exclusive lock to writers only
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            return True
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True
