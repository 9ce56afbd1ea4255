"""What every kind of shard is written through: a file that is hashed beside the writing."""

import hashlib
import os
import queue
import threading
from typing import BinaryIO, NamedTuple

# Pieces are handed to the hash when they make this much: a hand-over costs as much as a write.
_BATCH_BYTES = 1 << 20
_FLUSH_BYTES = 4 << 20
# Batches that may wait for the hash: a writer that is faster than it is held back.
_WAITING = 8


class ShardFile(NamedTuple):
    """A finished shard."""

    num_bytes: int
    sha256: str
    # where the image bytes of every sample start, in the order of adding
    offsets: list[int]


class HashingFile:
    """A file for writing that knows the sha256 and the number of the bytes written to it.

    The hash is taken by a thread: it takes as long as the writing, and both leave Python's lock.

    Args:
        file: An open, empty binary file; its own buffer is bypassed.
    """

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._descriptor = file.fileno()
        self._sha256 = hashlib.sha256()
        self._queue: queue.Queue[list[bytes] | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self.num_bytes = 0

    def write(self, data: bytes) -> int:
        """Write bytes."""
        self.write_parts([data], len(data))
        return len(data)

    def write_parts(self, parts: list[bytes], num_bytes: int) -> None:
        """Write several pieces with one call to the system, while the caches still hold them.

        Args:
            parts: The pieces.
            num_bytes: Bytes in all of them.
        """
        written = os.writev(self._descriptor, parts)
        if written < num_bytes:
            rest = memoryview(b"".join(parts))[written:]
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        self.num_bytes += num_bytes
        self._batch += parts
        self._batch_bytes += num_bytes
        if self._batch_bytes >= _BATCH_BYTES:
            self._hand_over()

    def tell(self) -> int:
        """Give the number of bytes written so far."""
        return self.num_bytes

    def flush(self) -> None:
        """Do nothing: nothing is held back from the system."""

    def _hand_over(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._hash, daemon=True)
            self._thread.start()
        self._queue.put(self._batch)
        self._batch, self._batch_bytes = [], 0

    def close(self) -> None:
        """Hash the rest and end the thread; the file itself stays open."""
        self._hand_over()
        self._queue.put(None)
        assert self._thread is not None
        self._thread.join()
        self._thread = None

    def sha256_hex(self) -> str:
        """Give the sha256 of all bytes; nothing can be written afterwards."""
        self.close()
        return self._sha256.hexdigest()

    def _hash(self) -> None:
        started = fresh = 0
        while (batch := self._queue.get()) is not None:
            for part in batch:
                self._sha256.update(part)
                fresh += len(part)
            if fresh >= _FLUSH_BYTES:
                # Begins to write to the disk, without waiting: the last sync finds little left.
                os.posix_fadvise(self._descriptor, started, fresh, os.POSIX_FADV_DONTNEED)
                started, fresh = started + fresh, 0
