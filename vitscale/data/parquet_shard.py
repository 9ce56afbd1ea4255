"""Images in a Parquet file of somebody else, read by row number.

`vitscale index` makes such files the shards of a dataset as they are. An index then holds the row
where it has the place of the bytes in other shards, and the manifest the column with the images. A
row group can only be decoded as a whole: the latest ones are kept, and whoever jumps between many
pays for it. For long training, pack the files into tars or Arrow shards.
"""

import io
import os
from collections import OrderedDict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vitscale.config.errors import DataError
from vitscale.data.storage import Storage

# Decoded row groups that a process keeps; at least one, whatever its size.
CACHE_BYTES = 256 << 20
READ_BYTES = 1 << 20


class RowGroups:
    """The row groups that a process used last.

    Args:
        limit_bytes: Bytes to keep.
    """

    def __init__(self, limit_bytes: int = CACHE_BYTES) -> None:
        self._limit = limit_bytes
        self._groups: OrderedDict[tuple[str, int], pa.ChunkedArray] = OrderedDict()
        self._num_bytes = 0

    def get(self, shard: str, group: int) -> pa.ChunkedArray | None:
        """Give a row group that is kept."""
        found = self._groups.get((shard, group))
        if found is not None:
            self._groups.move_to_end((shard, group))
        return found

    def put(self, shard: str, group: int, images: pa.ChunkedArray) -> None:
        """Keep a row group; others go."""
        while self._groups and self._num_bytes + images.nbytes > self._limit:
            self._num_bytes -= self._groups.popitem(last=False)[1].nbytes
        self._groups[shard, group] = images
        self._num_bytes += images.nbytes

    def drop(self, shard: str) -> None:
        """Let go of all row groups of a shard, which turned out damaged."""
        for key in [key for key in self._groups if key[0] == shard]:
            self._num_bytes -= self._groups.pop(key).nbytes


class ParquetShard:
    """The images of one file.

    Args:
        source: The file: a path, or a file of pyarrow or Python.
        shard: Its name.
        column: With the images: bytes, or a struct with `bytes`.
        groups: Where row groups are kept.

    Raises:
        DataError: It is no sound Parquet file, or has no such column.
    """

    def __init__(self, source: Any, shard: str, column: str, groups: RowGroups) -> None:
        self._shard, self._column, self._groups = shard, column, groups
        try:
            self._file = pq.ParquetFile(source, pre_buffer=False)
            about = self._file.metadata
            sizes = [about.row_group(at).num_rows for at in range(about.num_row_groups)]
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"is no sound Parquet file: {error}") from error
        if column not in self._file.schema_arrow.names:
            raise DataError(f"has no column {column!r}")
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    @property
    def num_rows(self) -> int:
        """Rows of the file."""
        return int(self._starts[-1])

    def image(self, row: int) -> bytes | None:
        """Give the bytes of one image; None where there are none.

        Raises:
            DataError: There is no such row, or its row group is damaged.
        """
        if not 0 <= row < self.num_rows:
            raise DataError(f"has {self.num_rows} rows, row {row} is not there")
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        images = self._groups.get(self._shard, group)
        if images is None:
            images = self._load(group)
            self._groups.put(self._shard, group, images)
        value = images[row - int(self._starts[group])].as_py()
        data: bytes | None = value.get("bytes") if isinstance(value, dict) else value
        return data

    def _load(self, group: int) -> pa.ChunkedArray:
        try:
            # No threads: loader workers are forked, and a pool of the parent's would be dead.
            table = self._file.read_row_group(group, columns=[self._column], use_threads=False)
            return table.column(0)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"row group {group} cannot be read: {error}") from error


def open_stored(storage: Storage, shard: str, column: str, groups: RowGroups) -> ParquetShard:
    """Open a file of a store, which is read in parts.

    Raises:
        FileNotFoundError: There is no such object.
        DataError: As for `ParquetShard`.
    """
    num_bytes = storage.size(shard)
    if num_bytes is None:
        raise FileNotFoundError(shard)
    file = io.BufferedReader(_StoredFile(storage, shard, num_bytes), READ_BYTES)
    return ParquetShard(file, shard, column, groups)


def open_descriptor(descriptor: int, shard: str, column: str, groups: RowGroups) -> ParquetShard:
    """Open a local file that is open already, with a position of its own.

    Raises:
        DataError: As for `ParquetShard`.
    """
    return ParquetShard(f"/proc/self/fd/{descriptor}", shard, column, groups)


class _StoredFile(io.RawIOBase):
    """An object of a store as a file."""

    def __init__(self, storage: Storage, name: str, num_bytes: int) -> None:
        self._storage, self._name, self._num_bytes = storage, name, num_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._storage.read_range(self._name, self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
