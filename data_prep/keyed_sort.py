"""Sorts any number of rows by a 128-bit key in bounded memory.

Rows are kept in memory while they are few. More than that are dealt out by the upper bits of their
keys to files without a name, which vanish with the process, and sorted one file at a time: keys are
hashes, so the files are of nearly equal size.
"""

import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
import pyarrow as pa

HELD_ROWS = 1 << 14
MANY_ROWS, MAX_HELD_ROWS = 1 << 18, 1 << 20
NUM_BUCKETS = 256
# the key's upper and lower half, fields of every row
HIGH, LOW = "high", "low"


@dataclass
class KeyedSort:
    """Collects rows, then gives them back in the order of their keys.

    Rows of equal keys keep the order in which they came.

    Args:
        schema: Of the rows; has HIGH and LOW, uint64.
        held_rows: Rows to hold in memory at a time; behind MANY_ROWS it is MAX_HELD_ROWS, since
            dealing out costs time and there is no other use for the memory of a big job.
    """

    schema: pa.Schema
    held_rows: int = HELD_ROWS
    _held: list[pa.Table] = field(default_factory=list, init=False)
    _num_held: int = field(default=0, init=False)
    _num_dealt: int = field(default=0, init=False)
    _buckets: list["_Bucket"] = field(default_factory=list, init=False)

    def add(self, rows: pa.Table) -> None:
        """Take rows."""
        self._held.append(rows)
        self._num_held += rows.num_rows
        if self._num_held >= self.held_rows:
            self._deal_out()

    def __iter__(self) -> Iterator[pa.Table]:
        """Give all rows, sorted, some at a time; once."""
        if self._buckets:
            self._deal_out()
            for bucket in self._buckets:
                yield _sorted(bucket.take())
        else:
            held, self._held = self._held, []
            yield _sorted(pa.concat_tables(held) if held else self.schema.empty_table())

    def _deal_out(self) -> None:
        if not self._buckets:
            self._buckets = [_Bucket(self.schema) for _ in range(NUM_BUCKETS)]
        if not self._num_held:
            return
        rows = pa.concat_tables(self._held)
        self._held, self._num_held = [], 0
        self._num_dealt += rows.num_rows
        if self._num_dealt >= MANY_ROWS:
            self.held_rows = max(self.held_rows, MAX_HELD_ROWS)
        bucket_of = (rows[HIGH].to_numpy() >> np.uint64(56)).astype(np.int64)
        order = np.argsort(bucket_of, kind="stable")
        ends = np.cumsum(np.bincount(bucket_of, minlength=NUM_BUCKETS))
        rows = rows.take(pa.array(order))
        start = 0
        for bucket, end in zip(self._buckets, ends.tolist(), strict=True):
            bucket.add(rows.slice(start, end - start))
            start = end


class _Bucket:
    """Rows in a file without a name."""

    def __init__(self, schema: pa.Schema) -> None:
        self._file = _nameless_file(self)
        self._writer = pa.ipc.new_stream(self._file, schema)

    def add(self, rows: pa.Table) -> None:
        self._writer.write_table(rows)

    def take(self) -> pa.Table:
        """Give all rows and let the file go."""
        self._writer.close()
        self._file.seek(0)
        rows = pa.ipc.open_stream(self._file).read_all()
        self._file.close()
        return rows


def _nameless_file(owner: object) -> BinaryIO:
    """Open a temporary file that lives as long as its owner."""
    file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
    weakref.finalize(owner, file.close)
    return file


def _sorted(rows: pa.Table) -> pa.Table:
    order = np.lexsort((rows[LOW].to_numpy(), rows[HIGH].to_numpy()))
    return rows.take(pa.array(order))


class RowFile:
    """Rows in a file without a name, read back by position.

    Args:
        schema: Of the rows.
    """

    BATCH_ROWS = 1 << 14

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._file = _nameless_file(self)
        self._writer = pa.ipc.new_file(self._file, schema)
        self._reader: pa.ipc.RecordBatchFileReader | None = None
        self._ends: list[int] = [0]
        self._latest: tuple[int, pa.RecordBatch] | None = None

    def append(self, rows: pa.Table) -> None:
        """Add rows at the end."""
        for batch in rows.combine_chunks().to_batches(self.BATCH_ROWS):
            if batch.num_rows:
                self._writer.write_batch(batch)
                self._ends.append(self._ends[-1] + batch.num_rows)

    def finish(self) -> None:
        """End the writing."""
        self._writer.close()
        self._reader = pa.ipc.open_file(self._file)

    def __len__(self) -> int:
        return self._ends[-1]

    def rows(self, first: int, last: int) -> pa.Table:
        """Read the rows first to last - 1."""
        number = int(np.searchsorted(self._ends, first, side="right")) - 1
        parts = []
        while number < len(self._ends) - 1 and self._ends[number] < last:
            start = self._ends[number]
            batch = self._batch(number)
            begin = max(first - start, 0)
            parts.append(batch.slice(begin, min(last - start, batch.num_rows) - begin))
            number += 1
        return pa.Table.from_batches(parts, self._schema)

    def _batch(self, number: int) -> pa.RecordBatch:
        # Shards are asked for one after the other: the batch at their border is needed twice.
        if self._latest is None or self._latest[0] != number:
            assert self._reader is not None
            self._latest = number, self._reader.get_batch(number)
        return self._latest[1]
