"""Objects in a folder, and temporary files that can be told from those of the dead.

A temporary file has a recognisable name and is locked while a process holds it open, so a sweep
removes what a killed run left and nothing that a live one is writing.
"""

import fcntl
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import BinaryIO

from vitscale.config.errors import VitscaleError

TEMP_PREFIX = ".vitscale-tmp-"
_TEMP_NAME = re.compile(r"^\.vitscale-tmp-[0-9a-f]{16}$")


class StorageError(VitscaleError):
    """The store did not answer, or refused; the message names the object and the answer."""


def is_temp_name(name: str) -> bool:
    """Tell whether a file name is one of our temporary ones."""
    return _TEMP_NAME.match(name) is not None


def open_temp_in(folder: Path) -> BinaryIO:
    """Create a temporary file that is locked as long as it is open.

    Args:
        folder: Where to put it; made when missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        path = folder / f"{TEMP_PREFIX}{secrets.token_hex(8)}"
        file = open(path, "xb")  # noqa: SIM115  the caller closes it
        fcntl.flock(file, fcntl.LOCK_EX)
        # A sweeper may have come between the two calls; then the name is gone and another one is
        # taken.
        try:
            if os.stat(path).st_ino == os.fstat(file.fileno()).st_ino:
                return file
        except FileNotFoundError:
            pass
        file.close()


def sweep_temps_in(folder: Path) -> int:
    """Remove the temporary files directly in `folder` that no process holds; give their count."""
    count = 0
    if not folder.is_dir():
        return 0
    for name in os.listdir(folder):
        if not is_temp_name(name):
            continue
        path = folder / name
        try:
            with open(path, "r+b") as file:  # NFS grants an exclusive lock to writers only
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
                count += 1
        except (BlockingIOError, FileNotFoundError, PermissionError):
            continue  # a live writer holds it, another sweeper was faster, or it is another user's
    return count


class FileStorage:
    """A folder as a store.

    Args:
        uri: The text the user gave, for messages.
        root: The folder; made by the first write.
    """

    def __init__(self, uri: str, root: Path) -> None:
        self.uri = uri.rstrip("/") or "/"
        self.root = root.absolute()

    def _missing(self, name: str) -> FileNotFoundError:
        return FileNotFoundError(f"{self.uri}/{name} does not exist")

    def _failed(self, name: str, action: str, error: OSError) -> StorageError:
        return StorageError(f"cannot {action} {self.uri}/{name}: {error.strerror or error}")

    def read_bytes(self, name: str) -> bytes:
        """Read a whole object."""
        try:
            return (self.root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise self._missing(name) from None
        except OSError as error:
            raise self._failed(name, "read", error) from error

    def read_range(self, name: str, offset: int, num_bytes: int) -> bytes:
        """Read part of an object."""
        try:
            with open(self.root / name, "rb", buffering=0) as file:
                file.seek(offset)
                parts = []
                while num_bytes > 0 and (part := file.read(num_bytes)):
                    parts.append(part)
                    num_bytes -= len(part)
                return parts[0] if len(parts) == 1 else b"".join(parts)
        except (FileNotFoundError, NotADirectoryError):
            raise self._missing(name) from None
        except OSError as error:
            raise self._failed(name, "read", error) from error

    def size(self, name: str) -> int | None:
        """Give the size in bytes, or None."""
        try:
            return (self.root / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._failed(name, "look at", error) from error

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Give name -> size of the objects whose name starts with `prefix`."""
        folder, _, _ = prefix.rpartition("/")
        found: dict[str, int] = {}

        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise self._failed(prefix, "list", error) from error

        for parent, _, files in os.walk(self.root / folder, onerror=fail):
            for file in files:
                path = Path(parent, file)
                name = path.relative_to(self.root).as_posix()
                if name.startswith(prefix) and not is_temp_name(file):
                    try:
                        found[name] = path.stat().st_size
                    except FileNotFoundError:
                        continue  # removed while the folder was read
        return dict(sorted(found.items()))

    def list(self, prefix: str = "") -> list[str]:
        """Give the sorted names that start with `prefix`."""
        return list(self.sizes(prefix))

    def put(self, name: str, data: bytes) -> None:
        """Write an object atomically."""
        self._write(name, data, once=False)

    def create_once(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one; False: there is."""
        return self._write(name, data, once=True)

    def _write(self, name: str, data: bytes, *, once: bool) -> bool:
        target = self.root / name
        temp: str | None = None
        try:
            with self.open_temp() as file:
                temp = file.name
                file.write(data)
                _sync(file)
                target.parent.mkdir(parents=True, exist_ok=True)
                if not once:
                    os.replace(temp, target)
                    temp = None
                    return True
                # link() fails when the name is taken; rename() would replace it.
                try:
                    os.link(temp, target)
                except FileExistsError:
                    return False
                return True
        except OSError as error:
            raise self._failed(name, "write", error) from error
        finally:
            if temp is not None:
                Path(temp).unlink(missing_ok=True)

    def put_file(self, name: str, path: str | os.PathLike[str]) -> None:
        """Move a local file here, atomically."""
        target = self.root / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if os.stat(path).st_dev == os.stat(target.parent).st_dev:
                with open(path, "rb") as file:
                    _sync(file)
                os.replace(path, target)
                return
            with self.open_temp() as copy:
                with open(path, "rb") as file:
                    shutil.copyfileobj(file, copy, 1 << 20)
                _sync(copy)
                os.replace(copy.name, target)
            os.unlink(path)
        except OSError as error:
            raise self._failed(name, "write", error) from error

    def delete(self, name: str) -> None:
        """Remove an object; a missing one is fine."""
        try:
            (self.root / name).unlink(missing_ok=True)
        except OSError as error:
            raise self._failed(name, "delete", error) from error

    def local_path(self, name: str) -> Path | None:
        """Give the path of the object."""
        return self.root / name

    def download(
        self,
        name: str,
        path: str | os.PathLike[str],
        first_byte: int = 0,
        end_byte: int | None = None,
    ) -> None:
        """Copy an object, or a stretch of it, to another file."""
        try:
            if end_byte is None and not first_byte:
                shutil.copyfile(self.root / name, path)
                return
            with open(self.root / name, "rb") as source, open(path, "wb") as target:
                source.seek(first_byte)
                target.seek(first_byte)
                target.write(source.read(-1 if end_byte is None else end_byte - first_byte))
        except (FileNotFoundError, NotADirectoryError):
            raise self._missing(name) from None
        except OSError as error:
            raise self._failed(name, "read", error) from error

    def open_temp(self) -> BinaryIO:
        """Open a new temporary file on the file system of the store."""
        try:
            return open_temp_in(self.root)
        except OSError as error:
            raise self._failed("", "write below", error) from error

    def sweep_temps(self) -> int:
        """Remove temporary files of dead processes."""
        return sweep_temps_in(self.root)

    def abort_uploads(self) -> int:
        """Do nothing: a folder has no unfinished uploads."""
        return 0


def _sync(file: BinaryIO) -> None:
    # Without it a power cut could keep the new name and lose the bytes behind it.
    file.flush()
    os.fsync(file.fileno())
