"""A list of images with their labels: CSV, TSV, JSON lines, Parquet (list_rows.py).

Paths are relative to the list's folder (or `--image-root`), absolute, or addresses: file://, s3://,
http(s)://. What stands in a label cell:

- an integer (0, 17, -1): the class of that index, if all labels of the column are integers;
- else a name, written as in the list. Blanks around it do not count;
- several of either: a JSON or Parquet list, or a text split by `--label-separator`. Such a column
  is multi-label, where no label at all is fine. Elsewhere an empty cell is a bad label.

The size of an input comes from its file, from the store, or from the server; for remote ones also
from a column of the list (SIZE_COLUMNS), which saves a request for each.
"""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from data_prep.sources.build import Column, Entry, LabelValue, SourceOptions, printable
from data_prep.sources.files import RandomFile
from data_prep.sources.list_places import UNKNOWN, ListedPlaces
from data_prep.sources.list_rows import ListTable, Row, open_table
from data_prep.verdict import BadInputError
from vitscale.config.errors import UserError

# Names of columns, in lower case.
IMAGE_COLUMNS = (
    "path", "image", "img", "file", "filename", "file_name", "filepath", "file_path", "image_path",
    "img_path", "image_file", "image_name", "url", "image_url", "uri",
)  # fmt: skip
LABEL_COLUMNS = (
    "label", "labels", "class", "classes", "class_name", "class_id", "classname", "category",
    "category_id", "category_name", "target", "y", "wnid", "synset", "species", "breed", "tags",
)  # fmt: skip
SIZE_COLUMNS = ("num_bytes", "size", "size_bytes", "file_size")
# Of an integer label: classes are 0 to the largest one, and each takes some memory.
MAX_CLASSES = 1 << 24
_INTEGER = re.compile(r"0|-?[1-9]\d*")
_INTEGERS = re.compile(r"\d+([;|, ]+)\d+([;|, ]+\d+)*")


@dataclass(frozen=True)
class _Layout:
    """Which column is what."""

    image: int
    labels: tuple[int, ...]
    multi: tuple[bool, ...]
    names: tuple[str, ...]
    size: int | None


@dataclass
class _Seen:
    """The labels of one column so far."""

    values: set[str | int] = field(default_factory=set)
    first_name: str = ""


class ListFile:
    """Images that a list names.

    Args:
        uri: The list, local or s3://.
        options: `image_column`, `label_columns`, `label_separator`, `delimiter`, `image_root`.
    """

    kind = "list"

    def __init__(self, uri: str, options: SourceOptions) -> None:
        self._uri = uri
        self._options = options
        folder = uri.rpartition("/")[0] or ("/" if uri[:1] == "/" else ".")
        self._places = ListedPlaces(options.image_root or folder)
        self._values: dict[str, str | int] = {}
        self._columns: list[Column] = []
        self._seen: list[_Seen] = []

    def entries(self) -> Iterator[Entry]:
        """List the rows in their order.

        Raises:
            UserError: The list is missing, cannot be understood or lacks a column.
            StorageError: A store or server does not answer.
        """
        listed = RandomFile(self._uri)
        if not listed.num_bytes:
            raise UserError(f"list {self._shown}: is empty")
        with listed.open() as file:
            table = open_table(file, self._uri, self._options.delimiter, self._is_header)
            layout = self._layout(table)
            self._refuse_joined(table, layout)
            self._columns = [
                Column(name, multi) for name, multi in zip(layout.names, layout.multi, strict=True)
            ]
            self._seen = [_Seen() for _ in layout.names]
            is_empty = True
            for entry in self._places.sized(self._entry(row, layout) for row in table.rows()):
                is_empty = False
                yield entry
            if is_empty:
                raise UserError(f"list {self._shown}: holds no rows")

    def columns(self) -> list[Column]:
        """Give the label columns; warn where integers and names are mixed."""
        for column, seen in zip(self._columns, self._seen, strict=True):
            integers = [value for value in seen.values if isinstance(value, int)]
            if integers and max(integers) >= MAX_CLASSES:
                raise UserError(
                    f"list {self._shown}: column {column.name!r} holds the integer "
                    f"{max(integers)}; classes are 0 to the largest integer: number them from 0"
                )
            if integers and seen.first_name:
                print(
                    f"warning: list {self._shown}: column {column.name!r} holds integers and "
                    f"other labels, the first in {seen.first_name}; without --label-map all are "
                    "names of classes",
                    file=sys.stderr,
                    flush=True,
                )
        return self._columns

    def read(self, entry: Entry) -> bytes:
        """Read one input."""
        return self._places.read(entry)

    @property
    def _shown(self) -> str:
        return repr(printable(self._uri))

    def _is_header(self, cells: Sequence[str]) -> bool:
        given = [*self._options.label_columns, self._options.image_column or ""]
        given = [name for name in given if name]
        if given:
            # Where it lacks one, the error names those that are there. Numbers say: no header.
            return not all(name.isdecimal() for name in given)
        folded = {cell.strip().lower() for cell in cells}
        return not folded.isdisjoint(IMAGE_COLUMNS + LABEL_COLUMNS)

    def _layout(self, table: ListTable) -> _Layout:
        options = self._options
        if len(table.names) < 2:
            raise UserError(
                f"list {self._shown}: has a single column; it needs paths and labels "
                "(--delimiter says what stands between them)"
            )
        is_plain = not table.has_header and not options.label_columns
        if is_plain and options.image_column is None:
            image = 0
            labels: tuple[int, ...] = (1,)
            if len(table.names) > 2:
                raise UserError(
                    f"list {self._shown}: has {len(table.names)} columns and no header; name them "
                    "in a first line, such as path,label, or give their numbers: --image-column 0 "
                    "--label-column 1"
                )
        elif options.label_columns:
            labels = tuple(self._column(table, name) for name in options.label_columns)
            image = self._find(table, options.image_column, IMAGE_COLUMNS, "--image-column", labels)
        else:
            known = [n for n, name in enumerate(table.names) if name.lower() in LABEL_COLUMNS]
            image = self._find(
                table, options.image_column, IMAGE_COLUMNS, "--image-column", tuple(known)
            )
            labels = (self._find(table, None, LABEL_COLUMNS, "--label-column", (image,)),)
        lowered = [name.lower() for name in table.names]
        sizes = [lowered.index(name) for name in SIZE_COLUMNS if name in lowered]
        multi = tuple(
            table.names[at] in table.lists or options.label_separator is not None for at in labels
        )
        names: tuple[str, ...] = ("label",)
        if len(labels) > 1:
            names = tuple(re.sub(r"\W", "_", table.names[at]) for at in labels)
        size = next((at for at in sizes if at != image and at not in labels), None)
        return _Layout(image, labels, multi, names, size)

    def _column(self, table: ListTable, name: str) -> int:
        if name in table.names:
            return table.names.index(name)
        raise UserError(
            f"list {self._shown}: has no column {name!r}; it has {', '.join(table.names)}"
        )

    def _find(
        self,
        table: ListTable,
        given: str | None,
        known: tuple[str, ...],
        flag: str,
        taken: tuple[int, ...],
    ) -> int:
        """Give the column that is named, else the only one of a known name, else the only one."""
        if given is not None:
            return self._column(table, given)
        free = [
            at
            for at, name in enumerate(table.names)
            if at not in taken and name.lower() not in SIZE_COLUMNS
        ]
        found = [at for at in free if table.names[at].lower() in known] or free
        if len(found) == 1:
            return found[0]
        several = ", ".join(table.names[at] for at in found) or "none is left"
        raise UserError(
            f"list {self._shown}: choose one with {flag}: {several} (the columns are "
            f"{', '.join(table.names)})"
        )

    def _refuse_joined(self, table: ListTable, layout: _Layout) -> None:
        for at, multi in zip(layout.labels, layout.multi, strict=True):
            for row in table.head:
                cell = "" if row.problem else row.cells[at]
                match = isinstance(cell, str) and not multi and _INTEGERS.fullmatch(cell.strip())
                if match:
                    separator = match[1].strip() or " "
                    raise UserError(
                        f"list {self._shown}: row {row.number}: label {cell!r} looks like several; "
                        f"for a multi-label column give --label-separator {separator!r}"
                    )

    def _entry(self, row: Row, layout: _Layout) -> Entry:
        """Make an entry from a row; the size is what the list says, or UNKNOWN."""
        if row.problem:
            none: tuple[LabelValue, ...] = ((),) * len(layout.labels)
            path = row.cells[layout.image] if len(row.cells) > layout.image else ""
            name = _path(path) or f"row {row.number}"
            return Entry(name, 0, none, f"bad_label: row {row.number}: {row.problem}")
        path = _path(row.cells[layout.image])
        labels: list[LabelValue] = []
        problem = "" if path else f"missing_file: row {row.number}: the path is empty"
        for number, at in enumerate(layout.labels):
            try:
                value = self._label(row.cells[at], layout.multi[number])
            except BadInputError as error:
                problem = problem or f"bad_label: row {row.number}: {error}"
                value = ()
            self._note(number, value, row)
            labels.append(value)
        size = UNKNOWN if layout.size is None else _num_bytes(row.cells[layout.size])
        return Entry(path or f"row {row.number}", size, tuple(labels), problem)

    def _label(self, cell: Any, multi: bool) -> LabelValue:
        separator = self._options.label_separator
        if not multi:
            return self._value(cell)
        if isinstance(cell, str) and separator is not None:
            cell = [part for part in cell.split(separator) if part.strip()]
        if cell is None or cell == "":
            return ()
        return tuple(map(self._value, cell if isinstance(cell, list) else [cell]))

    def _value(self, cell: Any) -> str | int:
        if isinstance(cell, str):
            value = self._values.get(cell)
            if value is None:
                value = self._values[cell] = _value_of(cell)
            return value
        if isinstance(cell, float) and cell.is_integer():
            return int(cell)
        if isinstance(cell, int):
            return int(cell)
        if isinstance(cell, bytes):
            return self._value(os.fsdecode(cell))
        if cell is None or cell != cell:
            raise BadInputError("empty")
        raise BadInputError(f"{cell!r} is neither an integer nor a name"[:200])

    def _note(self, number: int, value: LabelValue, row: Row) -> None:
        seen = self._seen[number]
        for one in value if isinstance(value, tuple) else (value,):
            if one not in seen.values:
                seen.values.add(one)
                if isinstance(one, str) and not seen.first_name:
                    seen.first_name = f"row {row.number}: {printable(one)!r}"


def _path(cell: Any) -> str:
    return os.fsdecode(cell).strip() if isinstance(cell, str | bytes) else ""


def _value_of(text: str) -> str | int:
    text = text.strip()
    if not text:
        raise BadInputError("the label is empty")
    return int(text) if _INTEGER.fullmatch(text) else text


def _num_bytes(cell: Any) -> int:
    text = str(cell).strip()
    return int(text) if text.isdecimal() else UNKNOWN
