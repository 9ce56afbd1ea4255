"""Reads single samples out of shards and checks every byte against the hash of pack time."""

import os
import resource
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import xxhash
from numpy.typing import NDArray

from vitscale.config.errors import DataError
from vitscale.data.audit import hash_key
from vitscale.data.cache import ShardCache
from vitscale.data.manifest import Manifest, damaged, load_index
from vitscale.data.parquet_shard import ParquetShard, RowGroups, open_descriptor
from vitscale.data.storage import Storage
from vitscale.data.upcoming import Upcoming, stretch_bytes


@dataclass(frozen=True)
class Record:
    """A stored sample, checked."""

    # The image file as it was packed.
    image: bytes
    label: int
    # xxh64 of the key, 0 .. 2^64 - 1.
    key_hash: int


@dataclass(frozen=True)
class _Rows:
    """What is needed of a shard's index."""

    offsets: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    labels: NDArray[np.int64]
    xxh3: NDArray[np.uint64]
    # UTF-8 in a fixed width: a list of str would take five times the memory of all the rest.
    keys: NDArray[np.bytes_]


@dataclass(frozen=True)
class _OpenShard:
    descriptor: int
    # Samples that lie in what is open of it.
    samples: range
    # Reads it by rows, where it is a Parquet file.
    parquet: ParquetShard | None


class ShardReader:
    """Reads samples by shard and index; keeps the latest shards open.

    Args:
        storage: The dataset.
        manifest: Its manifest.
        cache: Where the shards are opened.
        max_open: Shards to keep open, if the process may have as many files.
        upcoming: What the lanes of this node read; None: any sample may be asked for.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        cache: ShardCache,
        max_open: int,
        upcoming: Upcoming | None = None,
    ) -> None:
        self.storage, self.manifest, self.cache = storage, manifest, cache
        self.max_open, self._upcoming = max_open, upcoming
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._rows: OrderedDict[int, _Rows] = OrderedDict()
        self._groups = RowGroups()

    def read(self, shard_id: int, index: int, epoch: int = 0) -> Record:
        """Read one sample; a damaged copy is fetched or read once more.

        Args:
            shard_id: Ordinal of the shard.
            index: Ordinal of the sample in it.
            epoch: In which it is read: of a remote shard only the stretch is fetched that the node
                wants in it.

        Returns:
            The sample.

        Raises:
            DataError: The bytes are not those of pack time; names shard, key and offset.
        """
        rows = self._index(shard_id)
        shard = self._shard(shard_id, index, epoch)
        image, problem = _checked(shard, rows, index)
        if problem:
            del self._open[shard_id]
            self._groups.drop(self.manifest.shards.names[shard_id])
            self.cache.discard(shard_id, shard.descriptor)
            image, problem = _checked(self._shard(shard_id, index, epoch), rows, index)
        if problem:
            raise self.damaged(shard_id, index, problem)
        return Record(image, int(rows.labels[index]), hash_key(rows.keys[index].decode()))

    def key_hash(self, shard_id: int, index: int) -> int:
        """Give the hash of a sample's key without reading the sample.

        Args:
            shard_id: Ordinal of its shard.
            index: Its ordinal in it.

        Returns:
            xxh64 of the key, 0 .. 2^64 - 1.

        Raises:
            DataError: The shard's index is missing or damaged.
        """
        return hash_key(self._index(shard_id).keys[index].decode())

    def name_of(self, shard_id: int, index: int) -> tuple[str, str]:
        """Give the name of a sample's shard, and its key."""
        return self.manifest.shards.names[shard_id], self._index(shard_id).keys[index].decode()

    def damaged(self, shard_id: int, index: int, reason: str) -> DataError:
        """Build the error for one bad sample.

        Args:
            shard_id: Ordinal of its shard.
            index: Its ordinal in it.
            reason: What is wrong.

        Returns:
            An error that says where to look.
        """
        rows, name = self._index(shard_id), self.manifest.shards.names[shard_id]
        key, offset = rows.keys[index].decode(), int(rows.offsets[index])
        return damaged(self.storage.uri, name, reason, key, offset)

    def close(self) -> None:
        """Close all shards."""
        for shard in self._open.values():
            os.close(shard.descriptor)
        self._open.clear()

    def _index(self, shard_id: int) -> _Rows:
        if shard_id in self._rows:
            self._rows.move_to_end(shard_id)
            return self._rows[shard_id]
        while len(self._rows) >= max(self.max_open, 1):
            self._rows.popitem(last=False)
        index = load_index(self.cache.index_of(shard_id), self.manifest, shard_id)
        self._rows[shard_id] = _Rows(
            offsets=index.offsets,
            num_bytes=index.num_bytes,
            labels=index.labels,
            xxh3=index.xxh3,
            keys=np.array([key.encode() for key in index.keys]),
        )
        return self._rows[shard_id]

    def _shard(self, shard_id: int, index: int, epoch: int) -> _OpenShard:
        if shard_id in self._open and index in self._open[shard_id].samples:
            self._open.move_to_end(shard_id)
            return self._open[shard_id]
        if shard_id in self._open:
            os.close(self._open.pop(shard_id).descriptor)
        # Half of the files that the process may have open are left to everybody else.
        most = min(self.max_open, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        while len(self._open) >= max(most, 1):
            os.close(self._open.popitem(last=False)[1].descriptor)
        rows = self._index(shard_id)
        samples = range(len(rows.offsets))
        if self._upcoming is not None and self.cache.is_remote:
            wanted = self._upcoming.samples(epoch, shard_id)
            samples = wanted if index in wanted else samples
        stretch = stretch_bytes(rows.offsets, rows.num_bytes, samples)
        descriptor = self.cache.open(shard_id, *stretch)
        parquet = self._parquet(shard_id, descriptor)
        self._open[shard_id] = _OpenShard(descriptor, samples, parquet)
        return self._open[shard_id]

    def _parquet(self, shard_id: int, descriptor: int) -> ParquetShard | None:
        if self.manifest.format != "parquet":
            return None
        name = self.manifest.shards.names[shard_id]
        try:
            return open_descriptor(descriptor, name, self.manifest.image["column"], self._groups)
        except DataError as error:
            os.close(descriptor)
            raise damaged(self.storage.uri, name, str(error)) from error


class SetsReader:
    """Reads samples of several datasets, whose shards are counted through.

    Args:
        readers: One a dataset.
    """

    def __init__(self, readers: Sequence[ShardReader]) -> None:
        self.readers = list(readers)
        counts = [len(reader.manifest.shards) for reader in readers]
        self._firsts = [0, *accumulate(counts)]
        sizes = np.concatenate([reader.manifest.shards.num_samples for reader in readers])
        # Ordinal of each shard's first sample in all datasets, and the total.
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def _own(self, shard_id: int) -> tuple[ShardReader, int]:
        k = bisect_right(self._firsts, shard_id) - 1
        return self.readers[k], shard_id - self._firsts[k]

    def read(self, shard_id: int, index: int, epoch: int) -> Record:
        """Read one sample; see `ShardReader.read`."""
        reader, own = self._own(shard_id)
        return reader.read(own, index, epoch)

    def key_hash(self, shard_id: int, index: int) -> int:
        """Give the hash of a sample's key; see `ShardReader.key_hash`."""
        reader, own = self._own(shard_id)
        return reader.key_hash(own, index)

    def name_of(self, shard_id: int, index: int) -> tuple[str, str]:
        """Give the name of a sample's shard, and its key."""
        reader, own = self._own(shard_id)
        return reader.name_of(own, index)

    def damaged(self, shard_id: int, index: int, reason: str) -> DataError:
        """Build the error for one bad sample; see `ShardReader.damaged`."""
        reader, own = self._own(shard_id)
        return reader.damaged(own, index, reason)

    def close(self) -> None:
        """Close all shards."""
        for reader in self.readers:
            reader.close()


def _checked(shard: _OpenShard, rows: _Rows, index: int) -> tuple[bytes, str]:
    num_bytes, offset = int(rows.num_bytes[index]), int(rows.offsets[index])
    try:
        image = (
            _pread(shard.descriptor, num_bytes, offset)
            if shard.parquet is None
            else shard.parquet.image(offset) or b""
        )
    except DataError as error:
        return b"", str(error)
    if len(image) < num_bytes:
        return image, f"the file ends after {len(image)} of the sample's {num_bytes} bytes"
    wanted, found = int(rows.xxh3[index]), xxhash.xxh3_64_intdigest(image)
    if wanted != found:
        return image, f"xxh3_64 of the image is {found:016x}, was {wanted:016x} when it was packed"
    return image, ""


def _pread(descriptor: int, num_bytes: int, offset: int) -> bytes:
    data = os.pread(descriptor, num_bytes, offset)
    while len(data) < num_bytes:
        more = os.pread(descriptor, num_bytes - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data
