"""Parquet files with images in them, the layout of Hugging Face's image datasets.

The image column holds encoded images, plain or as `bytes` in a struct with a `path`; where bytes
are null, the path names a file beside the Parquet file. Classes come from the ClassLabel features
in the footer, in their order.

The images of a row group can only be read together: it is a block, and stays together in the order.
The size of an input is its share of the row group, as the footer says it: the sizes of the images
themselves would cost reading all of them, and balance the shards no better, as blocks stay whole.
"""

import itertools
import json
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.sources.build import Column, Entry, LabelValue, SourceOptions, printable
from data_prep.sources.files import RandomFile, find_files, with_prefixes
from data_prep.verdict import BadInputError
from vitscale.config.errors import DataError, UserError

ENDINGS = (".parquet",)
# Names of columns, in lower case.
IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "picture", "photo", "image_bytes")
LABEL_COLUMNS = ("label", "labels", "class", "class_id", "category", "target", "fine_label", "cls")
# Decoded row groups that a process keeps; at least one, whatever its size.
CACHE_BYTES = 256 << 20
_SIBLING = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\..*)")


@dataclass(frozen=True)
class _Layout:
    """Which columns a file has, in what form."""

    image: str
    # (name, multi, classes) of each label column
    labels: tuple[tuple[str, bool, tuple[str, ...] | None], ...]

    def shown(self) -> str:
        """Write it for a message."""
        words = (
            f"{name}{'[]' * multi}" + (f" of {len(names)} classes {names[0]}, ..." if names else "")
            for name, multi, names in self.labels
        )
        return f"{self.image}: {' and '.join(words)}"


class ParquetFiles:
    """Images in Parquet files.

    Args:
        uri: A file, a folder, a pattern or a list in braces; local or s3://.
        options: `image_column`, `label_columns`.
    """

    kind = "parquet"

    def __init__(self, uri: str, options: SourceOptions) -> None:
        self._uri = uri
        self._options = options
        self._layout: _Layout | None = None
        self._cache: tuple[int, _RowGroups] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetFiles, (self._uri, self._options)

    def entries(self) -> Iterator[Entry]:
        """List all rows, file by file.

        Raises:
            UserError: There are no files or rows, a column is missing, or the files do not fit
                together.
            DataError: A file is damaged.
        """
        files = find_files(self._uri, ENDINGS)
        _warn_of_gaps([found.uri for found in files])
        first = ""
        is_empty = True
        for (uri, _), prefix in with_prefixes(files):
            file = _open(uri)
            layout = self._look(file, uri)
            if self._layout is not None and layout != self._layout:
                raise UserError(
                    f"parquet: {printable(uri)!r} has other columns or classes than "
                    f"{printable(first)!r} ({layout.shown()}; {self._layout.shown()}); pack them "
                    "as several sources or datasets"
                )
            first, self._layout = first or uri, layout
            for entry in _rows(file, uri, prefix, layout):
                is_empty = False
                yield entry
        if is_empty:
            raise UserError(f"parquet: {printable(self._uri)!r} holds no rows")

    def columns(self) -> list[Column]:
        """Give the label columns, with their classes where the files say them."""
        if self._layout is None:
            return []
        labels = self._layout.labels
        if len(labels) == 1:
            return [Column("label", labels[0][1], labels[0][2])]
        return [Column(re.sub(r"\W", "_", name), multi, names) for name, multi, names in labels]

    def read(self, entry: Entry) -> bytes:
        """Give one image, from a row group that is kept for the next ones."""
        group, row, uri = entry.where.split(" ", 2)
        images = self._groups().get(uri, int(group), entry.num_bytes)
        value = images[int(row)].as_py()
        if isinstance(value, dict):
            path, value = value.get("path"), value.get("bytes")
            if value is None and path:
                return _read_beside(uri, path)
        if value is None:
            raise BadInputError("incomplete_sample: the image is null")
        data: bytes = value
        return data

    def _groups(self) -> "_RowGroups":
        # Files and locks are not for two processes.
        if self._cache is None or self._cache[0] != os.getpid():
            self._cache = os.getpid(), _RowGroups(self._image_column)
        return self._cache[1]

    def _image_column(self, schema: pa.Schema, uri: str) -> str:
        kinds = {f.name: f.type for f in schema}
        return _choose(
            self._options.image_column,
            [name for name, kind in kinds.items() if _is_image(kind)],
            IMAGE_COLUMNS,
            list(kinds),
            f"parquet: {printable(uri)!r}: --image-column",
        )

    def _look(self, file: pq.ParquetFile, uri: str) -> _Layout:
        schema = file.schema_arrow
        image = self._image_column(schema, uri)
        features = _features(schema, uri)
        where = f"parquet: {printable(uri)!r}: --label-column"
        fits = [f.name for f in schema if f.name != image and _is_label(f.type)]
        chosen = list(self._options.label_columns)
        for name in chosen:
            _choose(name, fits, (), schema.names, where)
        if not chosen:
            classed = [name for name in fits if _class_names(features.get(name)) is not None]
            likely = classed or [name for name in fits if name.lower() in LABEL_COLUMNS] or fits
            chosen = [_choose(None, likely, LABEL_COLUMNS[:1], schema.names, where)]
        labels = tuple(
            (name, _is_list(schema.field(name).type), _class_names(features.get(name)))
            for name in chosen
        )
        return _Layout(image, labels)


@dataclass
class _Slot:
    """A row group, or the place that is kept for it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    images: pa.ChunkedArray | None = None


class _RowGroups:
    """The image columns of the row groups that were used last; for several threads.

    Args:
        image_column: Finds the column in a schema; the second argument is the file, for messages.
    """

    def __init__(self, image_column: Callable[[pa.Schema, str], str]) -> None:
        self._image_column = image_column
        self._lock = threading.Lock()
        self._slots: OrderedDict[tuple[str, int], _Slot] = OrderedDict()

    def get(self, uri: str, group: int, share: int) -> pa.ChunkedArray:
        """Give the images of a row group.

        Args:
            uri: The file.
            group: Which one.
            share: Size of an input when the file was listed, in bytes.

        Raises:
            DataError: The file is gone, damaged, or another one than was listed.
        """
        with self._lock:
            slot = self._slots.setdefault((uri, group), _Slot())
            self._slots.move_to_end((uri, group))
        with slot.lock:
            if slot.images is None:
                slot.images = self._load(uri, group, share)
                with self._lock:
                    self._shrink()
            return slot.images

    def _load(self, uri: str, group: int, share: int) -> pa.ChunkedArray:
        try:
            file = _open(uri)
        except UserError as error:
            raise DataError(f"{error}; it was there when it was listed") from error
        column = self._image_column(file.schema_arrow, uri)
        if group >= file.num_row_groups or _share(file, group, column) != share:
            raise DataError(
                f"parquet: {printable(uri)!r} is another file than was listed; do not change "
                "inputs while they are packed"
            )
        try:
            return file.read_row_group(group, columns=[column], use_threads=False).column(0)
        except (pa.ArrowException, OSError) as error:
            raise _damaged(uri, group, error) from error

    def _shrink(self) -> None:
        held = [slot.images.nbytes if slot.images else 0 for slot in self._slots.values()]
        total = sum(held)
        for key, num_bytes in zip(list(self._slots)[:-1], held, strict=False):
            if total <= CACHE_BYTES:
                return
            # One that is being read has no bytes yet; without its slot it would be read twice.
            if num_bytes:
                del self._slots[key]
                total -= num_bytes


def _open(uri: str) -> pq.ParquetFile:
    try:
        # Columns of remote files come in few large requests.
        return pq.ParquetFile(RandomFile(uri).open(), pre_buffer=True)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"parquet: {printable(uri)!r} is no sound Parquet file: {error}") from error


def _damaged(uri: str, group: int, error: Exception) -> DataError:
    return DataError(
        f"parquet: {printable(uri)!r}: row group {group} cannot be read: {error}; fetch it again"
    )


def _share(file: pq.ParquetFile, group: int, column: str) -> int:
    """Give the bytes of images for each row of a row group, rounded down."""
    about = file.metadata.row_group(group)
    chunks = (about.column(at) for at in range(about.num_columns))
    total = sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if chunk.path_in_schema.partition(".")[0] == column
    )
    return int(total) // max(1, about.num_rows)


def _rows(file: pq.ParquetFile, uri: str, prefix: str, layout: _Layout) -> Iterator[Entry]:
    columns = [label[0] for label in layout.labels]
    number = 0
    for group in range(file.num_row_groups):
        try:
            table = file.read_row_group(group, columns=columns, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise _damaged(uri, group, error) from error
        share = _share(file, group, layout.image)
        block = f"{prefix}#{group}"
        cells = (
            [_label(value) for value in table.column(column).to_pylist()] for column in columns
        )
        for row, labels in enumerate(zip(*cells, strict=True)):
            yield Entry(f"{prefix}{number}", share, labels, "", f"{group} {row} {uri}", block)
            number += 1


def _label(value: Any) -> LabelValue:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return tuple(one if isinstance(one, str) else int(one) for one in value if one is not None)
    if value is None:
        return ()
    return value if type(value) is int else int(value)


def _choose(
    given: str | None, fits: list[str], known: tuple[str, ...], names: list[str], where: str
) -> str:
    """Give the column that is named, else the only one that fits, else the only known one."""
    there = f"the columns are {', '.join(names)}"
    if given is not None:
        if given not in names:
            raise UserError(f"{where} {given}: there is no such column; {there}")
        if given not in fits:
            raise UserError(f"{where} {given}: holds other things; {there}")
        return given
    found = fits if len(fits) == 1 else [name for name in fits if name.lower() in known]
    if len(found) != 1:
        several = ", ".join(fits) or "none fits"
        raise UserError(f"{where} must say which one: {several}; {there}")
    return found[0]


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_image(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        at = kind.get_field_index("bytes")
        return at >= 0 and _is_bytes(kind.field(at).type)
    return _is_bytes(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_label(kind: pa.DataType) -> bool:
    if _is_list(kind) or pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_string, pa.types.is_large_string)
    return any(test(kind) for test in tests)


def _features(schema: pa.Schema, uri: str) -> dict[str, Any]:
    """Give what Hugging Face's library wrote about the columns, if it did."""
    text = (schema.metadata or {}).get(b"huggingface")
    if text is None:
        return {}
    try:
        features = json.loads(text)["info"]["features"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"parquet: {printable(uri)!r}: its footer is damaged: {error}") from error
    return dict(features)


def _class_names(feature: Any) -> tuple[str, ...] | None:
    """Give the classes of a ClassLabel, or of a list of them."""
    if isinstance(feature, list) and len(feature) == 1:
        feature = feature[0]
    if isinstance(feature, dict) and "feature" in feature:
        feature = feature["feature"]
    names = feature.get("names") if isinstance(feature, dict) else None
    return tuple(map(str, names)) if isinstance(names, list) else None


def _read_beside(uri: str, path: str) -> bytes:
    inside = os.path.normpath(path)
    if os.path.isabs(inside) or inside.split("/")[0] == "..":
        raise BadInputError(f"incomplete_sample: no bytes, and {path!r} is not beside the file")
    file = RandomFile(f"{uri.rpartition('/')[0] or '.'}/{inside}")
    try:
        return file.read(0, file.num_bytes)
    except (UserError, DataError) as error:
        raise BadInputError(f"incomplete_sample: no bytes, and no file {path!r}") from error
    except IsADirectoryError as error:
        raise BadInputError(f"incomplete_sample: no bytes, and {path!r} is a folder") from error


def _warn_of_gaps(uris: list[str]) -> None:
    """Say which files of a numbered set are absent."""
    there: dict[tuple[str, str, str], set[int]] = {}
    for uri in uris:
        if match := _SIBLING.fullmatch(uri):
            there.setdefault((match[1], match[3], match[4]), set()).add(int(match[2]))
    for (stem, count, ending), numbers in there.items():
        absent = (number for number in range(int(count)) if number not in numbers)
        first = [
            f"{stem}-{number:05d}-of-{count}{ending}" for number in itertools.islice(absent, 5)
        ]
        if first:
            num_absent = int(count) - len(numbers)
            print(
                f"warning: parquet: {num_absent} of {int(count)} files are not there: "
                f"{printable(', '.join(first))}{', ...' if num_absent > 5 else ''}",
                file=sys.stderr,
                flush=True,
            )
