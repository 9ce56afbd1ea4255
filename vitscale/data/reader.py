"""Reads single samples out of shards and checks every byte against the hash of pack time."""

import os
import resource
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from vitscale.config.errors import DataError
from vitscale.data.audit import hash_key
from vitscale.data.cache import ShardCache
from vitscale.data.manifest import Manifest, damaged, load_index
from vitscale.data.parquet_shard import ParquetShard, RowGroups, open_descriptor
from vitscale.data.storage import Storage


@dataclass(frozen=True)
class Record:
    """A stored sample, checked."""

    # The image file as it was packed.
    image: bytes
    label: int
    # xxh64 of the key, 0 .. 2^64 - 1.
    key_hash: int


@dataclass(frozen=True)
class _OpenShard:
    descriptor: int
    offsets: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    labels: NDArray[np.int64]
    xxh3: NDArray[np.uint64]
    # UTF-8 in a fixed width: a list of str would take five times the memory of all the rest.
    keys: NDArray[np.bytes_]
    # Reads it by rows, where it is a Parquet file.
    parquet: ParquetShard | None


class ShardReader:
    """Reads samples by shard and index; keeps the latest shards open.

    Args:
        storage: The dataset.
        manifest: Its manifest.
        cache: Where the shards are opened.
        max_open: Shards to keep open, if the process may have as many files.
    """

    def __init__(
        self, storage: Storage, manifest: Manifest, cache: ShardCache, max_open: int
    ) -> None:
        self.storage, self.manifest, self.cache = storage, manifest, cache
        self.max_open = max_open
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._groups = RowGroups()

    def read(self, shard_id: int, index: int) -> Record:
        """Read one sample; a damaged copy is fetched or read once more.

        Args:
            shard_id: Ordinal of the shard.
            index: Ordinal of the sample in it.

        Returns:
            The sample.

        Raises:
            DataError: The bytes are not those of pack time; names shard, key and offset.
        """
        shard = self._shard(shard_id)
        image, problem = _checked(shard, index)
        if problem:
            del self._open[shard_id]
            self._groups.drop(self.manifest.shards.names[shard_id])
            self.cache.discard(shard_id, shard.descriptor)
            shard = self._shard(shard_id)
            image, problem = _checked(shard, index)
        if problem:
            raise self.damaged(shard_id, index, problem)
        return Record(image, int(shard.labels[index]), hash_key(shard.keys[index].decode()))

    def damaged(self, shard_id: int, index: int, reason: str) -> DataError:
        """Build the error for one bad sample.

        Args:
            shard_id: Ordinal of its shard.
            index: Its ordinal in it.
            reason: What is wrong.

        Returns:
            An error that says where to look.
        """
        shard, name = self._shard(shard_id), self.manifest.shards.names[shard_id]
        key, offset = shard.keys[index].decode(), int(shard.offsets[index])
        return damaged(self.storage.uri, name, reason, key, offset)

    def close(self) -> None:
        """Close all shards."""
        for shard in self._open.values():
            os.close(shard.descriptor)
        self._open.clear()

    def _shard(self, shard_id: int) -> _OpenShard:
        if shard_id in self._open:
            self._open.move_to_end(shard_id)
            return self._open[shard_id]
        # Half of the files that the process may have open are left to everybody else.
        most = min(self.max_open, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        while len(self._open) >= max(most, 1):
            os.close(self._open.popitem(last=False)[1].descriptor)
        index = load_index(self.storage, self.manifest, shard_id)
        descriptor = self.cache.open(shard_id)
        self._open[shard_id] = _OpenShard(
            descriptor=descriptor,
            offsets=index.offsets,
            num_bytes=index.num_bytes,
            labels=index.labels,
            xxh3=index.xxh3,
            keys=np.array([key.encode() for key in index.keys]),
            parquet=self._parquet(shard_id, descriptor),
        )
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


def _checked(shard: _OpenShard, index: int) -> tuple[bytes, str]:
    num_bytes, offset = int(shard.num_bytes[index]), int(shard.offsets[index])
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
    wanted, found = int(shard.xxh3[index]), xxhash.xxh3_64_intdigest(image)
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
