"""Named objects under one prefix, in a folder or in an S3-compatible store.

Everything that is published goes through here: an object appears whole or not at all, and
`create_once` lets one of several racers win. Retries and clients live here too; nothing above this
file knows which kind of store it talks to.
"""

import functools
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar
from urllib.parse import unquote

from vitscale.config.errors import UserError
from vitscale.data.file_storage import FileStorage, StorageError, open_temp_in, sweep_temps_in

__all__ = ["FileStorage", "S3Storage", "Storage", "StorageError", "open_storage"]

MULTIPART_BYTES = 64 << 20
# Own tries around what the SDK does not repeat: a body that breaks off while it is read.
BODY_ATTEMPTS = 6

Result = TypeVar("Result")


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
        """Write an object unless there is one already; False says somebody else was first."""

    def delete(self, name: str) -> None:
        """Remove an object; a missing one is fine."""

    def local_path(self, name: str) -> Path | None:
        """Give the path of an object that can be opened in place, or None."""

    def download(self, name: str, path: str | os.PathLike[str]) -> None:
        """Copy an object to a local file."""

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
            are the SDK's own affair (AWS_ENDPOINT_URL, AWS_PROFILE, ...).

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


class S3Storage:
    """A prefix in a bucket of Amazon S3 or a compatible store.

    Args:
        uri: The text the user gave, for messages.
        bucket: Name of the bucket, which must exist.
        prefix: Key prefix without slashes at its ends; may be empty.
    """

    def __init__(self, uri: str, bucket: str, prefix: str) -> None:
        self.uri = uri.rstrip("/")
        self.bucket = bucket
        self.prefix = prefix + "/" if prefix else ""
        self._client: Any = None
        self._client_pid = -1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None, "_client_pid": -1}

    def _s3(self) -> Any:
        # A client holds sockets, which two processes cannot share: one a process, made at first
        # use.
        if self._client_pid != os.getpid():
            self._client = _make_client()
            self._client_pid = os.getpid()
        return self._client

    def _call(self, name: str, action: str, body: Callable[[Any], Result]) -> Result:
        """Run one request; repeat what broke off on the way, translate what the store refused."""
        from boto3.exceptions import S3UploadFailedError
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            IncompleteReadError,
            ReadTimeoutError,
            ResponseStreamingError,
        )
        from urllib3.exceptions import HTTPError

        where = f"{self.uri}/{name}"
        for attempt in range(BODY_ATTEMPTS):
            try:
                return body(self._s3())
            except ClientError as error:
                code = str(error.response.get("Error", {}).get("Code", ""))
                if code in ("404", "NoSuchKey", "NotFound"):
                    raise FileNotFoundError(f"{where} does not exist") from None
                raise StorageError(f"cannot {action} {where}: {code}: {error}") from error
            except (
                IncompleteReadError,
                ReadTimeoutError,
                ResponseStreamingError,
                HTTPError,
            ) as error:
                if attempt + 1 == BODY_ATTEMPTS:
                    text = f"cannot {action} {where} after {BODY_ATTEMPTS} tries: {error}"
                    raise StorageError(text) from error
                time.sleep(min(0.2 * 2**attempt, 5.0) * random.uniform(0.5, 1.5))
            except (BotoCoreError, S3UploadFailedError) as error:
                raise StorageError(f"cannot {action} {where}: {error}") from error
        raise AssertionError("not reached")

    def read_bytes(self, name: str) -> bytes:
        """Read a whole object."""
        return self._get(name, {})

    def read_range(self, name: str, offset: int, num_bytes: int) -> bytes:
        """Read part of an object."""
        if num_bytes <= 0:
            return b""
        try:
            return self._get(name, {"Range": f"bytes={offset}-{offset + num_bytes - 1}"})
        except StorageError as error:
            if "InvalidRange" in str(
                error
            ):  # the offset lies behind the end: nothing there, as for a file
                return b""
            raise

    def _get(self, name: str, extra: dict[str, str]) -> bytes:
        def body(client: Any) -> bytes:
            answer = client.get_object(Bucket=self.bucket, Key=self.prefix + name, **extra)
            data: bytes = answer["Body"].read()
            return data

        return self._call(name, "read", body)

    def size(self, name: str) -> int | None:
        """Give the size in bytes, or None."""

        def body(client: Any) -> int:
            return int(
                client.head_object(Bucket=self.bucket, Key=self.prefix + name)["ContentLength"]
            )

        try:
            return self._call(name, "look at", body)
        except FileNotFoundError:
            return None

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Give name -> size of the objects whose name starts with `prefix`."""

        def body(client: Any) -> dict[str, int]:
            pages = client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self.prefix + prefix
            )
            rows = (row for page in pages for row in page.get("Contents", []))
            return {row["Key"][len(self.prefix) :]: int(row["Size"]) for row in rows}

        return dict(sorted(self._call(prefix, "list", body).items()))

    def list(self, prefix: str = "") -> list[str]:
        """Give the sorted names that start with `prefix`."""
        return list(self.sizes(prefix))

    def put(self, name: str, data: bytes) -> None:
        """Write an object; the store makes it visible when it is whole."""
        self._call(
            name,
            "write",
            lambda client: client.put_object(Bucket=self.bucket, Key=self.prefix + name, Body=data),
        )

    def put_file(self, name: str, path: str | os.PathLike[str]) -> None:
        """Upload a local file, in parts when it is large, and remove it."""
        from boto3.s3.transfer import TransferConfig

        config = TransferConfig(
            multipart_threshold=MULTIPART_BYTES,
            multipart_chunksize=MULTIPART_BYTES // 4,
            max_concurrency=4,
        )
        self._call(
            name,
            "write",
            lambda client: client.upload_file(
                os.fspath(path), self.bucket, self.prefix + name, Config=config
            ),
        )
        os.unlink(path)

    def create_once(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one; False: there is (our own, if an answer was lost)."""
        for attempt in range(BODY_ATTEMPTS):
            try:
                self._call(
                    name,
                    "write",
                    lambda client: client.put_object(
                        Bucket=self.bucket, Key=self.prefix + name, Body=data, IfNoneMatch="*"
                    ),
                )
                return True
            except StorageError as error:
                text = str(error)
                if "PreconditionFailed" in text or ": 412:" in text:
                    return False
                # Two writers at the same instant: the store lets neither win and asks to try again.
                if "ConditionalRequestConflict" not in text or attempt + 1 == BODY_ATTEMPTS:
                    raise
                time.sleep(0.1 * random.uniform(0.5, 1.5))
        raise AssertionError("not reached")

    def delete(self, name: str) -> None:
        """Remove an object; a missing one is fine."""
        self._call(
            name,
            "delete",
            lambda client: client.delete_object(Bucket=self.bucket, Key=self.prefix + name),
        )

    def local_path(self, name: str) -> Path | None:
        """Give None: an object in a bucket cannot be opened in place."""
        return None

    def download(self, name: str, path: str | os.PathLike[str]) -> None:
        """Copy an object to a local file, several ranges at a time."""
        self._call(
            name,
            "read",
            lambda client: client.download_file(self.bucket, self.prefix + name, os.fspath(path)),
        )

    def open_temp(self) -> BinaryIO:
        """Open a new temporary file in the system's folder for them."""
        return open_temp_in(Path(tempfile.gettempdir()))

    def sweep_temps(self) -> int:
        """Remove temporary files of dead processes."""
        return sweep_temps_in(Path(tempfile.gettempdir()))

    def abort_uploads(self) -> int:
        """Cancel unfinished multipart uploads: they cost money and no listing shows them."""

        def body(client: Any) -> int:
            pages = client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.bucket, Prefix=self.prefix
            )
            uploads = [upload for page in pages for upload in page.get("Uploads", [])]
            for upload in uploads:
                client.abort_multipart_upload(
                    Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )
            return len(uploads)

        return self._call("", "list uploads of", body)


def _make_client() -> Any:
    import boto3
    from botocore.config import Config

    settings = {
        "retries": {"mode": "standard", "max_attempts": 8},
        "connect_timeout": 10,
        "read_timeout": 60,
        "max_pool_connections": 32,
        # boto3 1.36 and later add checksums that several compatible stores refuse; ours are in the
        # manifest.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    make = functools.partial(boto3.session.Session().client, "s3")
    client = make(config=Config(**settings))
    if "amazonaws.com" in client.meta.endpoint_url:
        return client
    # Compatible stores seldom have a host name for every bucket.
    return make(config=Config(**settings, s3={"addressing_style": "path"}))
