"""A folder with one sub-folder a class, the layout of torchvision's ImageFolder.

Every regular file below a class folder is an input, at any depth and whatever its name: what it is,
its content says. Left out without a ledger row: names that start with a dot (with their whole
folder), what desktops leave behind (IGNORED_NAMES), and files that lie beside the class folders,
which have no label.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from data_prep.sources.build import Listing, printable
from vitscale.config.errors import DataError, UserError

IGNORED_NAMES = frozenset({"Thumbs.db", "desktop.ini", "__MACOSX"})


@dataclass
class ImageFolder:
    """Images in class folders.

    Args:
        root: The folder that holds the class folders.
    """

    root: str
    kind: str = field(default="imagefolder", init=False)

    def listing(self) -> Listing:
        """List all inputs, in the order of the bytes of their names.

        Raises:
            UserError: No folder, no classes, no files, or class names that differ in case alone.
        """
        root = os.fsencode(self.root)
        try:
            entries = sorted(os.scandir(root), key=lambda entry: entry.name)
        except OSError as error:
            raise UserError(f"imagefolder: cannot list {self.root!r}: {error.strerror}") from error
        folders = [entry for entry in entries if not _ignored(entry.name) and entry.is_dir()]
        if not folders:
            raise UserError(
                f"imagefolder: {printable(self.root)!r} has no sub-folders; it needs one for each "
                "class, "
                "with the images of the class in it"
            )
        classes = [os.fsdecode(entry.name) for entry in folders]
        _refuse_case_twins(classes)
        listing = Listing(classes=[printable(name) for name in classes])
        for label, entry in enumerate(folders):
            seen = frozenset({_identity(os.stat(root)), _identity(entry.stat())})
            rows = sorted(_walk(root, entry.name, seen), key=lambda row: row[0])
            for name, num_bytes, problem in rows:
                listing.add(os.fsdecode(name), num_bytes, label, problem)
        if not listing.names:
            raise UserError(
                f"imagefolder: {printable(self.root)!r} has {len(classes)} class folders and no "
                "files in them"
            )
        return listing

    def read(self, name: str, num_bytes: int) -> bytes:
        """Read one input.

        Raises:
            DataError: It is gone, or another size than when it was listed: the plan no longer
                holds.
            OSError: It cannot be read.
        """
        path = os.path.join(self.root, name)
        try:
            with open(path, "rb", buffering=0) as file:
                data = file.readall()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DataError(
                f"input {printable(path)!r} was listed but is gone ({error.strerror}); "
                "put it back and run the same command again"
            ) from error
        if len(data) != num_bytes:
            raise DataError(
                f"input {printable(path)!r} has {len(data)} bytes, it had {num_bytes} when it was "
                "listed; "
                "do not change inputs while they are packed"
            )
        return data


def _ignored(name: bytes) -> bool:
    return name.startswith(b".") or os.fsdecode(name) in IGNORED_NAMES


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _refuse_case_twins(classes: list[str]) -> None:
    folded: dict[str, str] = {}
    for name in classes:
        twin = folded.setdefault(name.casefold(), name)
        if twin != name:
            raise UserError(
                f"imagefolder: class folders {printable(twin)!r} and {printable(name)!r} differ "
                "in case alone; "
                "rename or merge one: on many file systems they would be the same class"
            )


def _walk(
    root: bytes, folder: bytes, parents: frozenset[tuple[int, int]]
) -> Iterator[tuple[bytes, int, str]]:
    """Give (relative name, size in bytes, problem) of the files below a folder, links followed."""
    with os.scandir(os.path.join(root, folder)) as entries:
        for entry in entries:
            if _ignored(entry.name):
                continue
            name = os.path.join(folder, entry.name)
            try:
                status = entry.stat()
            except OSError as error:
                yield name, 0, f"unreadable: {error.strerror} (dangling or looping link)"
                continue
            if not stat.S_ISDIR(status.st_mode):
                problem = "" if stat.S_ISREG(status.st_mode) else "unreadable: not a regular file"
                yield name, status.st_size if not problem else 0, problem
            elif _identity(status) in parents:
                yield name, 0, "loop: the link leads back to a folder above it"
            else:
                yield from _walk(root, name, parents | {_identity(status)})
