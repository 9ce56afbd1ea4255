r"""The rows of a list of images: CSV and its relatives, JSON lines, Parquet.

What a list is, its content says. Text is UTF-8 (with or without a byte-order mark; other bytes stay
what they are, for file names of old systems) or UTF-16, gzipped or not. Between columns stand
commas, tabs, semicolons or bars; a line `some path.jpg 3` without any has its label at the end.
"""

import csv
import gzip
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.sources.build import printable
from vitscale.config.errors import UserError

DELIMITERS = (",", "\t", ";", "|")
BLANK = " "
# Lines from which delimiter, header and kinds of column are found.
HEAD_LINES = 200
HEAD_BYTES = 1 << 16
# Share of those lines that must have the same number of fields.
AGREEING = 0.9
BATCH_ROWS = 1 << 14
# `.../image.jpg 3` with nothing but a blank between: commas in it belong to the path.
_PATH_AND_NUMBER = re.compile(r".*\.\w{1,5} +-?\d+\s*")


class Row(NamedTuple):
    """One row of a list."""

    # from 1: the line of a text, the row of a table
    number: int
    # one for each column, or none with a problem
    cells: Sequence[Any]
    problem: str = ""


@dataclass(frozen=True)
class ListTable:
    """A list that has been looked into."""

    # columns; their numbers where there is no header
    names: tuple[str, ...]
    has_header: bool
    # those with several values in a cell
    lists: frozenset[str]
    # of the first rows
    head: list[Row]
    rows: Callable[[], Iterator[Row]]


def open_table(
    file: BinaryIO, uri: str, delimiter: str | None, is_header: Callable[[Sequence[str]], bool]
) -> ListTable:
    """Look into a list.

    Args:
        file: The list, at its start; seekable.
        uri: Its name, for messages.
        delimiter: Between columns of a text; None finds it.
        is_header: Tells whether the first line of a text names the columns.

    Raises:
        UserError: It is empty or cannot be understood.
    """
    try:
        start = file.read(4)
        file.seek(0)
        if start == b"PAR1":
            return _parquet_table(file, uri)
        if start[:2] == b"\x1f\x8b":
            file = gzip.GzipFile(fileobj=file)  # type: ignore[assignment]
        start = file.read(HEAD_BYTES)
        file.seek(0)
        text = _text(file, start)
        head = list(itertools.islice((line for line in text if line.strip()), HEAD_LINES))
        if not head:
            raise UserError(f"list {printable(uri)!r}: holds no rows")

        def lines() -> Iterator[str]:
            text.seek(0)
            return _guarded(text, uri)

        if head[0].lstrip().startswith("{"):
            return _json_table(lines, uri, head)
        if head[0].lstrip().startswith("["):
            raise UserError(
                f"list {printable(uri)!r}: starts with '['; write JSON lines, one object a line"
            )
        return _delimited_table(lines, uri, head, delimiter, is_header)
    except (OSError, EOFError, UnicodeError) as error:
        raise UserError(f"list {printable(uri)!r}: cannot be read: {error}") from error


def _text(file: BinaryIO, start: bytes) -> TextIO:
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        encoding, errors = "utf-16", "strict"
    elif b"\0" in start[:64]:
        # Without a mark; paths start with ASCII, whose upper byte is zero.
        encoding, errors = "utf-16-le" if start[1:2] == b"\0" else "utf-16-be", "strict"
    else:
        encoding, errors = "utf-8-sig", "surrogateescape"
    return io.TextIOWrapper(file, encoding, errors, newline="")


def _guarded(text: Iterable[str], uri: str) -> Iterator[str]:
    try:
        # `yield from` would close the text together with the generator.
        for line in text:  # noqa: UP028
            yield line
    except (OSError, EOFError, UnicodeError) as error:
        raise UserError(f"list {printable(uri)!r}: cannot be read: {error}") from error


def _json_table(lines: Callable[[], Iterator[str]], uri: str, head: list[str]) -> ListTable:
    objects = [_parsed(line) for line in head]
    names: dict[str, None] = {}
    lists: set[str] = set()
    for one in objects:
        if isinstance(one, dict):
            names.update(dict.fromkeys(one))
            lists.update(name for name, value in one.items() if isinstance(value, list))
    columns = tuple(names)

    def rows() -> Iterator[Row]:
        for number, line in enumerate(lines(), 1):
            if not line.strip():
                continue
            one = _parsed(line)
            if isinstance(one, dict):
                yield Row(number, [one.get(name) for name in columns])
            else:
                yield Row(number, (), "is no JSON object")

    head_rows = list(itertools.islice(rows(), HEAD_LINES))
    return ListTable(columns, True, frozenset(lists), head_rows, rows)


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _parquet_table(file: BinaryIO, uri: str) -> ListTable:
    try:
        opened = pq.ParquetFile(file)
        schema = opened.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"list {printable(uri)!r}: is no sound Parquet file: {error}") from error
    simple = [field.name for field in schema if _is_simple(field.type)]
    lists = {field.name for field in schema if _is_list(field.type)}

    def rows() -> Iterator[Row]:
        number = 0
        try:
            for batch in opened.iter_batches(BATCH_ROWS, columns=simple):
                columns = [batch.column(name).to_pylist() for name in simple]
                for cells in zip(*columns, strict=True):
                    number += 1
                    yield Row(number, cells)
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                f"list {printable(uri)!r}: cannot be read behind row {number}: {error}"
            ) from error

    head = list(itertools.islice(rows(), HEAD_LINES))
    return ListTable(tuple(simple), True, frozenset(lists), head, rows)


def _is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _is_simple(kind: pa.DataType) -> bool:
    """Tell whether a column can hold paths, sizes or labels; images in the table cannot."""
    if pa.types.is_dictionary(kind) or _is_list(kind):
        kind = kind.value_type
    return not (pa.types.is_nested(kind) or pa.types.is_temporal(kind))


def _delimited_table(
    lines: Callable[[], Iterator[str]],
    uri: str,
    head: list[str],
    delimiter: str | None,
    is_header: Callable[[Sequence[str]], bool],
) -> ListTable:
    if delimiter is not None and len(delimiter) != 1:
        raise UserError(f"--delimiter {delimiter!r}: write one character")
    head = [line for line in head if not line.startswith("# ")] or head
    mark = delimiter or _find_delimiter(head, is_header)
    if mark == BLANK:
        first = head[0].split()
        has_header = is_header(first)
        num_columns = len(first) if has_header else 2
    else:
        first = [cell.strip().lstrip("#") for cell in next(_fields(iter(head), mark))]
        has_header = is_header(first)
        num_columns = len(first) if has_header else _usual_count(head, mark)[0]
    names = tuple(first) if has_header else tuple(map(str, range(num_columns)))

    def rows() -> Iterator[Row]:
        split = _split_at_blanks if mark == BLANK else _split_at_marks
        found = split(lines(), mark, num_columns, uri)
        yield from itertools.islice(found, 1 if has_header else 0, None)

    head_rows = list(itertools.islice(rows(), HEAD_LINES))
    return ListTable(names, has_header, frozenset(), head_rows, rows)


def _find_delimiter(head: list[str], is_header: Callable[[Sequence[str]], bool]) -> str:
    if all(_PATH_AND_NUMBER.fullmatch(line) for line in head):
        return BLANK
    best, best_share = "", AGREEING
    for mark in DELIMITERS:
        count, share = _usual_count(head, mark)
        # Only more agreement beats one that comes earlier.
        if count > 1 and (share > best_share or (not best and share == best_share)):
            best, best_share = mark, share
    if best:
        return best
    for mark in DELIMITERS:
        first = next(_fields(iter(head), mark))
        if len(first) > 1 and is_header(first):
            return mark
    return BLANK if any(len(line.split()) > 1 for line in head) else DELIMITERS[0]


def _usual_count(head: list[str], mark: str) -> tuple[int, float]:
    """Give the number of fields that most lines have, and the share of these lines."""
    counts = Counter(len(cells) for cells in _fields(iter(head), mark))
    count, times = counts.most_common(1)[0]
    return count, times / counts.total()


def _fields(lines: Iterator[str], mark: str) -> Iterator[list[str]]:
    yield from csv.reader(lines, delimiter=mark, skipinitialspace=True)


def _split_at_blanks(lines: Iterator[str], mark: str, num_columns: int, uri: str) -> Iterator[Row]:
    """Split lines from their ends: only the path, which is first, may hold blanks."""
    for number, line in enumerate(lines, 1):
        cells = line.rsplit(None, num_columns - 1)
        if len(cells) == num_columns:
            yield Row(number, cells)
        elif cells and not line.startswith("#"):
            yield Row(number, cells, f"{len(cells)} fields, expected {num_columns}")


def _split_at_marks(lines: Iterator[str], mark: str, num_columns: int, uri: str) -> Iterator[Row]:
    reader = csv.reader(lines, delimiter=mark, skipinitialspace=True, strict=True)
    try:
        for cells in reader:
            if not any(cells) or cells[0].startswith("# "):
                continue
            while len(cells) > num_columns and not cells[-1].strip():
                cells.pop()
            if len(cells) == num_columns:
                yield Row(reader.line_num, cells)
            elif not cells[0].startswith("#"):
                problem = (
                    f"{len(cells)} fields, expected {num_columns}; put values that hold "
                    f"{mark!r} in double quotes"
                )
                yield Row(reader.line_num, cells, problem)
    except csv.Error as error:
        raise UserError(
            f"list {printable(uri)!r}: row {reader.line_num}: {error}; values in double quotes "
            "need their own double quotes doubled"
        ) from error
