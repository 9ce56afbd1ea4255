"""Requests to an S3-compatible store: repeated when they fail on the way, renewed when they expire.

Endpoint, region, credentials and certificates are the SDK's own affair: AWS_ENDPOINT_URL_S3,
AWS_PROFILE, AWS_CA_BUNDLE (the file with a private authority's certificate), the shared files,
instance roles.
"""

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from vitscale.config.errors import UserError
from vitscale.data import activity
from vitscale.data.file_storage import StorageError
from vitscale.data.patience import PATIENCE_S, Patience

TIMEOUT_S = 60.0
RENEWALS = 4

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
    # A pair of which one half was rotated while it was read.
    "SignatureDoesNotMatch",
    # The answer to HEAD has no text that would tell these from other refusals.
    "400", "403",
}  # fmt: skip
_MISSING = {"404", "NoSuchKey", "NotFound"}
_RENEW = (
    "; if the credentials have expired, renew them where the SDK finds them (AWS_* variables, "
    "shared credentials file, AWS_PROFILE, instance role) and run again"
)

Result = TypeVar("Result")


class S3Client:
    """Runs requests for one prefix; may be shared by threads, copied to processes and pickled.

    Args:
        uri: The prefix as the user gave it, for messages.
        patience_s: How long a request is repeated after it first failed on the way, s.
        timeout_s: Silence of the store after which a request has failed, s.
    """

    def __init__(
        self, uri: str, patience_s: float = PATIENCE_S, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._uri, self._patience_s, self._timeout_s = uri, patience_s, timeout_s
        # Process id and the SDK's client: one value, because threads set and read it without a
        # lock.
        self._held: tuple[int, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}

    def sdk(self) -> Any:
        """Give the SDK's client: one a process, because it holds sockets; made at first use."""
        held = self._held
        if held is None or held[0] != os.getpid():
            held = self._held = (os.getpid(), _make_sdk_client(self._timeout_s))
        return held[1]

    def call(
        self,
        action: str,
        name: str,
        body: Callable[[Any], Result],
        *,
        stop: threading.Event | None = None,
        patience_s: float | None = None,
    ) -> Result:
        """Run a request until it succeeds or the store refuses it.

        Args:
            action: What it does, a verb for messages.
            name: The object.
            body: Sends it with the SDK's client; runs again after each failure that passes.
            stop: Set when the result is no longer wanted.
            patience_s: At most this long instead of what the constructor said.

        Returns:
            What `body` returns.

        Raises:
            FileNotFoundError: There is no such object.
            StorageError: The store refused, or failed for too long.
        """
        where = f"{self._uri}/{name}"
        longest_s = min(self._patience_s, patience_s or self._patience_s)
        patience = Patience(f"cannot {action} {where}", longest_s, stop)
        renewals = 0
        while True:
            try:
                activity.count("requests")
                return body(self.sdk())
            except Exception as error:
                kind, text = _judge(error)
                if kind == "missing":
                    raise FileNotFoundError(f"{where} does not exist") from None
                if kind == "ours":
                    raise
                if kind == "expired" and renewals < RENEWALS:
                    renewals += 1
                    self._held = None  # the next one reads the credentials anew
                elif kind != "passing":
                    hint = _RENEW if kind == "expired" else ""
                    raise StorageError(f"cannot {action} {where}: {text}{hint}") from error
                patience.wait(text, error)


def code_of(error: Exception) -> str:
    """Give the store's word for a failure, such as NoSuchUpload; empty when it said nothing."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _judge(error: Exception) -> tuple[str, str]:
    """Say what kind of failure it is: missing, passing, expired, refused, or ours; and a text."""
    from botocore import exceptions as sdk
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    if isinstance(error, sdk.ClientError):
        code = code_of(error)
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if code in _MISSING:
            return "missing", code
        if code in _EXPIRED:
            return "expired", f"{code}: {error}"
        if code in _PASSING or status >= 500 or status in (408, 429):
            return "passing", f"{code}: {error}"
        return "refused", f"{code}: {error}"
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, sdk.SSLError) and "CERTIFICATE_VERIFY_FAILED" in text:
        return "refused", f"{error}; name the authority's certificate file in AWS_CA_BUNDLE"
    # The SDK's ConnectionError (refused, no such host, no route, timeout) is not Python's.
    broken = (sdk.HTTPClientError, sdk.ConnectionError, sdk.IncompleteReadError)
    if isinstance(error, (*broken, ResponseParserError, HTTPError, ConnectionError, TimeoutError)):
        return "passing", text
    unread = (sdk.NoCredentialsError, sdk.PartialCredentialsError, sdk.CredentialRetrievalError)
    if isinstance(error, (*unread, sdk.TokenRetrievalError, sdk.SSOError)):
        return "expired", text
    return ("refused", str(error)) if isinstance(error, sdk.BotoCoreError) else ("ours", "")


def _make_sdk_client(timeout_s: float) -> Any:
    import boto3
    from botocore.config import Config
    from botocore.session import get_session

    settings = {
        # Repetition is ours: it covers bodies that break off, and looks at the clock.
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "connect_timeout": min(10.0, timeout_s),
        "read_timeout": timeout_s,
        # As many downloads at a time as a node has, with the ranges of each, keep theirs.
        "max_pool_connections": 64,
        # SDKs of 2025 and later add checksums that several compatible stores refuse; ours are sent
        # as MD5 and are in the manifest.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    session = get_session()  # reads credentials and configuration anew
    session.register_component("data_loader", _descriptions())
    make = functools.partial(boto3.session.Session(botocore_session=session).client, "s3")
    try:
        client = make(config=Config(**settings))
    except ValueError as error:
        raise UserError(
            f"the S3 endpoint is wrong: {error}; AWS_ENDPOINT_URL_S3 takes https://HOST[:PORT]"
        ) from error
    if "amazonaws.com" in client.meta.endpoint_url:
        return client
    # Compatible stores seldom have a host name for every bucket.
    return make(config=Config(**settings, s3={"addressing_style": "path"}))


@functools.cache
def _descriptions() -> Any:
    # The SDK's description of the protocol takes 0.1 s of work to read and is always the same.
    from botocore.loaders import create_loader

    return create_loader()
