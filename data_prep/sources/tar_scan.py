"""Members of tars, found header by header, and their bytes, read from where they lie.

A tar is walked through once, without unpacking: only headers are looked at, and the contents that
are asked for. Nothing is ever left out in silence, as usual readers do with a damaged tar: damage
is an error that names the place. Compressed tars (gzip, bzip2, xz) are read from start to end.
"""

import bz2
import gzip
import lzma
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple, Protocol

from data_prep.sources.build import printable
from data_prep.sources.files import RandomFile, is_litter, is_remote
from vitscale.config.errors import DataError, UserError

TAR_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
BLOCK_BYTES = 512
# Read at a time while headers are looked for. Ours: a request to a store costs as much as megabytes
# from it, so that contents are read along unless they are larger than this.
LOCAL_AHEAD_BYTES, REMOTE_AHEAD_BYTES = 32 << 10, 8 << 20
# Of names and other attributes that stand in members of their own.
MAX_EXTENSION_BYTES = 1 << 20
CHUNK_BYTES = 1 << 20
_OPENERS: dict[bytes, Callable[[BinaryIO], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
}
_ZSTD = b"\x28\xb5\x2f\xfd"
_UNPACK_ERRORS = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


class TarMember(NamedTuple):
    """One member that is no folder."""

    # without "./", "../" and a leading slash; may hold lone surrogates
    name: str
    # of the content, from the start of the unpacked tar
    offset: int
    num_bytes: int
    # crc32 of the header block in front of the content
    header_crc: int
    # why there is no content to be read, "WORD: detail"; else empty
    problem: str
    # name of the member whose content this one shares; else empty
    link: str
    # what was asked for
    content: bytes | None


class Forward(Protocol):
    """A tar that is read forward."""

    uri: str

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Read a part that does not begin before the last one; shorter at the end."""

    def holds(self, end: int) -> bool:
        """Tell whether the file reaches to this place; what lies before is given up."""


def want_nothing(name: str, num_bytes: int) -> bool:
    """Ask for no contents."""
    return False


class Window:
    """A plain tar, or one inside another file, read with some bytes ahead.

    Args:
        file: The file.
        start: Where in it the tar begins; offsets count from the start of the file all the same.
        end: Where it ends; None is the end of the file.
    """

    def __init__(self, file: RandomFile, start: int = 0, end: int | None = None) -> None:
        self.uri = file.uri
        self._file = file
        self._end = file.num_bytes if end is None else end
        self._ahead = REMOTE_AHEAD_BYTES if is_remote(file.uri) else LOCAL_AHEAD_BYTES
        self._data, self._offset = b"", start

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Read a part; shorter at the end."""
        at = offset - self._offset
        if at < 0 or at + num_bytes > len(self._data):
            wanted = min(max(num_bytes, self._ahead), self._end - offset)
            self._data = self._file.read(offset, wanted) if wanted > 0 else b""
            self._offset, at = offset, 0
        return self._data[at : at + num_bytes]

    def holds(self, end: int) -> bool:
        """Tell whether the file reaches to this place."""
        return end <= self._end


class Stream:
    """A compressed tar, unpacked on the way."""

    def __init__(self, file: RandomFile, unpack: Callable[[BinaryIO], Any]) -> None:
        self.uri = file.uri
        self._stream = unpack(file.open())
        self._position = 0

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Read a part; shorter at the end."""
        if not self.holds(offset):
            return b""
        return self._take(num_bytes)

    def holds(self, end: int) -> bool:
        """Tell whether the file reaches to this place."""
        while self._position < end and self._take(min(CHUNK_BYTES, end - self._position)):
            pass
        return self._position == end

    def _take(self, num_bytes: int) -> bytes:
        try:
            data: bytes = self._stream.read(num_bytes)
        except _UNPACK_ERRORS as error:
            raise DataError(
                f"{printable(self.uri)!r}: cannot be unpacked behind byte {self._position} of the "
                f"tar: {error}; get the file again"
            ) from error
        self._position += len(data)
        return data


def unpacker(file: RandomFile) -> Callable[[BinaryIO], Any] | None:
    """Say how a tar is unpacked; None where it is not compressed.

    Raises:
        UserError: It is compressed in a way that is not known here.
    """
    if file.magic.startswith(_ZSTD):
        raise UserError(
            f"{printable(file.uri)!r} is compressed with zstd; unpack it first: zstd -d FILE"
        )
    found = (opener for magic, opener in _OPENERS.items() if file.magic.startswith(magic))
    return next(found, None)


def forward(file: RandomFile) -> Forward:
    """Open a tar for a scan."""
    unpack = unpacker(file)
    return Window(file) if unpack is None else Stream(file, unpack)


def scan_tar(
    data: Forward,
    start: int = 0,
    wanted: Callable[[str, int], bool] = want_nothing,
) -> Iterator[TarMember]:
    """Give the members of a tar that are not folders or litter, in the order of the tar.

    Args:
        data: The tar.
        start: Where in the file it begins.
        wanted: Says by name and size in bytes whether a member's content is to be read along.

    Raises:
        DataError: The tar is damaged or cut.
    """
    walk = _Walk(data, start)
    while (header := walk.next_header()) is not None:
        info, block = header
        name = clean_name(info.name)
        litter = is_litter(name)
        is_file = info.type in tarfile.REGULAR_TYPES
        num_bytes = info.size if is_file else 0
        offset, content = walk.position, None
        if is_file and not litter and wanted(name, num_bytes):
            content = data.read(offset, num_bytes)
        walk.skip(info)
        if litter or not name or info.type in _NO_MEMBERS:
            continue
        link = clean_name(info.linkname) if info.type == tarfile.LNKTYPE else ""
        yield TarMember(name, offset, num_bytes, zlib.crc32(block), _problem(info), link, content)


def scan_file(file: RandomFile) -> Iterator[TarMember]:
    """Give the members of a tar that is a file, compressed or not; see `scan_tar`."""
    return scan_tar(forward(file))


def clean_name(name: str) -> str:
    """Take "./", "../" and empty parts out of a member's name."""
    if name.startswith((".", "/")) or "/." in name or "//" in name or name.endswith("/"):
        return "/".join(part for part in name.split("/") if part not in ("", ".", ".."))
    return name


# Folders, volume labels, lists of a folder's files: no inputs.
_NO_MEMBERS = (tarfile.DIRTYPE, b"V", b"D")
_NOT_REGULAR = (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)


def _problem(info: tarfile.TarInfo) -> str:
    if info.type == tarfile.SYMTYPE:
        return "unsupported: symbolic link"
    if info.type == tarfile.GNUTYPE_SPARSE or any("GNU.sparse" in key for key in info.pax_headers):
        return "unsupported: sparse file in a tar"
    if info.type in _NOT_REGULAR:
        return "unreadable: not a regular file"
    if info.type not in (*tarfile.REGULAR_TYPES, tarfile.LNKTYPE):
        return f"unsupported: tar member of type {info.type.decode('latin-1')!r}"
    return ""


def _plain_header(block: bytes) -> tarfile.TarInfo | None:
    """Read the header of a regular file as tarfile does, in a third of its time.

    Gives None for every other header, and one that is not in the usual form.
    """
    if block[156] != ord("0") or block[148:155].strip(b"\0 ") != b"%06o" % (
        sum(block) - sum(block[148:156]) + 8 * ord(" ")
    ):
        return None
    size = block[124:136].strip(b"\0 ")
    if not size.isdigit() or max(size) > ord("7"):
        return None
    name = block[:100].partition(b"\0")[0]
    if prefix := block[345:500].partition(b"\0")[0]:
        name = prefix + b"/" + name
    info = tarfile.TarInfo(name.decode("utf-8", "surrogateescape"))
    info.type, info.size = tarfile.REGTYPE, int(size, 8)
    return info


class _Walk:
    """The way through a tar from header to header."""

    def __init__(self, data: Forward, start: int) -> None:
        self._data, self._start = data, start
        # of what comes next
        self.position = start
        self._num_members = 0
        # attributes of all members that follow
        self._global: dict[str, str] = {}

    def next_header(self) -> tuple[tarfile.TarInfo, bytes] | None:
        """Give the next member and its header block; None at the end.

        Longer names and the like, which stand in members of their own in front of it, are put in.
        """
        own: dict[str, str] = {}
        while (block := self._next_block()) is not None:
            info = self._parse(block)
            self.position += BLOCK_BYTES
            if info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
                field = "path" if info.type == tarfile.GNUTYPE_LONGNAME else "linkpath"
                text = self._extension(info).partition(b"\0")[0]
                own[field] = text.decode("utf-8", "surrogateescape")
            elif info.type == tarfile.XGLTYPE:
                self._global |= self._records(info)
            elif info.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
                own |= self._records(info)
            else:
                self._complete(info, block, self._global | own)
                self._num_members += 1
                return info, block
        if own:
            raise self._damage("the tar ends behind the long name of a member")
        return None

    def skip(self, info: tarfile.TarInfo) -> None:
        """Go behind a member's content."""
        if info.type not in tarfile.REGULAR_TYPES and info.type in tarfile.SUPPORTED_TYPES:
            return
        end = self.position + info.size
        if not self._data.holds(end):
            self._num_members -= 1
            name = printable(info.name)
            raise self._damage(f"the file ends inside member {name!r} of {info.size} bytes")
        self.position = end + -info.size % BLOCK_BYTES

    def _next_block(self) -> bytes | None:
        num_empty = 0
        while block := self._data.read(self.position, BLOCK_BYTES):
            if block.count(0) < len(block):
                if len(block) < BLOCK_BYTES:
                    raise self._damage("the file ends inside a header")
                if num_empty:
                    # A second tar behind the first; or zeros in place of a header, with the rest of
                    # the tar behind them.
                    self._parse(block)
                    self._warn("more members follow behind an end of the tar; they are read too")
                return block
            self.position += len(block)
            num_empty += 1
        if self.position == self._start:
            raise self._damage("the file is empty")
        if not num_empty:
            self._warn(
                f"the tar has no end mark; its {self._num_members} members are whole, but if the "
                "file was cut just here, more are missing"
            )
        return None

    def _parse(self, block: bytes) -> tarfile.TarInfo:
        if (plain := _plain_header(block)) is not None:
            return plain
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            what = "no tar, or a damaged header" if not self._num_members else "damaged header"
            raise self._damage(f"{what} ({error})") from error
        if info.size < 0:
            raise self._damage(f"damaged header (size {info.size})")
        return info

    def _extension(self, info: tarfile.TarInfo) -> bytes:
        data = b""
        if info.size <= MAX_EXTENSION_BYTES:
            data = self._data.read(self.position, info.size)
        if len(data) < info.size:
            raise self._damage(f"{info.size} bytes of attributes of a member are not there")
        self.position += info.size + -info.size % BLOCK_BYTES
        return data

    def _records(self, info: tarfile.TarInfo) -> dict[str, str]:
        """Read PAX records, each `LENGTH KEY=VALUE` and a line end."""
        data = self._extension(info).rstrip(b"\0")
        records: dict[str, str] = {}
        at = 0
        while at < len(data):
            length, _, _ = data[at : at + 20].partition(b" ")
            end = at + int(length) if length.isdigit() else 0
            key, mark, value = data[at + len(length) + 1 : end - 1].partition(b"=")
            if not at < end <= len(data) or not mark or data[end - 1 : end] != b"\n":
                raise self._damage("damaged PAX attributes of a member")
            records[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
            at = end
        return records

    def _complete(self, info: tarfile.TarInfo, block: bytes, records: dict[str, str]) -> None:
        if records:
            info.pax_headers = records
            info.name = records.get("path", info.name)
            info.linkname = records.get("linkpath", info.linkname)
            size = records.get("size", "")
            if size.isdigit():
                info.size = int(size)
        if info.type == tarfile.GNUTYPE_SPARSE:
            # More maps of holes may follow the header.
            is_extended = block[482]
            while is_extended:
                more = self._data.read(self.position, BLOCK_BYTES)
                self.position += BLOCK_BYTES
                is_extended = len(more) == BLOCK_BYTES and more[504]

    def _damage(self, text: str) -> DataError:
        return DataError(
            f"{printable(self._data.uri)!r}: offset {self.position}: {text}; the "
            f"{self._num_members} members before it are whole. Get the file again"
        )

    def _warn(self, text: str) -> None:
        where = f"{printable(self._data.uri)!r}: offset {self.position}"
        print(f"warning: {where}: {text}", file=sys.stderr, flush=True)
