"""Copies of remote shards on a node's disk, shared by all processes that read them.

    cache_dir/shards/<sha256>    a whole shard; its name is the hash of its bytes
    cache_dir/locks/<sha256>     empty; who holds its lock is downloading that shard, or sweeping
    cache_dir/locks/room         empty; who holds its lock is making room
    cache_dir/fill/<sha256>/     a download under way, or what a killed process left of one

Locks are flock(2): the kernel frees them with the process, so a killed one blocks nobody. A shard
that is being read is held by a shared lock on its file and is not evicted. Files of a local dataset
are read where they are, without a copy.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from vitscale.config.errors import UserError, VitscaleError
from vitscale.data.manifest import Manifest, damaged
from vitscale.data.storage import Storage

# Whoever finds a download damaged tries once more; damage that stays is in the store.
_DOWNLOADS = 2
_FULL = (errno.ENOSPC, errno.EDQUOT)


class ShardCache:
    """Opens shards, from a local dataset in place and from a remote one through the cache.

    Args:
        storage: The dataset.
        manifest: Its manifest, which knows the hash of every shard.
        cache_dir: Folder of the cache; made at first use. Several datasets and jobs may share it.
        limit_bytes: Size to which the cache is trimmed, least recently used first. Shards that are
            being read stay, so a limit below what the node reads at a time can be exceeded.

    Raises:
        UserError: limit_bytes does not even hold the largest shard of a remote dataset.
    """

    def __init__(
        self, storage: Storage, manifest: Manifest, cache_dir: str | Path, limit_bytes: int
    ) -> None:
        self.storage, self.manifest, self.limit_bytes = storage, manifest, limit_bytes
        self.cache_dir = Path(cache_dir).expanduser()
        # Hash -> inode that this process has checked; another inode is another copy.
        self._verified: dict[str, int] = {}
        largest = int(manifest.shards.num_bytes.max(initial=0))
        if limit_bytes < largest and storage.local_path(manifest.shards.names[0]) is None:
            raise UserError(
                f"cache_limit_bytes = {limit_bytes} cannot hold the largest shard of "
                f"{storage.uri}, {largest} bytes; raise it to what a node reads at a time"
            )

    def path(self, shard_id: int) -> Path:
        """Make sure that a shard can be read locally, and say where.

        Args:
            shard_id: Ordinal of the shard.

        Returns:
            Its file. Nothing holds it: another process may evict it; `open` holds.
        """
        os.close(self.open(shard_id))
        name = self.manifest.shards.names[shard_id]
        return self.storage.local_path(name) or self._entry(self.manifest.shards.sha256[shard_id])

    def open(self, shard_id: int) -> int:
        """Open a shard for reading; a cached one is kept from eviction until it is closed.

        Args:
            shard_id: Ordinal of the shard.

        Returns:
            A file descriptor for os.pread; the caller closes it.

        Raises:
            DataError: The shard is missing, or damaged in the store itself.
            VitscaleError: The cache cannot be written.
        """
        name, sha256 = self.manifest.shards.names[shard_id], self.manifest.shards.sha256[shard_id]
        local = self.storage.local_path(name)
        try:
            if local is not None:
                return os.open(local, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise damaged(self.storage.uri, name, "is missing") from None
        with self._explained():
            while True:
                descriptor = self._open_entry(sha256)
                if descriptor is None:
                    descriptor = self._fill(shard_id)
                if self._is_whole(descriptor, sha256):
                    # Only the time of access is set: it is what eviction goes by.
                    os.utime(descriptor, ns=(time.time_ns(), os.fstat(descriptor).st_mtime_ns))
                    return descriptor
                self.discard(shard_id, descriptor)

    def discard(self, shard_id: int, descriptor: int) -> bool:
        """Close a shard that turned out damaged, and remove that copy from the cache.

        Args:
            shard_id: Ordinal of the shard.
            descriptor: What `open` gave for it.

        Returns:
            True when the next `open` downloads it anew, False for a local file, which stays.
        """
        name, sha256 = self.manifest.shards.names[shard_id], self.manifest.shards.sha256[shard_id]
        try:
            if self.storage.local_path(name) is not None:
                return False
            self._verified.pop(sha256, None)
            # Another process may have replaced it in the meantime: only the bad copy goes. It is
            # still open here, so that its inode cannot be the new copy's.
            gone = contextlib.suppress(FileNotFoundError)
            with self._explained(), self._locked(sha256), gone:
                if self._entry(sha256).stat().st_ino == os.fstat(descriptor).st_ino:
                    self._entry(sha256).unlink()
            return True
        finally:
            os.close(descriptor)

    def _entry(self, sha256: str) -> Path:
        return self.cache_dir / "shards" / sha256

    def _open_entry(self, sha256: str) -> int | None:
        try:
            descriptor = os.open(self._entry(sha256), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if self._entry(sha256).stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        # Evicted or replaced between the two calls: the lock is on a file without a name.
        os.close(descriptor)
        return None

    def _is_whole(self, descriptor: int, sha256: str) -> bool:
        inode = os.fstat(descriptor).st_ino
        if self._verified.get(sha256) != inode:
            with os.fdopen(os.dup(descriptor), "rb") as file:
                file.seek(0)
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    return False
            self._verified[sha256] = inode
        return True

    def _fill(self, shard_id: int) -> int:
        shards = self.manifest.shards
        name, sha256 = shards.names[shard_id], shards.sha256[shard_id]
        folder = self.cache_dir / "fill" / sha256
        with self._locked(sha256):
            # Another process may have downloaded it while this one waited for the lock.
            descriptor = self._open_entry(sha256)
            if descriptor is not None:
                return descriptor
            self._make_room(int(shards.num_bytes[shard_id]))
            try:
                descriptor = self._download(shard_id, folder)
                self._entry(sha256).parent.mkdir(parents=True, exist_ok=True)
                # The shared lock is there before the name is: nobody can evict it in between.
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                os.replace(folder / name.rpartition("/")[2], self._entry(sha256))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        # Downloads that ran at the same time did not see each other's size.
        self._make_room(0)
        return descriptor

    def _download(self, shard_id: int, folder: Path) -> int:
        shards = self.manifest.shards
        name, sha256 = shards.names[shard_id], shards.sha256[shard_id]
        target = folder / name.rpartition("/")[2]
        for _ in range(_DOWNLOADS):
            # What a killed process left goes; the lock says that nobody else is writing here.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            try:
                self.storage.download(name, target)
            except FileNotFoundError as error:
                if self.storage.size(name) is not None:
                    raise
                raise damaged(self.storage.uri, name, "is missing") from error
            descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
            if self._is_whole(descriptor, sha256):
                return descriptor
            num_bytes = os.fstat(descriptor).st_size
            os.close(descriptor)
        raise damaged(
            self.storage.uri,
            name,
            f"{_DOWNLOADS} downloads gave bytes that are not those of pack time: the last had "
            f"{num_bytes} bytes, {shards.num_bytes[shard_id]} are due with sha256 {sha256}",
        )

    def _make_room(self, num_bytes: int) -> None:
        with self._locked("room"):
            used = sum(
                self._sweep(folder)
                for folder in _listed(self.cache_dir / "fill")
                if folder.is_dir()
            )
            entries = []
            for path in _listed(self.cache_dir / "shards"):
                with contextlib.suppress(FileNotFoundError):
                    stat = path.stat()
                    entries.append((stat.st_atime_ns, path, stat.st_size))
            used += sum(size for _, _, size in entries)
            for _, path, size in sorted(entries):
                if used + num_bytes <= self.limit_bytes:
                    return
                if _remove_unless_held(path):
                    used -= size

    def _sweep(self, folder: Path) -> int:
        """Remove a download that nobody is working on, or say how many bytes a live one has."""
        with contextlib.suppress(BlockingIOError), self._locked(folder.name, wait=False):
            shutil.rmtree(folder, ignore_errors=True)
        sizes = 0
        for path in _listed(folder):
            with contextlib.suppress(FileNotFoundError):
                sizes += path.stat().st_size
        return sizes

    @contextlib.contextmanager
    def _locked(self, name: str, wait: bool = True) -> Iterator[None]:
        path = self.cache_dir / "locks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = "the disk is full" if error.errno in _FULL else str(error)
            raise VitscaleError(
                f"the shard cache in {self.cache_dir} cannot be used: {reason}; make room, lower "
                "data.cache_limit_bytes, or set data.cache_dir to another folder"
            ) from error


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
