"""Files that sources are made of, in folders or in an S3-compatible store, read at any place."""

import errno
import functools
import glob
import io
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, BinaryIO, NamedTuple

from data_prep.sources.build import printable
from vitscale.config.errors import DataError, UserError
from vitscale.data.storage import Storage, open_storage

# What desktops leave behind; names that start with a dot are ignored too.
IGNORED_NAMES = frozenset({"Thumbs.db", "desktop.ini", "__MACOSX"})
PATTERN = re.compile(r"[*?\[]")
MAGIC_BYTES = 8
OPEN_FILES = 64
STORES = 16
# Of `RandomFile.open`: a request to a store costs as much as a megabyte from it.
LOCAL_BUFFER_BYTES, REMOTE_BUFFER_BYTES = 1 << 16, 1 << 20


class FoundFile(NamedTuple):
    """A file that exists."""

    uri: str
    num_bytes: int


def expand_uris(uri: str, endings: tuple[str, ...]) -> list[str]:
    """Give the files that a URI stands for, in the order of the bytes of their names.

    Args:
        uri: A file; a folder, for all files below it with these endings; a pattern with `*`, `**`,
            `?` or `[..]`; or a list such as `train-{000000..000146}.tar`. Local or s3://.
        endings: In lower case, such as ".tar"; names are compared without regard to case. They
            matter for folders only: what is named is taken whatever its name.

    Raises:
        UserError: There is no such file.
    """
    return [file.uri for file in find_files(uri, endings)]


def find_files(uri: str, endings: tuple[str, ...]) -> list[FoundFile]:
    """Do what `expand_uris` does, and give the sizes in bytes too."""
    found: dict[str, FoundFile] = {}
    for one in _without_braces(uri):
        find = _find_remote if is_remote(one) else _find_local
        files = list(find(one, endings))
        if not files:
            wanted = (
                "" if PATTERN.search(one) else f", or a folder with {' or '.join(endings)} in it"
            )
            part = "" if one == uri else f" (of {printable(uri)!r})"
            raise UserError(
                f"{printable(one)!r}{part}: no such file{wanted}; give a file, a folder, a pattern "
                "in quotes, or a list such as 'train-{000000..000146}.tar'"
            )
        found.update((file.uri, file) for file in files)
    return sorted(found.values(), key=lambda file: os.fsencode(file.uri))


def with_prefixes(files: list[FoundFile]) -> Iterator[tuple[FoundFile, str]]:
    """Give containers, each with what makes the names of its members unique.

    That is its name, without the folders that all have in common, and nothing for a single one.
    """
    folders = [file.uri.split("/")[:-1] for file in files]
    common = 0
    for parts in zip(*folders, strict=False):
        if len(set(parts)) > 1:
            break
        common += 1
    for file in files:
        name = "/".join(file.uri.split("/")[common:])
        yield file, f"{name}/" if len(files) > 1 else ""


def is_litter(name: str) -> bool:
    """Tell whether a relative name with slashes is hidden or left behind by a desktop."""
    return any(part.startswith(".") or part in IGNORED_NAMES for part in name.split("/"))


def is_remote(uri: str) -> bool:
    """Tell whether a URI names an object in a store."""
    return "://" in uri


@functools.lru_cache(maxsize=STORES)
def _store(folder: str) -> Storage:
    """Open the store of a folder once: a client of a store takes long to be made."""
    return open_storage(folder)


class RandomFile:
    """A file that several threads may read at any place; small, and can be pickled.

    Args:
        uri: A path, or s3://bucket/key.
    """

    def __init__(self, uri: str) -> None:
        # the first is used; two threads may both have opened the file
        self._descriptors: list[int] = []
        self.uri = uri
        self._num_bytes: int | None = None
        folder, _, self._name = uri.rpartition("/")
        self._storage: Storage | None = _store(folder) if is_remote(uri) else None

    def __reduce__(self) -> tuple[Any, ...]:
        return RandomFile, (self.uri,)

    def __del__(self) -> None:
        # Not before the last thread that reads has let go: a number closed earlier could already
        # stand for another file.
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _opened(self) -> int:
        if not self._descriptors:
            self._descriptors.append(os.open(self.uri, os.O_RDONLY | os.O_CLOEXEC))
        return self._descriptors[0]

    @property
    def num_bytes(self) -> int:
        """Size when it was first asked for.

        Raises:
            UserError: There is no such file, or it must not be read.
        """
        if self._num_bytes is None:
            if self._storage is None:
                try:
                    self._num_bytes = os.fstat(self._opened()).st_size
                except (FileNotFoundError, NotADirectoryError):
                    raise UserError(f"{printable(self.uri)!r}: no such file") from None
                except PermissionError as error:
                    raise UserError(f"{printable(self.uri)!r}: {error.strerror}") from error
            else:
                self._num_bytes = self._storage.size(self._name)
                if self._num_bytes is None:
                    raise UserError(f"{printable(self.uri)!r}: no such object")
        return self._num_bytes

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Read a part; shorter than asked when the file ends early.

        Raises:
            DataError: The file is gone.
            OSError, StorageError: It cannot be reached.
        """
        try:
            if self._storage is not None:
                return self._storage.read_range(self._name, offset, num_bytes)
            descriptor = self._opened()
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(
                f"{printable(self.uri)!r} was listed but is gone; put it back and run the same "
                "command again"
            ) from None
        data = os.pread(descriptor, num_bytes, offset)
        if len(data) == num_bytes or not data:
            return data
        parts = [data]
        done = len(data)
        # One call gives at most 2 GiB, and less when a signal comes.
        while done < num_bytes and (data := os.pread(descriptor, num_bytes - done, offset + done)):
            parts.append(data)
            done += len(data)
        return b"".join(parts)

    @functools.cached_property
    def magic(self) -> bytes:
        """First bytes, which tell what it is; errors as of `num_bytes`."""
        return self.read(0, min(self.num_bytes, MAGIC_BYTES))

    def check_size(self, num_bytes: int) -> None:
        """Make sure that the file still is the one that was listed.

        Raises:
            DataError: It is gone or has another size.
        """
        try:
            found = self.num_bytes
        except UserError as error:
            raise DataError(f"{error}; it was there when it was listed") from None
        if found != num_bytes:
            raise DataError(
                f"{printable(self.uri)!r} has {found} bytes, it had {num_bytes} when it was "
                "listed; do not change inputs while they are packed"
            )

    def open(self) -> BinaryIO:
        """Give a buffered file with a position of its own; for one thread."""
        size = REMOTE_BUFFER_BYTES if self._storage is not None else LOCAL_BUFFER_BYTES
        return io.BufferedReader(_Positioned(self), size)


class OpenFiles:
    """The files that a process has open, the latest used ones; for several threads."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, RandomFile] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenFiles, ()

    def get(self, uri: str, num_bytes: int) -> RandomFile:
        """Give a file, opened at first use.

        Args:
            uri: The file.
            num_bytes: Its size when it was listed.

        Raises:
            DataError: It is gone or has another size.
        """
        with self._lock:
            file = self._files.get(uri) or RandomFile(uri)
            file.check_size(num_bytes)
            self._files[uri] = file
            self._files.move_to_end(uri)
            # A thread that still reads keeps the file that it has.
            if len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)
        return file


class _Positioned(io.RawIOBase):
    """A `RandomFile` with a position."""

    def __init__(self, file: RandomFile) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: None}[whence]
        position = (self._file.num_bytes if base is None else base) + offset
        if position < 0:
            raise OSError(errno.EINVAL, f"position {position} lies before the start of the file")
        self._position = position
        return position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def _without_braces(uri: str) -> list[str]:
    if "{" not in uri or (not is_remote(uri) and os.path.exists(uri)):
        return [uri]
    from braceexpand import braceexpand

    try:
        return list(braceexpand(uri))
    except ValueError as error:
        raise UserError(f"{printable(uri)!r}: braces do not match: {error}") from error


def _find_local(uri: str, endings: tuple[str, ...]) -> Iterator[FoundFile]:
    if os.path.isdir(uri):
        yield from _below(uri, endings)
    elif os.path.exists(uri):
        yield FoundFile(uri, os.stat(uri).st_size)
    elif match := PATTERN.search(uri):
        fixed = uri.rfind("/", 0, match.start()) + 1
        for path in glob.iglob(uri, recursive=True):
            if os.path.isfile(path) and not is_litter(path[fixed:]):
                yield FoundFile(path, os.stat(path).st_size)


def _below(folder: str, endings: tuple[str, ...]) -> Iterator[FoundFile]:
    """Give the files below a folder, links followed, each folder once."""

    def fail(error: OSError) -> None:
        raise UserError(f"cannot list {printable(folder)!r}: {error}") from error

    seen: set[tuple[int, int]] = set()
    for parent, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not is_litter(name))
        for name in files:
            path = os.path.join(parent, name)
            if name.lower().endswith(endings) and not is_litter(name) and os.path.isfile(path):
                yield FoundFile(path, os.stat(path).st_size)


def _find_remote(uri: str, endings: tuple[str, ...]) -> Iterator[FoundFile]:
    folder, _, name = uri.rpartition("/")
    if name and not folder.endswith(":/"):
        num_bytes = _store(folder).size(name)
        if num_bytes is not None:
            yield FoundFile(uri, num_bytes)
            return
    match = PATTERN.search(uri)
    if match:
        root = uri[: match.start()].rpartition("/")[0]
        pattern = uri[len(root) + 1 :].split("/")
        prefix = uri[len(root) + 1 : match.start()]
        for name, num_bytes in _store(root).sizes(prefix).items():
            if _fits(name.split("/"), pattern) and not is_litter(name):
                yield FoundFile(f"{root}/{name}", num_bytes)
        return
    root = uri.rstrip("/")
    for name, num_bytes in _store(root).sizes().items():
        if name.lower().endswith(endings) and not is_litter(name):
            yield FoundFile(f"{root}/{name}", num_bytes)


def _fits(names: list[str], patterns: list[str]) -> bool:
    """Tell whether the parts of a name match those of a pattern, as `glob` understands it."""
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_fits(names[skipped:], patterns[1:]) for skipped in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], patterns[0]) and _fits(names[1:], patterns[1:])
