"""Copies of remote shards on a node's disk, shared by all processes and jobs that read them.

Entries are named by the hash of what they are a copy of: a whole shard, its index, or a stretch of
a shard of which the node needs no more. cache_folder.py keeps them; files of a local dataset are
read where they are, without a copy.

What is checked when. A whole shard is compared with its SHA-256 when it is downloaded, once a node.
It is not hashed again by every process that opens it (eight ranks with eight readers would read it
64 times): each image is compared with its own XXH3 whenever it is read, so damage that came later
is found there, and `discard` has the copy fetched anew. Of a stretch that comparison is the only
one. Indexes, which hold those hashes, labels and keys, are compared with their SHA-256 at every
use. So every byte that the model sees was checked against a hash of pack time after it left the
disk. Parquet shards have a footer that no image's hash covers; each process hashes them once.
"""

import contextlib
import hashlib
import os
import time
from pathlib import Path

from vitscale.config.errors import UserError
from vitscale.data import activity
from vitscale.data.cache_folder import CacheFolder, stretch_name, whole_name
from vitscale.data.manifest import Manifest, damaged, index_name, sha256_hex
from vitscale.data.storage import Storage

# Whoever finds a download damaged tries once more; damage that stays is in the store.
_DOWNLOADS = 2
# An index and a row of it, compressed; only how much room it will take depends on it.
_INDEX_BYTES = 4096
_INDEX_ROW_BYTES = 128
DOWNLOADS_PER_NODE = 8


class ShardCache:
    """Opens shards, from a local dataset in place and from a remote one through the cache.

    Args:
        storage: The dataset.
        manifest: Its manifest, which knows the hash of every shard.
        cache_dir: Folder of the cache; made at first use. Several datasets and jobs may share it.
        limit_bytes: Size to which the cache is trimmed, least recently used first. Shards that are
            being read stay, so a limit below what the node reads at a time can be exceeded.
        downloads_per_node: Downloads of shards at a time of all processes that share the folder.

    Raises:
        UserError: limit_bytes does not even hold the largest shard of a remote dataset.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        cache_dir: str | Path,
        limit_bytes: int,
        downloads_per_node: int = DOWNLOADS_PER_NODE,
    ) -> None:
        self.storage, self.manifest, self.limit_bytes = storage, manifest, limit_bytes
        self.cache_dir = Path(cache_dir).expanduser()
        self._folder = CacheFolder(self.cache_dir, limit_bytes, downloads_per_node)
        # Parquet only: hash -> inode that this process has checked; another inode, another copy.
        self._verified: dict[str, int] = {}
        largest = int(manifest.shards.num_bytes.max(initial=0))
        if limit_bytes < largest and self.is_remote:
            raise UserError(
                f"cache_limit_bytes = {limit_bytes} cannot hold the largest shard of "
                f"{storage.uri}, {largest} bytes; raise it to what a node reads at a time"
            )

    @property
    def is_remote(self) -> bool:
        """Whether shards are copied; else they are read in place."""
        return self.storage.local_path(self.manifest.shards.names[0]) is None

    def path(self, shard_id: int) -> Path:
        """Make sure that a shard can be read locally, and say where.

        Args:
            shard_id: Ordinal of the shard.

        Returns:
            Its file. Nothing holds it: another process may evict it; `open` holds.
        """
        os.close(self.open(shard_id))
        name = self.manifest.shards.names[shard_id]
        whole = whole_name(self.manifest.shards.sha256[shard_id])
        return self.storage.local_path(name) or self._folder.entry(whole)

    def open(
        self, shard_id: int, first_byte: int = 0, end_byte: int | None = None, ahead: bool = False
    ) -> int:
        """Open a shard for reading; a cached one is kept from eviction until it is closed.

        Args:
            shard_id: Ordinal of the shard.
            first_byte: Where the bytes begin that are wanted.
            end_byte: Where they end; None wants all. A whole copy is taken where there is one;
                shards in Parquet are always fetched whole.
            ahead: Nobody waits for it yet.

        Returns:
            A file descriptor for os.pread, in which the wanted bytes lie where they lie in the
            shard; the caller closes it.

        Raises:
            DataError: The shard is missing, or damaged in the store itself.
            VitscaleError: The cache cannot be written.
        """
        shards = self.manifest.shards
        name, sha256 = shards.names[shard_id], shards.sha256[shard_id]
        local = self.storage.local_path(name)
        try:
            if local is not None:
                return os.open(local, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise damaged(self.storage.uri, name, "is missing") from None
        if end_byte is None or self.manifest.format == "parquet":
            first_byte, end_byte = 0, int(shards.num_bytes[shard_id])
        is_whole = first_byte == 0 and end_byte == int(shards.num_bytes[shard_id])
        names = [whole_name(sha256)]
        if not is_whole:
            names.append(stretch_name(sha256, first_byte, end_byte))
        with self._folder.explained(), activity.doing(f"opens shard {name} of {self.storage.uri}"):
            while True:
                descriptor = self._open_first(names)
                if descriptor is None:
                    descriptor = self._fill(shard_id, names[-1], first_byte, end_byte, ahead)
                else:
                    activity.count("cache_hits")
                if self._is_sound(shard_id, descriptor, end_byte):
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
            with self._folder.explained():
                for entry in self._folder.names_like(sha256):
                    if self._folder.remove(entry, descriptor):
                        activity.count("refetched")
            return True
        finally:
            os.close(descriptor)

    def index_of(self, shard_id: int) -> "CachedIndex":
        """Give the store as it is seen through the cache by whoever loads a shard's index.

        Args:
            shard_id: Ordinal of the shard.

        Returns:
            What `load_index` takes for a store.
        """
        return CachedIndex(self, shard_id)

    def read_index(self, shard_id: int) -> bytes:
        """Read the index object of a shard through the cache.

        Args:
            shard_id: Ordinal of the shard.

        Returns:
            Its bytes, compared with their hash.

        Raises:
            DataError: It is missing, or damaged in the store itself.
            VitscaleError: The cache cannot be written.
        """
        shards = self.manifest.shards
        name, sha256 = index_name(shards.names[shard_id]), shards.index_sha256[shard_id]
        if not self.is_remote:
            return self.storage.read_bytes(name)
        num_bytes = _INDEX_BYTES + _INDEX_ROW_BYTES * int(shards.num_samples[shard_id])

        def fill(target: Path) -> None:
            target.write_bytes(self._fetched_index(name, sha256))

        with self._folder.explained(), activity.doing(f"reads {name} of {self.storage.uri}"):
            while True:
                descriptor = self._folder.open(whole_name(sha256))
                if descriptor is None:
                    # One small request: it takes no turn.
                    turn = contextlib.nullcontext()
                    descriptor = self._folder.make(whole_name(sha256), num_bytes, fill, turn)
                with os.fdopen(descriptor, "rb") as file:
                    data = file.read()
                    if sha256_hex(data) == sha256:
                        return data
                    self._folder.remove(whole_name(sha256), file.fileno())
                activity.count("refetched")

    def _fetched_index(self, name: str, sha256: str) -> bytes:
        for _ in range(_DOWNLOADS):
            start = time.monotonic()
            try:
                data = self.storage.read_bytes(name)
            except FileNotFoundError:
                raise damaged(self.storage.uri, name, "is missing") from None
            _count_fetch(len(data), start)
            if sha256_hex(data) == sha256:
                return data
        found = sha256_hex(data)
        raise damaged(self.storage.uri, name, f"sha256 is {found}, was {sha256} when it was packed")

    def _open_first(self, names: list[str]) -> int | None:
        for name in names:
            descriptor = self._folder.open(name)
            if descriptor is not None:
                return descriptor
        return None

    def _is_sound(self, shard_id: int, descriptor: int, end_byte: int) -> bool:
        """Look whether a cached copy is as long as it should be; hash it if nobody else does."""
        stat = os.fstat(descriptor)
        if stat.st_size not in (end_byte, int(self.manifest.shards.num_bytes[shard_id])):
            return False
        if self.manifest.format != "parquet":
            return True
        sha256 = self.manifest.shards.sha256[shard_id]
        if self._verified.get(sha256) != stat.st_ino:
            if _sha256_of(descriptor) != sha256:
                return False
            self._verified[sha256] = stat.st_ino
        return True

    def _fill(self, shard_id: int, entry: str, first_byte: int, end_byte: int, ahead: bool) -> int:
        def fill(target: Path) -> None:
            name = self.manifest.shards.names[shard_id]
            with activity.doing(f"downloads shard {name} of {self.storage.uri}"):
                self._download(shard_id, target, first_byte, end_byte)

        turn = self._folder.turn(ahead)
        return self._folder.make(entry, end_byte - first_byte, fill, turn)

    def _download(self, shard_id: int, target: Path, first_byte: int, end_byte: int) -> None:
        shards = self.manifest.shards
        name, sha256 = shards.names[shard_id], shards.sha256[shard_id]
        is_whole = first_byte == 0 and end_byte == int(shards.num_bytes[shard_id])
        for _ in range(_DOWNLOADS):
            start = time.monotonic()
            try:
                self.storage.download(name, target, first_byte, end_byte)
            except FileNotFoundError as error:
                if self.storage.size(name) is not None:
                    raise
                raise damaged(self.storage.uri, name, "is missing") from error
            found = target.stat().st_size
            _count_fetch(found - first_byte, start)
            if found == end_byte and (not is_whole or _sha256_of_file(target) == sha256):
                return
        due = f"{end_byte} are due" + (f" with sha256 {sha256}" if is_whole else "")
        raise damaged(
            self.storage.uri,
            name,
            f"{_DOWNLOADS} downloads gave bytes that are not those of pack time: the last had "
            f"{found} bytes, {due}",
        )


class CachedIndex:
    """A store in which the index of one shard is read through the cache.

    Args:
        cache: The cache of the dataset.
        shard_id: Ordinal of the shard.
    """

    def __init__(self, cache: ShardCache, shard_id: int) -> None:
        self.uri = cache.storage.uri
        self._cache, self._shard_id = cache, shard_id

    def read_bytes(self, name: str) -> bytes:
        """Read a whole object."""
        if name == index_name(self._cache.manifest.shards.names[self._shard_id]):
            return self._cache.read_index(self._shard_id)
        return self._cache.storage.read_bytes(name)


def _count_fetch(num_bytes: int, start: float) -> None:
    activity.count("fetches")
    activity.count("bytes_fetched", num_bytes)
    activity.count("fetch_s", time.monotonic() - start)


def _sha256_of(descriptor: int) -> str:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
