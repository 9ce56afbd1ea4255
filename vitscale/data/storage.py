"""Named objects under one prefix, in a folder or in an S3-compatible store.

Everything that is published goes through here: an object appears whole or not at all, and
`create_once` lets one of several racers win. Nothing above this file knows which kind of store it
talks to.
"""

import os
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import unquote

from vitscale.config.errors import UserError
from vitscale.data.file_storage import FileStorage, StorageError
from vitscale.data.s3_storage import S3Storage

__all__ = ["FileStorage", "Readable", "S3Storage", "Storage", "StorageError", "open_storage"]


class Readable(Protocol):
    """Something that whole objects of a dataset can be read from: a store, or a view of one."""

    uri: str

    def read_bytes(self, name: str) -> bytes:
        """Read a whole object."""


class Storage(Protocol):
    """A prefix with objects in it; names are relative to the prefix, with forward slashes."""

    uri: str

    def read_bytes(self, name: str) -> bytes:
        """Read a whole object."""

    def read_range(self, name: str, offset: int, num_bytes: int) -> bytes:
        """Read part of an object; shorter than asked when the object ends early."""

    def size(self, name: str) -> int | None:
        """Give the size in bytes, or None when there is no such object."""

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Give name -> size in bytes of all objects whose name starts with `prefix`."""

    def list(self, prefix: str = "") -> list[str]:
        """Give the sorted names that start with `prefix`."""

    def put(self, name: str, data: bytes) -> None:
        """Write an object atomically, replacing an old one."""

    def put_file(self, name: str, path: str | os.PathLike[str]) -> None:
        """Publish a local file atomically; the local file is gone afterwards."""

    def create_once(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one; False: there is one, with whatever content."""

    def delete(self, name: str) -> None:
        """Remove an object; a missing one is fine."""

    def local_path(self, name: str) -> Path | None:
        """Give the path of an object that can be opened in place, or None."""

    def download(
        self,
        name: str,
        path: str | os.PathLike[str],
        first_byte: int = 0,
        end_byte: int | None = None,
    ) -> None:
        """Copy an object, or a stretch of its bytes, to a local file.

        The bytes lie where they lie in the object: before a stretch the file has a hole. With
        `end_byte`, which is known from a manifest, nobody asks for the object's size; the file is
        shorter where the object is.
        """

    def open_temp(self) -> BinaryIO:
        """Open a new file in the place from which `put_file` is cheapest; its path is `.name`."""

    def sweep_temps(self) -> int:
        """Remove temporary files that no live process holds; give their count."""

    def abort_uploads(self) -> int:
        """Cancel unfinished uploads below the prefix, when nothing is being written; count them."""


def open_storage(uri: str | os.PathLike[str]) -> Storage:
    """Open the store behind a URI.

    Args:
        uri: A plain path, `file:///path`, or `s3://bucket/prefix`. The S3 endpoint and credentials
            are the SDK's own affair (AWS_ENDPOINT_URL_S3, AWS_PROFILE, AWS_CA_BUNDLE, ...).

    Raises:
        UserError: The URI is empty or of another kind.
    """
    text = os.fspath(uri)
    scheme, mark, rest = text.partition("://")
    if not text:
        raise UserError("an empty URI was given; use a path, file:///path or s3://bucket/prefix")
    if not mark:
        return FileStorage(text, Path(text).expanduser())
    if scheme == "file":
        host, slash, path = rest.partition("/")
        if host not in ("", "localhost") or not path:
            raise UserError(f"{text!r} names no local file; write file:///absolute/path")
        return FileStorage(text, Path(slash + unquote(path, errors="surrogateescape")))
    if scheme == "s3":
        bucket, _, prefix = rest.partition("/")
        if not bucket:
            raise UserError(f"{text!r} names no bucket; write s3://bucket/prefix")
        return S3Storage(text, bucket, prefix.strip("/"))
    raise UserError(
        f"{text!r}: scheme {scheme!r} is not known; use a path, file:///path or s3://bucket/prefix"
    )
