"""From the entries of all sources to rows with numbered classes, in the keyed order of the plan.

Entries are never held together in memory: they become table rows as they come, which are sorted by
a keyed hash of their names (keyed_sort.py). What the rows say beyond their order, counts, classes
and check sums, is gathered on the way.
"""

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from data_prep.keyed_sort import HIGH, LOW, KeyedSort
from data_prep.ledger import LEDGER_FIELDS
from data_prep.sources.build import Column, Entry, Source, printable
from vitscale.config.errors import UserError
from vitscale.data.label_columns import LabelColumn
from vitscale.data.manifest import INDEX_FIELDS
from vitscale.observe.progress import Progress

CHUNK_ROWS = 1 << 12
MAX_NUMBER = 1 << 24
LABELS = "labels"
_NAMES = pa.large_binary()


def row_schema(num_columns: int) -> pa.Schema:
    """Give the schema of rows with that many label columns."""
    return pa.schema(
        [
            (HIGH, pa.uint64()),
            (LOW, pa.uint64()),
            ("source", pa.int32()),
            ("name", _NAMES),
            ("num_bytes", pa.int64()),
            ("problem", _NAMES),
            ("where", _NAMES),
            *((f"{LABELS}{number}", pa.list_(pa.int32())) for number in range(num_columns)),
        ]
    )


@dataclass
class Collected:
    """All entries of all sources."""

    columns: list[LabelColumn]
    rows: KeyedSort
    num_inputs: int
    num_bytes: int
    # [source][column]: code of a label in the rows -> class, -1 for one that is not in the map
    class_maps: list[list[npt.NDArray[np.int32]]]


def collect(
    sources: Sequence[Source],
    seed: int,
    label_map: Sequence[str] | None,
    allow_case_twins: bool,
    held_rows: int,
) -> Collected:
    """List all sources.

    Args:
        sources: At least one; all with the same label columns.
        seed: Of the order.
        label_map: Names of the classes of the first column in their order; None takes those of the
            sources, or those that occur.
        allow_case_twins: Accept classes whose names differ in case alone.
        held_rows: Rows to hold in memory.

    Raises:
        UserError: There is nothing, the columns differ, or names differ in case alone.
    """
    books: list[list[_Codes]] = []
    sort: KeyedSort | None = None
    columns: list[list[Column]] = []
    num_inputs = num_bytes = 0
    progress = Progress(None, "inputs", "list")
    for number, source in enumerate(sources):
        chunk: _Chunk | None = None
        for entry in source.entries():
            if chunk is None:
                chunk = _Chunk(number, seed, len(entry.labels))
                sort = sort or KeyedSort(row_schema(len(entry.labels)), held_rows)
            chunk.add(entry)
            num_inputs += 1
            num_bytes += entry.num_bytes
            if len(chunk.names) == CHUNK_ROWS:
                progress.update(CHUNK_ROWS)
                assert sort is not None
                sort.add(chunk.take())
        if chunk is not None and sort is not None:
            progress.update(len(chunk.names))
            sort.add(chunk.take())
        columns.append(source.columns())
        books.append(chunk.codes if chunk else [_Codes() for _ in columns[-1]])
    progress.close()
    if sort is None:
        raise UserError("the sources hold no inputs")
    merged, class_maps = _merge(columns, books, label_map)
    if not allow_case_twins:
        for column in merged:
            _refuse_case_twins(column)
    return Collected(merged, sort, num_inputs, num_bytes, class_maps)


@dataclass
class _Codes:
    """Numbers the different labels of a column as they come."""

    of: dict[str | int, int] = field(default_factory=dict)

    def code(self, value: str | int) -> int:
        return self.of.setdefault(value, len(self.of))


class _Chunk:
    """Rows of one source in the making."""

    def __init__(self, source: int, seed: int, num_columns: int) -> None:
        self._source = source
        self._prefix = f"{seed}/{source}/".encode()
        self.codes = [_Codes() for _ in range(num_columns)]
        self._schema = row_schema(num_columns)
        self._clear()

    def _clear(self) -> None:
        self._hashes: list[bytes] = []
        self.names: list[bytes] = []
        self._sizes: list[int] = []
        self._problems: list[bytes] = []
        self._where: list[bytes] = []
        self._labels: list[list[int]] = [[] for _ in self.codes]
        self._ends: list[list[int]] = [[0] for _ in self.codes]

    def add(self, entry: Entry) -> None:
        name = os.fsencode(entry.name)
        lower = xxhash.xxh3_128_digest(self._prefix + name)
        if entry.block:
            # Those of a block lie together: the upper half of the key is that of the block.
            upper = xxhash.xxh3_64_digest(self._prefix + os.fsencode(entry.block))
            lower = upper + lower[:8]
        self._hashes.append(lower)
        self.names.append(name)
        self._sizes.append(entry.num_bytes)
        self._problems.append(os.fsencode(entry.problem))
        self._where.append(os.fsencode(entry.where))
        columns = zip(entry.labels, self.codes, self._labels, self._ends, strict=True)
        for value, codes, flat, ends in columns:
            if isinstance(value, tuple):
                flat.extend(map(codes.code, dict.fromkeys(value)))
            else:
                flat.append(codes.code(value))
            ends.append(len(flat))

    def take(self) -> pa.Table:
        """Give the rows so far and start anew."""
        words = np.frombuffer(b"".join(self._hashes), ">u8").astype(np.uint64).reshape(-1, 2)
        lists = [
            pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(flat, pa.int32()))
            for ends, flat in zip(self._ends, self._labels, strict=True)
        ]
        table = pa.table(
            [
                pa.array(words[:, 0]),
                pa.array(words[:, 1]),
                pa.array(np.full(len(self.names), self._source, np.int32)),
                pa.array(self.names, _NAMES),
                pa.array(self._sizes, pa.int64()),
                pa.array(self._problems, _NAMES),
                pa.array(self._where, _NAMES),
                *lists,
            ],
            schema=self._schema,
        )
        self._clear()
        return table


def _merge(
    columns: list[list[Column]], books: list[list[_Codes]], label_map: Sequence[str] | None
) -> tuple[list[LabelColumn], list[list[npt.NDArray[np.int32]]]]:
    """Agree on the classes of every column, over all sources."""
    kinds = [[(column.name, column.multi) for column in own] for own in columns]
    if any(kind != kinds[0] for kind in kinds):
        raise UserError(
            f"the sources have different label columns: {kinds}; choose the same ones, for example "
            "with --label-column"
        )
    _refuse_names([name for name, _ in kinds[0]])
    merged = []
    maps: list[list[npt.NDArray[np.int32]]] = [[] for _ in columns]
    for at, column in enumerate(columns[0]):
        given = label_map if at == 0 else None
        pairs = zip(columns, books, strict=True)
        names = [class_names(own[at], codes[at].of) for own, codes in pairs]
        if given is not None:
            classes = list(given)
        elif all(other == names[0] for other in names):
            classes = names[0]
        else:
            # Several lists: one class a name, whichever source it comes from.
            classes = sorted({name for own in names for name in own}, key=os.fsencode)
        index = {name: number for number, name in enumerate(classes)}
        for source, own in enumerate(columns):
            order = own[at].names or given
            found = (name_of(value, order) for value in books[source][at].of)
            numbers = [-1 if name is None else index.get(name, -1) for name in found]
            maps[source].append(np.asarray(numbers, np.int32))
        merged.append(LabelColumn(column.name, column.multi, tuple(map(printable, classes))))
    return merged, maps


def _refuse_names(names: list[str]) -> None:
    taken = {"key", "image", "offset", *(field.name for field in (*INDEX_FIELDS, *LEDGER_FIELDS))}
    for name in names:
        if name in taken:
            raise UserError(f"label column {name!r} has the name of a field of ours; rename it")
    if len(set(names)) != len(names):
        raise UserError(f"label columns with the same name: {', '.join(names)}; rename one")


def class_names(column: Column, values: Collection[str | int]) -> list[str]:
    """Give the classes of one column of one source.

    Args:
        column: The column.
        values: All labels that occur in it.

    Raises:
        UserError: A number is too large to count classes.
    """
    if column.names is not None:
        return list(column.names)
    numbers = [value for value in values if isinstance(value, int)]
    if numbers and len(numbers) == len(values):
        if max(numbers) >= MAX_NUMBER:
            raise UserError(
                f"label {max(numbers)} in column {column.name!r}: numbers count classes from 0, "
                f"up to {MAX_NUMBER - 1}; for other numbers give the names with --label-map"
            )
        return [str(number) for number in range(max(numbers) + 1)]
    return sorted({str(value) for value in values}, key=os.fsencode)


def name_of(value: str | int, order: Sequence[str] | None) -> str | None:
    """Give the name behind a label: a number counts in the order, where there is one."""
    if isinstance(value, str):
        return value
    if order is None:
        return str(value)
    return order[value] if 0 <= value < len(order) else None


def _refuse_case_twins(column: LabelColumn) -> None:
    folded: dict[str, str] = {}
    for name in column.names:
        twin = folded.setdefault(name.casefold(), name)
        if twin != name:
            raise UserError(
                f"the classes {twin!r} and {name!r} of column {column.name!r} differ in case "
                "alone; on many file systems they would be one. Rename or merge them, or accept "
                "both with --allow-case-twins"
            )


def settled(collected: Collected) -> Iterator[pa.Table]:
    """Give the rows in the order of their keys, labels as classes, doubtful ones with a problem.

    Rows of equal keys come together, in one table.
    """
    for rows in collected.rows:
        if not rows.num_rows:
            continue
        rows = rows.combine_chunks()
        problems: dict[int, str] = {}
        for at in range(len(collected.columns)):
            rows = _with_classes(rows, at, collected, problems)
        _mark_doubles(rows, problems)
        yield _with_problems(rows, problems)


def _with_classes(
    rows: pa.Table, at: int, collected: Collected, problems: dict[int, str]
) -> pa.Table:
    """Replace the codes in one label column by classes."""
    name = f"{LABELS}{at}"
    lists = rows[name].chunk(0)
    starts = lists.offsets.to_numpy()
    codes = lists.values.to_numpy()
    sources = np.repeat(rows["source"].to_numpy(), np.diff(starts))
    classes = np.empty(len(codes), np.int32)
    for source, maps in enumerate(collected.class_maps):
        own = sources == source
        classes[own] = maps[at][codes[own]]
    column = collected.columns[at]
    counts = np.diff(starts)
    if (classes < 0).any():
        row_of = np.repeat(np.arange(rows.num_rows), counts)
        words = f"bad_label: not one of the {len(column.names)} classes of {column.name!r}"
        problems.update((row, words) for row in row_of[classes < 0].tolist())
    if not column.multi:
        words = f"no_label: in column {column.name!r}"
        problems.update((row, words) for row in np.flatnonzero(counts == 0).tolist())
    array = pa.ListArray.from_arrays(lists.offsets, pa.array(classes))
    at_field = rows.schema.get_field_index(name)
    return rows.set_column(at_field, rows.schema.field(at_field), array)


def _mark_doubles(rows: pa.Table, problems: dict[int, str]) -> None:
    """Mark what is listed twice: the same twice is kept once, different labels are refused."""
    high, low = rows[HIGH].to_numpy(), rows[LOW].to_numpy()
    equal = np.flatnonzero((high[1:] == high[:-1]) & (low[1:] == low[:-1])) + 1
    groups: list[list[int]] = []
    for row in equal.tolist():
        if groups and groups[-1][-1] == row - 1:
            groups[-1].append(row)
        else:
            groups.append([row - 1, row])
    fields = [name for name in rows.schema.names if name.startswith(LABELS)]
    for group in groups:
        labels = [[rows[name][row].as_py() for name in fields] for row in group]
        if all(own == labels[0] for own in labels):
            problems.update((row, "duplicate: listed more than once") for row in group[1:])
        else:
            words = "duplicate: listed more than once, with different labels"
            problems.update((row, words) for row in group)


def _with_problems(rows: pa.Table, problems: dict[int, str]) -> pa.Table:
    if not problems:
        return rows
    column = rows["problem"].to_pylist()
    for row, text in problems.items():
        column[row] = column[row] or os.fsencode(text)
    at = rows.schema.get_field_index("problem")
    return rows.set_column(at, rows.schema.field(at), pa.array(column, _NAMES))
