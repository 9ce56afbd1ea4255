"""A folder with one sub-folder a class, the layout of torchvision's ImageFolder.

Every regular file below a class folder is an input, at any depth and whatever its name: what it is,
its content says. Left out without a ledger row: names that start with a dot (with their whole
folder), what desktops leave behind (IGNORED_NAMES), and files that lie beside the class folders,
which have no label.
"""

import os
import stat
from collections.abc import Iterator

from data_prep.sources.build import Column, Entry, SourceOptions, printable
from data_prep.sources.files import IGNORED_NAMES
from data_prep.sources.local_files import read_listed
from data_prep.sources.lookups import look_up
from vitscale.config.errors import UserError

_IGNORED = frozenset(map(os.fsencode, IGNORED_NAMES))


class ImageFolder:
    """Images in class folders.

    Args:
        uri: The folder that holds the class folders.
        options: Nothing in them concerns this source.
    """

    kind = "imagefolder"

    def __init__(self, uri: str, options: SourceOptions) -> None:
        self._root = uri
        self._classes: tuple[str, ...] = ()

    def entries(self) -> Iterator[Entry]:
        """List all inputs, class by class; the entries of some classes are held together.

        Raises:
            UserError: No folder, no classes, no files, or a folder that cannot be listed.
        """
        root = os.fsencode(self._root)
        found = (entry for entry in _scan(root) if not _is_ignored(entry.name))
        folders = sorted((entry for entry in found if entry.is_dir()), key=lambda e: e.name)
        if not folders:
            raise UserError(
                f"imagefolder: {printable(self._root)!r} has no sub-folders; it needs one for each "
                "class, with the images of the class in it"
            )
        self._classes = tuple(os.fsdecode(entry.name) for entry in folders)
        above = _identity(os.stat(root))

        def walk(task: tuple[int, os.DirEntry[bytes]]) -> list[Entry]:
            label, folder = task
            parents = frozenset({above, _identity(folder.stat())})
            return list(_walk(root, folder.name, parents, (label,)))

        is_empty = True
        for entry in look_up(enumerate(folders), walk):
            is_empty = False
            yield entry
        if is_empty:
            raise UserError(
                f"imagefolder: {printable(self._root)!r} has {len(folders)} class folders and no "
                "files in them"
            )

    def columns(self) -> list[Column]:
        """Give the class folders, also empty ones, in the order of the bytes of their names."""
        return [Column("label", names=self._classes)]

    def read(self, entry: Entry) -> bytes:
        """Read one input."""
        return read_listed(os.path.join(self._root, entry.name), entry.num_bytes)


def _is_ignored(name: bytes) -> bool:
    return name.startswith(b".") or name in _IGNORED


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _scan(folder: bytes) -> list[os.DirEntry[bytes]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise UserError(
            f"imagefolder: cannot list {printable(os.fsdecode(folder))!r}: {error.strerror}"
        ) from error


def _walk(
    root: bytes, folder: bytes, parents: frozenset[tuple[int, int]], labels: tuple[int, ...]
) -> Iterator[Entry]:
    """Give the files below a folder, links followed; names are relative to the root."""
    for entry in _scan(os.path.join(root, folder)):
        if _is_ignored(entry.name):
            continue
        path = folder + b"/" + entry.name
        name = os.fsdecode(path)
        try:
            status = entry.stat()
        except OSError as error:
            problem = f"unreadable: {error.strerror} (dangling or looping link)"
            yield Entry(name, 0, labels, problem)
            continue
        if stat.S_ISREG(status.st_mode):
            yield Entry(name, status.st_size, labels)
        elif not stat.S_ISDIR(status.st_mode):
            yield Entry(name, 0, labels, "unreadable: not a regular file")
        elif _identity(status) in parents:
            yield Entry(name, 0, labels, "loop: the link leads back to a folder above it")
        else:
            yield from _walk(root, path, parents | {_identity(status)}, labels)
