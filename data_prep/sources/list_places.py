"""Where the inputs of a list are: local files, objects in a store, files behind http(s)."""

import os
import stat
from collections.abc import Iterable, Iterator
from itertools import islice
from urllib.parse import unquote

from data_prep.sources.build import Entry, printable
from data_prep.sources.http_files import HttpFiles
from data_prep.sources.local_files import check_size, read_listed
from data_prep.sources.lookups import look_up
from data_prep.verdict import BadInputError
from vitscale.config.errors import DataError
from vitscale.data.storage import Storage, open_storage

# Size of an entry that is still to be found.
UNKNOWN = -1
# Assumed where a server does not say; only the balance of the shards depends on it.
DEFAULT_NUM_BYTES = 100_000
# `Entry.where` of an input whose size is not known for sure.
ABOUT = "about"
# Inputs whose sizes are looked up one after the other.
CHUNK_ROWS = 64


class ListedPlaces:
    """Finds and reads inputs by the paths or addresses that a list gives.

    Args:
        root: What relative paths are relative to: a folder, or the start of an address.
    """

    def __init__(self, root: str) -> None:
        if root.startswith("file://"):
            root = unquote(root.removeprefix("file://"), errors="surrogateescape")
        self._root = root if "://" in root else os.path.expanduser(root)
        self._http = HttpFiles()
        self._storages: dict[str, Storage] = {}

    def read(self, entry: Entry) -> bytes:
        """Read one input; errors are those of `Source.read`."""
        place = self._place(entry.name)
        if "://" not in place:
            return read_listed(place, entry.num_bytes)
        if place.startswith("s3://"):
            storage, key = self._object(place)
            try:
                data = storage.read_bytes(key)
            except FileNotFoundError:
                raise DataError(
                    f"input {printable(place)!r} was listed but is gone; put it back and run the "
                    "same command again"
                ) from None
        else:
            data = self._http.read(place)
        if entry.where != ABOUT:
            check_size(printable(place), len(data), entry.num_bytes)
        return data

    def sized(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Look up sizes, in the order of the entries."""
        rows = iter(entries)
        chunks = iter(lambda: list(islice(rows, CHUNK_ROWS)), [])
        return look_up(chunks, self._with_sizes, "://" in self._root)

    def _with_sizes(self, entries: list[Entry]) -> list[Entry]:
        return [self._with_size(entry) for entry in entries]

    def _with_size(self, entry: Entry) -> Entry:
        if entry.problem:
            return entry._replace(num_bytes=0)
        place = self._place(entry.name)
        if "://" not in place:
            try:
                status = os.stat(place)
            except (FileNotFoundError, NotADirectoryError):
                return entry._replace(num_bytes=0, problem=f"missing_file: {printable(place)}")
            except (OSError, ValueError) as error:
                return entry._replace(num_bytes=0, problem=f"unreadable: {error}")
            if not stat.S_ISREG(status.st_mode):
                return entry._replace(num_bytes=0, problem="unreadable: not a regular file")
            return Entry(entry.name, status.st_size, entry.labels)
        if entry.num_bytes != UNKNOWN:
            return entry._replace(where=ABOUT)
        try:
            size = self._remote_size(place)
        except BadInputError as error:
            return entry._replace(num_bytes=0, problem=str(error))
        if size is None:
            return entry._replace(num_bytes=DEFAULT_NUM_BYTES, where=ABOUT)
        return entry._replace(num_bytes=size)

    def _remote_size(self, place: str) -> int | None:
        if not place.startswith("s3://"):
            return self._http.size(place)
        storage, key = self._object(place)
        size = storage.size(key)
        if size is None:
            raise BadInputError(f"missing_file: {printable(place)}")
        return size

    def _object(self, place: str) -> tuple[Storage, str]:
        bucket, _, key = place.removeprefix("s3://").partition("/")
        if bucket not in self._storages:
            self._storages[bucket] = open_storage(f"s3://{bucket}")
        return self._storages[bucket], key

    def _place(self, name: str) -> str:
        """Give the path or address of an input."""
        if "://" in name:
            scheme, _, rest = name.partition("://")
            if scheme == "file":
                return unquote(rest, errors="surrogateescape")
            if scheme in ("s3", "http", "https"):
                return name
        if "://" in self._root:
            return f"{self._root.rstrip('/')}/{name.removeprefix('./')}"
        return name if name[:1] == "/" else f"{self._root}/{name}"
