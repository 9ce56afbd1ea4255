"""Images in tars or zips whose names say the class, the layout of a folder that was archived.

Names are those in the archive, without "./" and the like; with several archives each name starts
with that of its archive. Of members with the same name the later ones get `#2`, `#3`, ... Left out
without a ledger row: folders, hidden files and what desktops leave behind.
"""

import functools
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from data_prep.sources.build import Column, Entry, LabelValue, SourceOptions, printable
from data_prep.sources.files import (
    FoundFile,
    OpenFiles,
    RandomFile,
    find_files,
    is_litter,
    with_prefixes,
)
from data_prep.sources.tar_files import (
    TarFiles,
    UniqueNames,
    block_of,
    member_entry,
    too_large,
    with_links,
)
from data_prep.sources.tar_scan import (
    TAR_ENDINGS,
    clean_name,
    scan_file,
)
from data_prep.verdict import BadInputError
from vitscale.config.errors import DataError, UserError

# Signature, version, flags, method, time, date, crc, two sizes, lengths of name and extra field.
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
# Read with a member for its name and extra field, whose lengths only its header says.
_SLACK_BYTES = 512


class LabelRule:
    """Finds the class in the name of a member.

    Args:
        text: "parent" (folder of the member), "top" (its outermost folder), "none", or a regular
            expression whose group `label`, or first group, is the class.

    Raises:
        UserError: It is none of these.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        if text in ("parent", "top", "none"):
            return
        try:
            self._pattern = re.compile(text)
        except re.error as error:
            raise UserError(f"--label-rule {text!r} is no regular expression: {error}") from error
        if not self._pattern.groups:
            raise UserError(
                f"--label-rule {text!r} has no group: put the class in brackets, such as "
                "'(?P<label>[^/]+)/[^/]+$', or use parent, top or none"
            )

    def column(self) -> Column:
        """Give the label column; without classes where there are no labels."""
        if self._text == "none":
            return Column("label", multi=True, names=())
        return Column("label")

    def find(self, name: str) -> tuple[LabelValue, str]:
        """Give the class, and why there is none."""
        if self._text == "none":
            return (), ""
        if self._text in ("parent", "top"):
            folders = name.split("/")[:-1]
            if not folders:
                return (), "no_label: the member lies in no folder"
            return folders[-1 if self._text == "parent" else 0], ""
        match = self._pattern.search(name)
        group = "label" if "label" in self._pattern.groupindex else 1
        label = match[group] if match else None
        return (label, "") if label else ((), f"no_label: {self._text!r} finds none in the name")


class TarMembers:
    """Images in tars, compressed or not.

    Args:
        uri: A tar, or several, as `find_files` takes them.
        options: label_rule.
    """

    kind = "tar"

    def __init__(self, uri: str, options: SourceOptions) -> None:
        self._uri = uri
        self._rule = LabelRule(options.label_rule)
        self._tars = TarFiles()

    def entries(self) -> Iterator[Entry]:
        """List all members.

        Raises:
            UserError: There is no such file.
            DataError: A tar is damaged.
        """
        for found, prefix in with_prefixes(find_files(self._uri, TAR_ENDINGS)):
            file = RandomFile(found.uri)
            block = block_of(file)
            unique = UniqueNames()
            for member in with_links(functools.partial(scan_file, file)):
                label, problem = self._rule.find(member.name)
                member = member._replace(problem=member.problem or problem)
                name = prefix + unique.name(member.name)
                yield member_entry(found, member, name, (label,), block)

    def columns(self) -> list[Column]:
        """Give the one label column."""
        return [self._rule.column()]

    def read(self, entry: Entry) -> bytes:
        """Read one member."""
        return self._tars.read(entry)


class ZipMembers:
    """Images in zips; stored or deflated, not encrypted.

    Args:
        uri: A zip, or several, as `find_files` takes them.
        options: label_rule.
    """

    kind = "zip"

    def __init__(self, uri: str, options: SourceOptions) -> None:
        self._uri = uri
        self._rule = LabelRule(options.label_rule)
        self._files = OpenFiles()

    def entries(self) -> Iterator[Entry]:
        """List all members; the directory of one zip is held in memory.

        Raises:
            UserError: There is no such file.
            DataError: It is damaged or no zip.
        """
        for found, prefix in with_prefixes(find_files(self._uri, (".zip",))):
            unique = UniqueNames()
            for info in _directory(found):
                name = clean_name(info.filename)
                if info.is_dir() or not name or is_litter(name):
                    continue
                label, problem = self._rule.find(name)
                place = _ZipPlace(
                    found.uri, found.num_bytes, info.header_offset, info.compress_type,
                    info.compress_size, info.CRC,
                )  # fmt: skip
                yield Entry(
                    prefix + unique.name(name),
                    info.file_size,
                    (label,),
                    _zip_problem(info) or problem,
                    place.text(),
                )

    def columns(self) -> list[Column]:
        """Give the one label column."""
        return [self._rule.column()]

    def read(self, entry: Entry) -> bytes:
        """Read and unpack one member.

        Raises:
            DataError: The zip has changed since it was listed.
            BadInputError: The member is damaged.
        """
        place = _ZipPlace.parse(entry.where)
        packed = self._packed(place, entry)
        data = packed
        if place.method == zipfile.ZIP_DEFLATED:
            try:
                # One byte more than announced shows a member that unpacks to more.
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, entry.num_bytes + 1)
            except zlib.error as error:
                raise BadInputError(f"corrupt: zip member: {error}") from error
        if len(data) != entry.num_bytes:
            more = "or more " if len(data) > entry.num_bytes else ""
            raise BadInputError(
                f"corrupt: zip member of {len(data)} {more}bytes, announced are {entry.num_bytes}"
            )
        if (crc := zlib.crc32(data)) != place.crc:
            raise BadInputError(
                f"corrupt: zip member with crc32 {crc:08x}, announced is {place.crc:08x}"
            )
        return data

    def _packed(self, place: "_ZipPlace", entry: Entry) -> bytes:
        file = self._files.get(place.uri, place.file_bytes)
        size = _LOCAL_HEADER.size
        data = file.read(place.offset, size + _SLACK_BYTES + place.packed_bytes)
        fields = _LOCAL_HEADER.unpack(data[:size]) if len(data) >= size else (b"",) * 11
        if fields[0] != b"PK\3\4" or fields[3] != place.method:
            raise DataError(
                f"{printable(place.uri)!r}: offset {place.offset}: member "
                f"{printable(entry.name)!r} of the zip's directory is not there; the file is "
                "damaged or was changed: get it again"
            )
        start = size + fields[9] + fields[10]
        if start > size + _SLACK_BYTES:
            packed = file.read(place.offset + start, place.packed_bytes)
        else:
            packed = data[start : start + place.packed_bytes]
        if len(packed) < place.packed_bytes:
            raise DataError(
                f"{printable(place.uri)!r}: offset {place.offset}: the file ends inside member "
                f"{printable(entry.name)!r}; get it again"
            )
        return packed


class _ZipPlace(NamedTuple):
    """Where a member of a zip lies, as it is kept in `Entry.where`."""

    uri: str
    file_bytes: int
    # of the local header
    offset: int
    method: int
    packed_bytes: int
    crc: int

    def text(self) -> str:
        return "\0".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> "_ZipPlace":
        uri, *numbers = text.split("\0")
        return cls(uri, *map(int, numbers))


def _directory(found: FoundFile) -> Iterator[zipfile.ZipInfo]:
    try:
        with RandomFile(found.uri).open() as file, zipfile.ZipFile(file) as archive:
            yield from archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, struct.error) as error:
        raise DataError(
            f"{printable(found.uri)!r}: no zip, or a damaged one: {error}; get it again"
        ) from error


def _zip_problem(info: zipfile.ZipInfo) -> str:
    mode = info.external_attr >> 16
    if stat.S_ISLNK(mode):
        return "unsupported: symbolic link"
    if stat.S_IFMT(mode) and not stat.S_ISREG(mode):
        return "unreadable: not a regular file"
    if info.flag_bits & 1:
        return "unsupported: encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return f"unsupported: zip compression method {info.compress_type}"
    return too_large(max(info.file_size, info.compress_size))
