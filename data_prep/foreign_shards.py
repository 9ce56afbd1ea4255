"""Shards that somebody else wrote, as `vitscale index` reads them: WebDataset, Parquet."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.sources.build import Column, LabelValue, SourceOptions, printable
from data_prep.sources.files import RandomFile
from data_prep.sources.foreign_tars import DEFAULT_COLUMN, scan_samples
from data_prep.sources.parquet import IMAGE_COLUMNS, ParquetFiles
from vitscale.config.errors import DataError, UserError
from vitscale.data.manifest import SHARDS_NAME
from vitscale.data.parquet_shard import ParquetShard, RowGroups

ENDINGS = {"tar": ".tar", "parquet": ".parquet"}
READ_BYTES = 16 << 20
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
# Folders of a dataset with Parquet files of ours.
_OURS = ("ledger/", "labels/", "_commit/")


class ForeignRow(NamedTuple):
    """One sample of a shard."""

    # unique in the dataset, as valid text
    key: str
    # for the index: where the image starts, or the row; None without an image
    offset: int | None
    # of the image, where that is known before it is read
    num_bytes: int
    # one for each label column
    labels: tuple[LabelValue, ...]
    # why it cannot be used, "WORD: detail"; else empty
    problem: str


class ForeignShard(Protocol):
    """One shard."""

    # first word of a ledger's `source`
    kind: str
    file: RandomFile

    def rows(self) -> Iterator[ForeignRow]:
        """Give the samples in stored order, without reading images.

        Raises:
            UserError: A label column that was asked for is not there.
            DataError: The shard is damaged.
        """

    def columns(self) -> list[Column]:
        """Give the label columns; called when `rows` has been used up."""

    def image(self, row: ForeignRow) -> bytes | None:
        """Read one image; None where there is none.

        Raises:
            DataError: The shard is damaged.
        """


@dataclass(frozen=True)
class Reading:
    """How shards are read.

    Args:
        uri: Where they are.
        format: "tar" or "parquet".
        label_columns: Members or fields with labels; empty finds the one there is.
        image_column: Of Parquet files, where the images are; empty for tars.
    """

    uri: str
    format: str
    label_columns: tuple[str, ...]
    image_column: str = ""

    def open(self, name: str) -> ForeignShard:
        """Open one shard."""
        made: ForeignShard = _TarShard(self, name)
        if self.format == "parquet":
            made = _ParquetFile(self, name)
        return made


class _TarShard:
    """A WebDataset tar, not compressed."""

    kind = "webdataset"

    def __init__(self, reading: Reading, name: str) -> None:
        self._names = reading.label_columns
        self.file = RandomFile(f"{reading.uri}/{name}")
        self._multi = [False] * max(1, len(self._names))

    def rows(self) -> Iterator[ForeignRow]:
        """Give the samples; keys are those of webdataset."""
        for sample in scan_samples(self.file, self._names):
            for at, label in enumerate(sample.labels):
                # An empty tuple may also be a label that is missing.
                self._multi[at] |= isinstance(label, tuple) and not sample.problem
            key, image = printable(sample.key), sample.image
            if image is None:
                yield ForeignRow(key, None, 0, sample.labels, sample.problem)
            else:
                problem = sample.problem or image.problem
                yield ForeignRow(key, image.offset, image.num_bytes, sample.labels, problem)

    def columns(self) -> list[Column]:
        """Give the label columns; those with a list of labels anywhere are multi-label."""
        names = self._names or (DEFAULT_COLUMN,)
        return [Column(name, multi) for name, multi in zip(names, self._multi, strict=True)]

    def image(self, row: ForeignRow) -> bytes | None:
        """Read one image."""
        return None if row.offset is None else self.file.read(row.offset, row.num_bytes)


class _ParquetFile:
    """A Parquet file with images."""

    kind = "parquet"

    def __init__(self, reading: Reading, name: str) -> None:
        uri = f"{reading.uri}/{name}"
        options = SourceOptions(
            label_columns=reading.label_columns, image_column=reading.image_column
        )
        self._stem = printable(name.removesuffix(ENDINGS["parquet"]))
        self.file = RandomFile(uri)
        self._source = ParquetFiles(uri, options)
        self._images: ParquetShard | None = None
        self._name, self._image_column = name, reading.image_column

    def rows(self) -> Iterator[ForeignRow]:
        """Give the rows; keys are the file's name and their number."""
        if not _open(self.file).metadata.num_rows:
            return
        for number, entry in enumerate(self._source.entries()):
            key = f"{self._stem}/{number:06d}"
            yield ForeignRow(key, number, 0, entry.labels, entry.problem)

    def columns(self) -> list[Column]:
        """Give the label columns, with their classes where the file says them."""
        return self._source.columns()

    def image(self, row: ForeignRow) -> bytes | None:
        """Read one image, from a row group that is kept for the next ones."""
        assert row.offset is not None
        try:
            if self._images is None:
                source, groups = self.file.open(), RowGroups()
                self._images = ParquetShard(source, self._name, self._image_column, groups)
            return self._images.image(row.offset)
        except DataError as error:
            raise _damaged(self.file, error) from error


def find_shards(sizes: dict[str, int], wanted: str | None, uri: str) -> tuple[str, list[str]]:
    """Find the shards among the objects below a prefix.

    Args:
        sizes: All objects.
        wanted: "tar", "parquet", or None for the kind there is.
        uri: The prefix, for messages.

    Returns:
        Their format, and their names in order.

    Raises:
        UserError: There are none, or of both kinds, or compressed ones.
    """
    packed = [name for name in sizes if name.lower().endswith(_COMPRESSED)]
    found = {
        kind: sorted(name for name in sizes if name.endswith(ending) and not _is_ours(name))
        for kind, ending in ENDINGS.items()
    }
    kinds = [kind for kind in ENDINGS if found[kind] and wanted in (None, kind)]
    if not kinds:
        endings = " or ".join([ENDINGS[wanted]] if wanted else ENDINGS.values())
        there = f"; {packed[0]} and other compressed ones ({len(packed)})" if packed else ""
        raise UserError(
            f"{uri} has no {endings} files{there}; compressed tars are for `vitscale pack`"
        )
    if len(kinds) > 1:
        raise UserError(f"{uri} has tars and Parquet files: say which with --format")
    if packed and kinds == ["tar"]:
        raise UserError(
            f"{uri} has {len(packed)} compressed tars beside others, such as {packed[0]}: unpack "
            "them or move them away, or pack all with `vitscale pack --source webdataset:...`"
        )
    return kinds[0], found[kinds[0]]


def _is_ours(name: str) -> bool:
    return name.startswith(_OURS) or name == SHARDS_NAME or name.endswith(".index.parquet")


def find_image_column(uri: str, names: list[str], given: str | None) -> str:
    """Find the column with images, in the first file that is whole.

    Args:
        uri: Where the files are.
        names: Of the files.
        given: --image-column.

    Raises:
        UserError: It has to be said.
        DataError: All files are damaged.
    """
    for name in names:
        try:
            schema = _open(RandomFile(f"{uri}/{name}")).schema_arrow
            break
        except DataError as error:
            damage = error
    else:
        raise damage
    fits = [field.name for field in schema if _is_image(field.type)]
    found = [column for column in fits if given in (None, column)]
    if len(found) > 1:
        found = [column for column in found if column.lower() in IMAGE_COLUMNS]
    if len(found) != 1:
        raise UserError(
            f"{uri}/{printable(name)}: --image-column must name the one with images; the columns "
            f"are {', '.join(schema.names)}, those with bytes {', '.join(fits) or 'none'}"
        )
    return found[0]


def _open(file: RandomFile) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file.open())
    except (pa.ArrowException, OSError) as error:
        raise _damaged(file, f"is no sound Parquet file: {error}") from error


def _damaged(file: RandomFile, reason: object) -> DataError:
    return DataError(f"{printable(file.uri)!r} {reason}; fetch it again, or move it away")


def _is_image(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        at = kind.get_field_index("bytes")
        return at >= 0 and _is_image(kind.field(at).type)
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def sha256_of(file: RandomFile) -> str:
    """Give the sha256 of a whole file as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for offset in range(0, file.num_bytes, READ_BYTES):
        digest.update(file.read(offset, READ_BYTES))
    return digest.hexdigest()
