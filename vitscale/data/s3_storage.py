"""Objects below a prefix of an S3-compatible bucket.

The store checks every byte that it takes against an MD5 sum sent along, large objects are sent in
parts and appear when all are there. Requests that fail on the way, or because the store is busy,
are repeated for minutes; expired credentials are read anew. The only condition that is relied on is
PUT If-None-Match: compatible stores differ in all others, in checksums and in ETags.

Endpoint, region, credentials and certificates are the SDK's own affair: AWS_ENDPOINT_URL_S3,
AWS_PROFILE, AWS_CA_BUNDLE, the shared files, instance roles.
"""

import base64
import functools
import hashlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from vitscale.data.file_storage import StorageError, open_temp_in, sweep_temps_in

PART_BYTES = 16 << 20
MAX_PARTS = 9_000  # stores take 10,000
PART_THREADS = 4
# How long a request is repeated; how long before the user is told.
PATIENCE_S = 180.0
QUIET_S = 5.0
LONGEST_PAUSE_S = 15.0
RENEWALS = 3

# What passes: the store is busy or broke off, or bytes were damaged on their way to it.
_PASSING = {
    "InternalError", "InternalFailure", "SlowDown", "ServiceUnavailable", "RequestTimeout",
    "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded", "BadDigest",
    "XAmzContentSHA256Mismatch", "IncompleteBody", "OperationAborted",
    # Two writers at the same instant: the store lets neither win.
    "ConditionalRequestConflict",
}  # fmt: skip
_EXPIRED = {
    "ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired",
    "InvalidToken", "InvalidAccessKeyId",
    # The answer to HEAD has no text that would tell these from other refusals.
    "400", "403",
}  # fmt: skip
_MISSING = {"404", "NoSuchKey", "NotFound"}

Result = TypeVar("Result")


class S3Storage:
    """A prefix in a bucket of Amazon S3 or a compatible store.

    Args:
        uri: The text the user gave, for messages.
        bucket: Name of the bucket, which must exist.
        prefix: Key prefix without slashes at its ends; may be empty.
        part_bytes: Larger files are sent in parts of this size; at least 5 MiB.
        patience_s: How long a request that fails on the way is repeated.
    """

    def __init__(
        self,
        uri: str,
        bucket: str,
        prefix: str,
        part_bytes: int = PART_BYTES,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.uri = uri.rstrip("/")
        self.bucket = bucket
        self.prefix = prefix + "/" if prefix else ""
        self.part_bytes, self.patience_s = part_bytes, patience_s
        self._client: Any = None
        self._client_pid = -1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None, "_client_pid": -1}

    def _s3(self) -> Any:
        # A client holds sockets, which two processes cannot share: one a process, made at first
        # use.
        if self._client is None or self._client_pid != os.getpid():
            self._client = _make_client()
            self._client_pid = os.getpid()
        return self._client

    def _call(self, name: str, action: str, body: Callable[[Any], Result]) -> Result:
        """Run one request; repeat what passes, translate what the store refused."""
        where = f"{self.uri}/{name}"
        patience = _Patience(f"cannot {action} {where}", self.patience_s)
        renewals = 0
        while True:
            try:
                return body(self._s3())
            except Exception as error:
                kind, text = _judge(error)
                if kind == "missing":
                    raise FileNotFoundError(f"{where} does not exist") from None
                if kind == "ours":
                    raise
                if kind == "expired" and renewals < RENEWALS:
                    renewals += 1
                    self._client = None  # the next one reads the credentials anew
                    patience.wait(text, error)
                elif kind == "passing":
                    patience.wait(text, error)
                else:
                    hint = (
                        "; if the credentials have expired, renew them where the SDK finds them"
                        if kind == "expired"
                        else ""
                    )
                    raise StorageError(f"cannot {action} {where}: {text}{hint}") from error

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
            if "InvalidRange" in str(error):  # behind the end: nothing there, as for a file
                return b""
            raise

    def _get(self, name: str, extra: dict[str, str]) -> bytes:
        def body(client: Any) -> bytes:
            answer = client.get_object(Bucket=self.bucket, Key=self.prefix + name, **extra)
            data: bytes = answer["Body"].read()  # raises when it is shorter than announced
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
        self._put_object(name, data, {})

    def _put_object(self, name: str, data: bytes, extra: dict[str, str]) -> None:
        self._call(
            name,
            "write",
            lambda client: client.put_object(
                Bucket=self.bucket,
                Key=self.prefix + name,
                Body=data,
                ContentMD5=_md5(data),
                **extra,
            ),
        )

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
        place = {"Bucket": self.bucket, "Key": self.prefix + name}
        upload = self._call(name, "write", lambda client: client.create_multipart_upload(**place))
        place["UploadId"] = upload["UploadId"]
        part_bytes = max(self.part_bytes, -(-num_bytes // MAX_PARTS))

        def send(number: int) -> dict[str, Any]:
            with open(path, "rb") as file:
                data = os.pread(file.fileno(), part_bytes, (number - 1) * part_bytes)
            answer = self._call(
                name,
                "write",
                lambda client: client.upload_part(
                    **place, PartNumber=number, Body=data, ContentMD5=_md5(data)
                ),
            )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            with ThreadPoolExecutor(PART_THREADS) as threads:
                parts = list(threads.map(send, range(1, -(-num_bytes // part_bytes) + 1)))
            self._complete(name, place, parts, num_bytes)
        except BaseException:
            self._abort(place)
            raise

    def _complete(
        self, name: str, place: dict[str, str], parts: Sequence[dict[str, Any]], num_bytes: int
    ) -> None:
        try:
            self._call(
                name,
                "write",
                lambda client: client.complete_multipart_upload(
                    **place, MultipartUpload={"Parts": parts}
                ),
            )
        except StorageError as error:
            # An answer that was lost: the repetition finds no upload any more, but the object.
            if "NoSuchUpload" not in str(error) or self.size(name) != num_bytes:
                raise

    def _abort(self, place: dict[str, str]) -> None:
        try:
            self._s3().abort_multipart_upload(**place)
        except Exception as error:  # the failure that led here is the one to report
            _warn(f"an unfinished upload of {self.uri} stays until the next run: {error}")

    def create_once(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one; False: there is one, with whatever content."""
        doubtful = False

        def body(client: Any) -> bool:
            nonlocal doubtful
            try:
                client.put_object(
                    Bucket=self.bucket,
                    Key=self.prefix + name,
                    Body=data,
                    ContentMD5=_md5(data),
                    IfNoneMatch="*",
                )
            except Exception as error:
                code = _code_of(error)
                if code not in ("PreconditionFailed", "412"):
                    doubtful = True
                    raise
                return False
            return True

        won = self._call(name, "write", body)
        # An attempt whose answer was lost may have written it: then it is ours.
        return won or (doubtful and self.read_bytes(name) == data)

    def delete(self, name: str) -> None:
        """Remove an object; a missing one is fine."""
        try:
            self._call(
                name,
                "delete",
                lambda client: client.delete_object(Bucket=self.bucket, Key=self.prefix + name),
            )
        except FileNotFoundError:
            return

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


class _Patience:
    """Waits between attempts, longer and longer, and gives up in the end."""

    def __init__(self, what: str, seconds: float) -> None:
        self._what, self._seconds = what, seconds
        self._start = time.monotonic()
        self._attempts = 0
        self._told = False

    def wait(self, text: str, error: Exception) -> None:
        """Pause before the next attempt.

        Raises:
            StorageError: There were enough.
        """
        self._attempts += 1
        spent = time.monotonic() - self._start
        if spent > self._seconds:
            raise StorageError(
                f"{self._what} in {self._attempts} tries over {spent:.0f} s: {text}"
            ) from error
        if spent > QUIET_S and not self._told:
            self._told = True
            _warn(f"{self._what}, trying for {self._seconds:.0f} s: {text}")
        time.sleep(min(0.1 * 2**self._attempts, LONGEST_PAUSE_S) * random.uniform(0.5, 1.0))


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def _md5(data: bytes) -> str:
    digest = hashlib.md5(data, usedforsecurity=False).digest()
    return base64.b64encode(digest).decode()


def _code_of(error: Exception) -> str:
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _judge(error: Exception) -> tuple[str, str]:
    """Say what kind of failure it is: missing, passing, expired, refused, or ours; and a text."""
    from boto3.exceptions import RetriesExceededError, S3UploadFailedError
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        HTTPClientError,
        IncompleteReadError,
        ResponseStreamingError,
    )
    from urllib3.exceptions import HTTPError

    if isinstance(error, ClientError):
        code = _code_of(error)
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if code in _MISSING:
            return "missing", code
        if code in _EXPIRED:
            return "expired", f"{code}: {error}"
        if code in _PASSING or status >= 500 or status in (408, 429):
            return "passing", f"{code}: {error}"
        return "refused", f"{code}: {error}"
    broken = (HTTPClientError, IncompleteReadError, ResponseStreamingError, HTTPError)
    if isinstance(error, (*broken, RetriesExceededError, ConnectionError, TimeoutError)):
        return "passing", f"{type(error).__name__}: {error}"
    if isinstance(error, BotoCoreError | S3UploadFailedError):
        return "refused", str(error)
    return "ours", ""


def _make_client() -> Any:
    import boto3
    from botocore.config import Config

    settings = {
        # Repetition is ours: it covers bodies that break off, and looks at the clock.
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "connect_timeout": 10,
        "read_timeout": 60,
        "max_pool_connections": 32,
        # boto3 1.36 and later add checksums that several compatible stores refuse; ours are sent as
        # MD5 and are in the manifest.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    make = functools.partial(boto3.session.Session().client, "s3")
    client = make(config=Config(**settings))
    if "amazonaws.com" in client.meta.endpoint_url:
        return client
    # Compatible stores seldom have a host name for every bucket.
    return make(config=Config(**settings, s3={"addressing_style": "path"}))
