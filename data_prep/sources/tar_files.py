"""Reading members of tars by their place, and the names that they go by."""

import os
import tempfile
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import xxhash

from data_prep.sources.build import Entry, LabelValue, printable
from data_prep.sources.files import FoundFile, OpenFiles, RandomFile
from data_prep.sources.tar_scan import BLOCK_BYTES, CHUNK_BYTES, Stream, TarMember, unpacker
from vitscale.config.errors import DataError

# Of one member, read into memory.
MAX_MEMBER_BYTES = 1 << 30
# Unpacked tars that a process keeps; small ones in memory, larger ones in a temporary file.
KEPT_UNPACKED = 2
UNPACKED_MEMORY_BYTES = 256 << 20


class UniqueNames:
    """Makes names unique by a number at their end; holds a hash of each."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def name(self, name: str) -> str:
        """Give the name, or the name with `#2`, `#3`, ... where it was given before."""
        number, candidate = 1, name
        while (key := xxhash.xxh3_64_intdigest(os.fsencode(candidate))) in self._seen:
            number += 1
            candidate = f"{name}#{number}"
        self._seen.add(key)
        return candidate


def with_links(scan: Callable[[], Iterator[TarMember]]) -> Iterator[TarMember]:
    """Give the members of a tar, hard links as members with the content that they share.

    Args:
        scan: Begins a scan; a second one is made where there are hard links.
    """
    targets: set[str] = set()
    for member in scan():
        if member.link:
            targets.add(member.link)
        else:
            yield member
    if not targets:
        return
    latest: dict[str, TarMember] = {}
    for member in scan():
        own = member
        if member.link:
            problem = f"missing_file: hard link to {printable(member.link)!r}, not seen before it"
            own = latest.get(member.link, member._replace(problem=problem))
            own = own._replace(name=member.name)
            yield own
        if member.name in targets:
            latest[member.name] = own


class Place(NamedTuple):
    """Where a member's content lies, as it is kept in `Entry.where`."""

    uri: str
    # size of the file when it was listed
    file_bytes: int
    # of the content, from the start of the unpacked file
    offset: int
    header_crc: int

    def text(self) -> str:
        """Write it as text."""
        return "\0".join((self.uri, str(self.file_bytes), str(self.offset), str(self.header_crc)))

    @classmethod
    def parse(cls, text: str) -> "Place":
        """Read it from text."""
        uri, *numbers = text.split("\0")
        return cls(uri, *map(int, numbers))


def member_entry(
    file: FoundFile, member: TarMember, name: str, labels: tuple[LabelValue, ...], block: str
) -> Entry:
    """Make the entry of a member.

    Args:
        file: The file that holds the tar.
        member: The member.
        name: Of the entry.
        labels: Of the entry.
        block: `block_of` the file.
    """
    place = Place(file.uri, file.num_bytes, member.offset, member.header_crc)
    problem = member.problem or too_large(member.num_bytes)
    return Entry(name, member.num_bytes, labels, problem, place.text(), block)


def too_large(num_bytes: int) -> str:
    """Give the problem of a member that is too large to be read into memory, or nothing."""
    if num_bytes <= MAX_MEMBER_BYTES:
        return ""
    return f"too_large: {num_bytes} bytes, at most {MAX_MEMBER_BYTES} are read"


def block_of(file: RandomFile) -> str:
    """Give the `Entry.block` of a tar's members: those of a compressed one are read together."""
    return "" if unpacker(file) is None else file.uri


class TarFiles:
    """The tars that a process has open, for reading members by several threads.

    Args:
        memory_bytes: Compressed tars that unpack to more lie in a temporary file.
    """

    def __init__(self, memory_bytes: int = UNPACKED_MEMORY_BYTES) -> None:
        self._memory_bytes = memory_bytes
        self._files = OpenFiles()
        self._unpacked: OrderedDict[str, _Unpacked] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return TarFiles, (self._memory_bytes,)

    def read(self, entry: Entry) -> bytes:
        """Give the content of the member that an entry stands for.

        Raises:
            DataError: The tar has changed since it was listed.
        """
        place = Place.parse(entry.where)
        start = place.offset - BLOCK_BYTES
        data = self._file(place).read(start, BLOCK_BYTES + entry.num_bytes)
        header, content = data[:BLOCK_BYTES], data[BLOCK_BYTES:]
        if zlib.crc32(header) != place.header_crc or len(content) != entry.num_bytes:
            raise DataError(
                f"{printable(place.uri)!r}: offset {start}: the header of member "
                f"{printable(entry.name)!r} is not the one that was listed, or its "
                f"{entry.num_bytes} bytes are not there; do not change inputs while they are packed"
            )
        return content

    def _file(self, place: Place) -> "RandomFile | _Unpacked":
        file = self._files.get(place.uri, place.file_bytes)
        unpack = unpacker(file)
        if unpack is None:
            return file
        # Other threads wait here: they mostly want a member of the same tar.
        with self._lock:
            found = self._unpacked.get(place.uri)
            if found is None:
                while len(self._unpacked) >= KEPT_UNPACKED:
                    self._unpacked.popitem(last=False)
                found = _Unpacked(Stream(file, unpack), self._memory_bytes)
                self._unpacked[place.uri] = found
            self._unpacked.move_to_end(place.uri)
        return found


class _Unpacked:
    """A whole unpacked tar, in memory or, if it is large, in a temporary file."""

    def __init__(self, stream: Stream, memory_bytes: int) -> None:
        self._file: BinaryIO | None = None
        parts: list[bytes] = []
        done = 0
        while data := stream.read(done, CHUNK_BYTES):
            parts.append(data)
            done += len(data)
            if done > memory_bytes and self._file is None:
                # Without a name, so that none is left behind.
                self._file = tempfile.TemporaryFile()  # noqa: SIM115
            if self._file is not None:
                self._file.writelines(parts)
                parts.clear()
        self._data = b"".join(parts)
        if self._file is not None:
            self._file.flush()

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Read a part; shorter at the end."""
        if self._file is None:
            return self._data[offset : offset + num_bytes]
        return os.pread(self._file.fileno(), num_bytes, offset)

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()
