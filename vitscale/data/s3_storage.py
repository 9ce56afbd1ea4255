"""Objects below a prefix of an S3-compatible bucket.

The store checks every byte that it takes against an MD5 sum sent along, large objects are sent in
parts and appear when all are there. Requests that fail on the way, or because the store is busy,
are repeated for minutes; expired credentials are read anew. The only condition that is relied on is
PUT If-None-Match: compatible stores differ in all others, in checksums and in ETags.
"""

import base64
import functools
import hashlib
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from vitscale.data.file_storage import StorageError, open_temp_in, sweep_temps_in
from vitscale.data.hedge import Hedge
from vitscale.data.parts import Part, cut, run_parts
from vitscale.data.patience import PATIENCE_S, warn
from vitscale.data.s3_client import TIMEOUT_S, S3Client, code_of

PART_BYTES = 16 << 20
MAX_PARTS = 9_000  # stores take 10,000
PART_THREADS = 4
READ_BYTES = 8 << 20
READ_THREADS = 4
ABORT_PATIENCE_S = 15.0


class S3Storage:
    """A prefix in a bucket of Amazon S3 or a compatible store.

    Args:
        uri: The text the user gave, for messages.
        bucket: Name of the bucket, which must exist.
        prefix: Key prefix without slashes at its ends; may be empty.
        part_bytes: Larger files are sent in parts of this size; at least 5 MiB.
        patience_s: How long a request is repeated after it first failed on the way, s.
        timeout_s: Silence of the store after which a request has failed, s.
        page_names: Names a request of a listing; at most 1000.
    """

    def __init__(
        self,
        uri: str,
        bucket: str,
        prefix: str,
        part_bytes: int = PART_BYTES,
        patience_s: float = PATIENCE_S,
        timeout_s: float = TIMEOUT_S,
        page_names: int = 1000,
    ) -> None:
        self.uri = uri.rstrip("/")
        self.bucket = bucket
        self.prefix = prefix + "/" if prefix else ""
        self.part_bytes, self.page_names = part_bytes, page_names
        self._client = S3Client(self.uri, patience_s, timeout_s)
        # Parts of large objects take longer than whole small ones.
        self._small, self._parts = Hedge(), Hedge()

    def _place(self, name: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.prefix + name}

    def read_bytes(self, name: str) -> bytes:
        """Read a whole object."""

        def body(client: Any) -> bytes:
            return self._small.read(lambda: client.get_object(**self._place(name))["Body"])

        return self._client.call("read", name, body)

    def read_range(self, name: str, offset: int, num_bytes: int) -> bytes:
        """Read part of an object."""
        if num_bytes <= 0:
            return b""
        return self._read_range(name, offset, num_bytes, self._small)

    def _read_range(
        self,
        name: str,
        offset: int,
        num_bytes: int,
        hedge: Hedge,
        stop: threading.Event | None = None,
    ) -> bytes:
        def body(client: Any) -> bytes:
            try:
                return hedge.read(lambda: self._open_range(client, name, offset, num_bytes), stop)
            except Exception as error:
                if code_of(error) == "InvalidRange":  # behind the end: nothing, as for a file
                    return b""
                raise

        return self._client.call("read", name, body, stop=stop)

    def _open_range(self, client: Any, name: str, offset: int, num_bytes: int) -> Any:
        answer = client.get_object(
            **self._place(name), Range=f"bytes={offset}-{offset + num_bytes - 1}"
        )
        found = answer.get("ContentRange", "")
        if not found.startswith(f"bytes {offset}-") and answer["ContentLength"]:
            answer["Body"].close()
            raise StorageError(
                f"cannot read {self.uri}/{name}: bytes from {offset} were asked for and the store "
                f"sent {found or 'the whole object'}; its gateway must pass Range headers on"
            )
        return answer["Body"]

    def size(self, name: str) -> int | None:
        """Give the size in bytes, or None."""

        def body(client: Any) -> int:
            return int(client.head_object(**self._place(name))["ContentLength"])

        try:
            return self._client.call("look at", name, body)
        except FileNotFoundError:
            return None

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Give name -> size of the objects whose name starts with `prefix`."""
        rows = (row for page in self._pages(prefix) for row in page.get("Contents", []))
        return dict(sorted((row["Key"][len(self.prefix) :], int(row["Size"])) for row in rows))

    def _pages(self, prefix: str) -> Iterator[dict[str, Any]]:
        # Each page is a request of its own: a listing of millions fails somewhere.
        where = {
            "Bucket": self.bucket,
            "Prefix": self.prefix + prefix,
            "MaxKeys": self.page_names,
        }
        while True:
            page = self._client.call("list", prefix, functools.partial(_list_page, where))
            yield page
            if not page.get("IsTruncated"):
                return
            where["ContinuationToken"] = page["NextContinuationToken"]

    def list(self, prefix: str = "") -> list[str]:
        """Give the sorted names that start with `prefix`."""
        return list(self.sizes(prefix))

    def put(self, name: str, data: bytes) -> None:
        """Write an object; the store makes it visible when it is whole."""

        def body(client: Any) -> None:
            client.put_object(**self._place(name), Body=data, ContentMD5=_md5(data))

        self._client.call("write", name, body)

    def put_file(self, name: str, path: str | os.PathLike[str]) -> None:
        """Upload a local file, in parts when it is large, and remove it."""
        num_bytes = os.path.getsize(path)
        if num_bytes <= self.part_bytes:
            self.put(name, Path(path).read_bytes())
        else:
            self._put_in_parts(name, path, num_bytes)
        found = self.size(name)
        if found != num_bytes:
            raise StorageError(
                f"{self.uri}/{name} has {found} bytes after {num_bytes} were written; "
                "something else writes to the same place"
            )
        os.unlink(path)

    def _put_in_parts(self, name: str, path: str | os.PathLike[str], num_bytes: int) -> None:
        place = self._place(name)
        upload = self._client.call(
            "write", name, lambda client: client.create_multipart_upload(**place)
        )
        place["UploadId"] = upload["UploadId"]

        def send(part: Part, stop: threading.Event) -> dict[str, Any]:
            with open(path, "rb") as file:
                data = os.pread(file.fileno(), part.num_bytes, part.offset)
            what = {**place, "PartNumber": part.number + 1, "ContentMD5": _md5(data)}
            answer = self._client.call(
                "write", name, lambda client: client.upload_part(**what, Body=data), stop=stop
            )
            return {"PartNumber": part.number + 1, "ETag": answer["ETag"]}

        try:
            parts = cut(num_bytes, max(self.part_bytes, -(-num_bytes // MAX_PARTS)))
            self._complete(name, path, place, run_parts(parts, send, PART_THREADS))
        except BaseException:
            self._abort(name, place)
            raise

    def _complete(
        self,
        name: str,
        path: str | os.PathLike[str],
        place: dict[str, str],
        parts: Sequence[dict[str, Any]],
    ) -> None:
        def body(client: Any) -> None:
            try:
                client.complete_multipart_upload(**place, MultipartUpload={"Parts": parts})
            except Exception as error:
                # After an answer that was lost, the upload is gone and the object there.
                if code_of(error) != "NoSuchUpload" or not self._holds(name, path):
                    raise

        self._client.call("write", name, body)

    def _holds(self, name: str, path: str | os.PathLike[str]) -> bool:
        """Compare an object with a file, byte by byte: an old object may have the same size."""
        num_bytes = os.path.getsize(path)
        if self.size(name) != num_bytes:
            return False
        with open(path, "rb") as file:
            return all(
                self.read_range(name, part.offset, part.num_bytes) == file.read(part.num_bytes)
                for part in cut(num_bytes, self.part_bytes)
            )

    def _abort(self, name: str, place: dict[str, str]) -> None:
        cancel = functools.partial(_cancel, place)
        try:
            self._client.call("cancel the upload of", name, cancel, patience_s=ABORT_PATIENCE_S)
        except Exception as error:  # the failure that led here is the one to report
            warn(f"{error}; it stays until the next run")

    def create_once(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one; False: there is one, with whatever content.

        When the answer of the store was lost and the object has the same bytes, that is True: it
        is as if this call had won.
        """
        doubtful = False

        def body(client: Any) -> bool:
            nonlocal doubtful
            try:
                client.put_object(
                    **self._place(name), Body=data, ContentMD5=_md5(data), IfNoneMatch="*"
                )
            except Exception as error:
                if code_of(error) not in ("PreconditionFailed", "412"):
                    doubtful = True
                    raise
                return False
            return True

        if self._client.call("write", name, body):
            return True
        # An attempt whose answer was lost may have written it: then it is ours.
        try:
            return doubtful and self.read_bytes(name) == data
        except FileNotFoundError:  # somebody else's, and removed by now
            return False

    def delete(self, name: str) -> None:
        """Remove an object; a missing one is fine."""
        try:
            self._client.call(
                "delete", name, lambda client: client.delete_object(**self._place(name))
            )
        except FileNotFoundError:
            return

    def local_path(self, name: str) -> Path | None:
        """Give None: an object in a bucket cannot be opened in place."""
        return None

    def download(
        self,
        name: str,
        path: str | os.PathLike[str],
        first_byte: int = 0,
        end_byte: int | None = None,
    ) -> None:
        """Copy an object to a local file, several ranges at a time; a range that fails is repeated.

        The file is there when all of it is.
        """
        found = self.size(name) if end_byte is None else end_byte
        if found is None:
            raise FileNotFoundError(f"{self.uri}/{name} does not exist")
        begun = Path(f"{os.fspath(path)}.part")

        def fetch(part: Part, stop: threading.Event) -> int:
            offset = first_byte + part.offset
            data = self._read_range(name, offset, part.num_bytes, self._parts, stop)
            _write_at(file.fileno(), data, offset)
            return len(data)

        try:
            with open(begun, "wb") as file:
                file.truncate(found)
                parts = cut(found - first_byte, READ_BYTES)
                sizes = run_parts(parts, fetch, READ_THREADS)
                if sum(sizes) < found - first_byte:
                    if end_byte is None:
                        raise StorageError(f"{self.uri}/{name} was replaced while it was read")
                    file.truncate(first_byte + _unbroken(parts, sizes))
            os.replace(begun, path)
        finally:
            begun.unlink(missing_ok=True)

    def open_temp(self) -> BinaryIO:
        """Open a new temporary file in the system's folder for them."""
        return open_temp_in(Path(tempfile.gettempdir()))

    def sweep_temps(self) -> int:
        """Remove temporary files of dead processes."""
        return sweep_temps_in(Path(tempfile.gettempdir()))

    def abort_uploads(self) -> int:
        """Cancel unfinished multipart uploads: they cost money and no listing shows them."""

        def body(client: Any) -> list[dict[str, str]]:
            pages = client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.bucket, Prefix=self.prefix
            )
            return [upload for page in pages for upload in page.get("Uploads", [])]

        uploads = self._client.call("list uploads of", "", body)
        for upload in uploads:
            place = {"Bucket": self.bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
            name = upload["Key"][len(self.prefix) :]
            self._client.call("cancel the upload of", name, functools.partial(_cancel, place))
        return len(uploads)


def _list_page(where: dict[str, Any], client: Any) -> dict[str, Any]:
    page: dict[str, Any] = client.list_objects_v2(**where)
    return page


def _cancel(place: dict[str, str], client: Any) -> None:
    try:
        client.abort_multipart_upload(**place)
    except Exception as error:
        if code_of(error) != "NoSuchUpload":  # an earlier attempt did it
            raise


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _unbroken(parts: Sequence[Part], sizes: Sequence[int]) -> int:
    """Count the bytes up to the first part that came short."""
    for part, size in zip(parts, sizes, strict=True):
        if size < part.num_bytes:
            return part.offset + size
    return sum(sizes)


def _md5(data: bytes) -> str:
    digest = hashlib.md5(data, usedforsecurity=False).digest()
    return base64.b64encode(digest).decode()
