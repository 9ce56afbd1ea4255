"""The rows of a list of labels, read once, with the classes that they make."""

import os
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from data_prep.keyed_sort import HIGH, LOW
from data_prep.sources.build import printable
from data_prep.sources.files import RandomFile, expand_uris
from data_prep.sources.list_rows import ListTable, Row, open_table
from vitscale.config.errors import UserError
from vitscale.data.label_columns import NO_LABEL, LabelColumn

By = Literal["key", "source"]
TAKEN_ROWS = 1 << 16
# Of an integer label: classes are 0 to the largest one, and each takes some memory.
MAX_CLASSES = 1 << 24
SHOWN_ROWS = 5
_INTEGER = re.compile(r"0|-?[1-9]\d*")

LABEL_ROWS = pa.schema(
    [
        (HIGH, pa.uint64()),
        (LOW, pa.uint64()),
        # in the list, as it counts
        ("number", pa.int64()),
        # of labels: the position of each among those that were seen
        ("codes", pa.list_(pa.int32())),
    ]
)


@dataclass(frozen=True)
class ListOptions:
    """How a list of labels is read."""

    # column with keys or sources; None: `key`, or else `source`
    key_column: str | None = None
    # column with labels; None: `label`, the added column's name, or the only other one
    value_column: str | None = None
    # what the key column holds; None: sources if it is called so, keys otherwise
    by: By | None = None
    # between several labels in a cell of a text
    label_separator: str | None = None
    # between columns of a text; None finds it
    delimiter: str | None = None


class LabelList:
    """A list of labels: CSV and its relatives, JSON lines, Parquet (list_rows.py).

    Args:
        uri: The list, local or s3://.
        column: Name of the column that is added.
        multi: Whether a sample may have any number of labels.
        options: How it is read.
    """

    def __init__(self, uri: str, column: str, multi: bool, options: ListOptions) -> None:
        if "://" not in uri or uri.startswith("file://"):
            uri = os.path.expanduser(uri.removeprefix("file://"))
        self._uri, self._column, self._multi, self._options = uri, column, multi, options
        self._codes: dict[str | int, int] = {}
        self._values: dict[str, str | int | None] = {}
        self.by: By = "key"
        self.num_rows = 0

    def rows(self) -> Iterator[pa.Table]:
        """Give all rows by LABEL_ROWS, some at a time.

        Raises:
            UserError: The list is missing, cannot be understood, or a row is wrong.
        """
        found = expand_uris(self._uri, ())
        if len(found) > 1:
            raise UserError(f"list {self._shown}: stands for {len(found)} files; give one")
        with RandomFile(self._uri).open() as file:
            table = open_table(file, self._uri, self._options.delimiter, self._is_header)
            at_key, at_value = self._layout(table)
            self.by = self._options.by or ("source" if table.names[at_key] == "source" else "key")
            rows = table.rows()
            while taken := list(islice(rows, TAKEN_ROWS)):
                self.num_rows += len(taken)
                yield self._table(taken, at_key, at_value)
        if not self.num_rows:
            raise UserError(f"list {self._shown}: holds no rows")

    def keys(self, numbers: Sequence[int]) -> list[str]:
        """Read the list again for what some rows, by their numbers, have in the key column."""
        wanted = set(numbers)
        found: list[str] = []
        with RandomFile(self._uri).open() as file:
            table = open_table(file, self._uri, self._options.delimiter, self._is_header)
            at_key, _ = self._layout(table)
            for row in table.rows():
                if row.number in wanted:
                    found.append(printable(_key(row.cells[at_key])))
                    if len(found) == len(wanted):
                        break
        return found

    def classes(self, names: Sequence[str] | None) -> tuple[LabelColumn, npt.NDArray[np.int64]]:
        """Give the column with its classes, and the class of every code; call it after `rows`.

        Args:
            names: Classes in their order; None: 0 to the largest where all labels are integers,
                otherwise the labels in the order of their bytes.

        Raises:
            UserError: A label is not among the names, or there are none.
        """
        if not self._codes:
            raise UserError(
                f"list {self._shown}: all labels are empty; say with --value-column where they are"
            )
        numbers = [value for value in self._codes if isinstance(value, int)]
        if names is None and len(numbers) == len(self._codes):
            if max(numbers) >= MAX_CLASSES:
                raise UserError(
                    f"list {self._shown}: label {max(numbers)}: numbers count classes from 0, up "
                    f"to {MAX_CLASSES - 1}; for other numbers give the names with --names"
                )
            classes = [str(number) for number in range(max(numbers) + 1)]
        else:
            seen = (str(value) for value in self._codes)
            classes = list(names) if names is not None else sorted(seen, key=os.fsencode)
        index = {name: number for number, name in enumerate(classes)}
        found = np.asarray([_class_of(value, index, names) for value in self._codes], np.int64)
        if (found < 0).any():
            strange = [value for value, own in zip(self._codes, found, strict=True) if own < 0]
            raise UserError(
                f"list {self._shown}: {len(strange)} labels are not among the {len(classes)} "
                f"classes of --names: {', '.join(map(repr, strange[:SHOWN_ROWS]))}"
            )
        return LabelColumn(self._column, self._multi, tuple(map(printable, classes))), found

    @property
    def _shown(self) -> str:
        return repr(printable(self._uri))

    def _is_header(self, cells: Sequence[str]) -> bool:
        given = [self._options.key_column, self._options.value_column]
        named = [name for name in given if name]
        if named:
            # Where it lacks one, the error names those that are there. Numbers say: no header.
            return not all(name.isdecimal() for name in named)
        return not {"key", "source", "label", self._column}.isdisjoint(map(str.strip, cells))

    def _layout(self, table: ListTable) -> tuple[int, int]:
        """Give the columns of keys and labels."""
        plain = ("0",) if not table.has_header else ()
        key = self._find(table, self._options.key_column, ("key", "source", *plain), "--key-column")
        known = ["label", self._column]
        others = [name for at, name in enumerate(table.names) if at != key]
        if len(others) == 1:
            known += others
        value = self._find(table, self._options.value_column, known, "--value-column")
        if key == value:
            raise UserError(
                f"list {self._shown}: keys and labels would both be column {table.names[key]!r}; "
                "say with --key-column and --value-column which is which"
            )
        if table.names[value] in table.lists and not self._multi:
            raise UserError(
                f"list {self._shown}: column {table.names[value]!r} has several labels in a cell; "
                "add it with --multi"
            )
        return key, value

    def _find(self, table: ListTable, given: str | None, known: Sequence[str], flag: str) -> int:
        for name in [given] if given is not None else known:
            if name in table.names:
                return table.names.index(name)
        wanted = repr(given) if given is not None else " or ".join(map(repr, known))
        raise UserError(
            f"list {self._shown}: has no column {wanted}; it has {', '.join(table.names)}; choose "
            f"one with {flag}"
        )

    def _table(self, rows: list[Row], at_key: int, at_value: int) -> pa.Table:
        hashes = bytearray()
        flat, ends = array("i"), array("i", [0])
        for row in rows:
            if row.problem:
                raise UserError(f"list {self._shown}: row {row.number}: {row.problem}")
            key = _key(row.cells[at_key])
            if not key:
                raise UserError(f"list {self._shown}: row {row.number}: has no key")
            hashes += hash_name(key)
            flat.extend(self._codes_of(row.cells[at_value], row))
            ends.append(len(flat))
        if len(self._codes) > MAX_CLASSES:
            raise UserError(
                f"list {self._shown}: more than {MAX_CLASSES} different labels up to row "
                f"{rows[-1].number}; say with --value-column where the labels are"
            )
        numbers = pa.array([row.number for row in rows], pa.int64())
        lists = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(flat, pa.int32()))
        high, low = halves(bytes(hashes))
        return pa.table([high, low, numbers, lists], schema=LABEL_ROWS)

    def _codes_of(self, cell: Any, row: Row) -> Iterator[int]:
        for part in self._parts(cell):
            value = self._value(part, row)
            if value is not None:
                yield self._codes.setdefault(value, len(self._codes))

    def _parts(self, cell: Any) -> Sequence[Any]:
        separator = self._options.label_separator
        if isinstance(cell, str):
            if self._multi and separator is not None:
                return cell.split(separator)
            return (cell,)
        return cell if isinstance(cell, list) else (cell,)

    def _value(self, cell: Any, row: Row) -> str | int | None:
        """Give a label: a name, or a number that counts classes; None for none."""
        if isinstance(cell, bytes):
            cell = os.fsdecode(cell)
        if isinstance(cell, str):
            if cell not in self._values:
                text = cell.strip()
                self._values[cell] = int(text) if _INTEGER.fullmatch(text) else text or None
            value = self._values[cell]
        elif cell is None or cell != cell:
            return None
        elif isinstance(cell, int) or (isinstance(cell, float) and cell.is_integer()):
            value = int(cell)
        else:
            raise UserError(
                f"list {self._shown}: row {row.number}: label {str(cell)[:80]!r} is neither an "
                "integer nor a name" + ("" if self._multi else "; several need --multi")
            )
        if isinstance(value, int) and value < 0:
            if value == NO_LABEL:
                return None
            raise UserError(
                f"list {self._shown}: row {row.number}: label {value}: classes count from 0, "
                f"{NO_LABEL} stands for none"
            )
        return value


def hash_name(name: str) -> bytes:
    """Give 16 bytes that stand for a key or a source."""
    return xxhash.xxh3_128_digest(name.encode("utf-8", "surrogateescape"))


def halves(hashes: bytes) -> tuple[pa.Array, pa.Array]:
    """Give the upper and lower halves of hashes, 16 bytes each."""
    words = np.frombuffer(hashes, ">u8").astype(np.uint64).reshape(-1, 2)
    return pa.array(words[:, 0]), pa.array(words[:, 1])


def _key(cell: Any) -> str:
    if isinstance(cell, bytes):
        return os.fsdecode(cell)
    return "" if cell is None else str(cell).strip()


def _class_of(value: str | int, index: dict[str, int], names: Sequence[str] | None) -> int:
    """Give the class of a label: a number counts in the order, where there is one; -1: none."""
    if isinstance(value, int) and names is not None:
        return value if value < len(names) else -1
    return index.get(str(value), -1)
