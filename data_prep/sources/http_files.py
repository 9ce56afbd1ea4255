"""Images behind http:// and https:// addresses.

An answer counts when it is whole: a body that is shorter than announced is fetched again. What
passes (a time-out, a broken connection, 429 and 5xx) is tried again; an address that the server
says is not there fails that one input; a server that stays away ends the run, since an outage is no
verdict on an image.
"""

import os
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from data_prep.verdict import BadInputError
from vitscale.data.storage import StorageError

ATTEMPTS = 6
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 20.0
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 60.0
MAX_REDIRECTS = 5
# More than any image that can be packed; an endless answer must not fill the memory.
MAX_BODY_BYTES = 1 << 30
CHUNK_BYTES = 1 << 20
# Connections that stay open: hosts, and threads that use one at the same time.
NUM_HOSTS, CONNECTIONS_PER_HOST = 64, 32
PASSING = (408, 425, 429)
# Of HEAD. Other refusals say little: some servers allow GET alone, so do signed addresses.
NOT_THERE = (404, 410)
USER_AGENT = "vitscale"

Result = TypeVar("Result")


class _AgainError(Exception):
    """The request may succeed when it is repeated; the text says what happened.

    Args:
        text: What happened.
        pause_s: What the server asked to wait; 0 if nothing.
    """

    def __init__(self, text: str, pause_s: float = 0.0) -> None:
        super().__init__(text)
        self.pause_s = pause_s


class HttpFiles:
    """Reads by address; may be used by several threads, and pickled.

    Args:
        first_pause_s: Before the first repetition; later ones wait twice as long each.
        max_body_bytes: Longer answers are refused.
    """

    def __init__(
        self, first_pause_s: float = FIRST_PAUSE_S, max_body_bytes: int = MAX_BODY_BYTES
    ) -> None:
        self._first_pause_s = first_pause_s
        self._max_body_bytes = max_body_bytes
        self._pool: tuple[int, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}

    def read(self, url: str) -> bytes:
        """Give the whole body.

        Raises:
            BadInputError: It is not there, or is too large.
            StorageError: The server cannot be reached, or answers with errors, after several tries.
        """
        return self._tried(url, lambda: self._get(url))

    def size(self, url: str) -> int | None:
        """Give the announced size in bytes; None where the server does not say.

        Raises:
            BadInputError: It is not there.
            StorageError: As in `read`.
        """
        return self._tried(url, lambda: self._head(url))

    def _tried(self, url: str, request: Callable[[], Result]) -> Result:
        for attempt in range(ATTEMPTS):
            try:
                return request()
            except _AgainError as error:
                if attempt + 1 == ATTEMPTS:
                    raise StorageError(
                        f"cannot read {url} after {ATTEMPTS} tries: {error}; "
                        "run the same command again when the server answers"
                    ) from error
                pause = max(self._first_pause_s * 2**attempt, error.pause_s)
            time.sleep(min(pause, LONGEST_PAUSE_S) * random.uniform(0.5, 1.5))
        raise AssertionError("not reached")

    def _get(self, url: str) -> bytes:
        from urllib3.exceptions import HTTPError

        answer = self._request("GET", url)
        whole = False
        try:
            _judge(answer)
            announced = answer.headers.get("Content-Length", "")
            parts: list[bytes] = []
            num_bytes = 0
            # Encoded answers (gzip) come decoded; only what is not encoded has the announced size.
            for part in answer.stream(CHUNK_BYTES, decode_content=True):
                parts.append(part)
                num_bytes += len(part)
                if num_bytes > self._max_body_bytes:
                    raise BadInputError(f"too_large: more than {self._max_body_bytes} bytes")
            plain = not answer.headers.get("Content-Encoding")
            if plain and announced.isdecimal() and num_bytes != int(announced):
                raise _AgainError(f"{num_bytes} of {announced} bytes came")
            whole = True
            return b"".join(parts)
        except (HTTPError, OSError) as error:
            raise _AgainError(_brief(error)) from error
        finally:
            # A connection with half an answer in it cannot be used again.
            if whole:
                answer.release_conn()
            else:
                answer.close()

    def _head(self, url: str) -> int | None:
        answer = self._request("HEAD", url)
        try:
            answer.drain_conn()
            if 400 <= answer.status < 500 and answer.status not in PASSING + NOT_THERE:
                return None
            _judge(answer)
            announced = answer.headers.get("Content-Length", "")
            encoded = answer.headers.get("Content-Encoding")
            return int(announced) if announced.isdecimal() and not encoded else None
        finally:
            answer.release_conn()

    def _request(self, method: str, url: str) -> Any:
        from urllib3.exceptions import HTTPError, LocationValueError, MaxRetryError, ResponseError
        from urllib3.util import Retry

        # Redirects are followed here, all other repetitions are ours.
        retries = Retry(
            total=None, connect=0, read=0, status=0, other=0, redirect=MAX_REDIRECTS,
            raise_on_redirect=True,
        )  # fmt: skip
        try:
            return self._opened().request(method, url, preload_content=False, retries=retries)
        except LocationValueError as error:
            raise BadInputError(f"missing_file: not an address: {_brief(error)}") from error
        except MaxRetryError as error:
            if isinstance(error.reason, ResponseError):
                text = f"missing_file: more than {MAX_REDIRECTS} redirects"
                raise BadInputError(text) from error
            raise _AgainError(_brief(error.reason or error)) from error
        except (HTTPError, OSError) as error:
            raise _AgainError(_brief(error)) from error

    def _opened(self) -> Any:
        # Sockets cannot be shared by two processes: one pool each, made at first use.
        if self._pool is None or self._pool[0] != os.getpid():
            import urllib3

            pool = urllib3.PoolManager(
                num_pools=NUM_HOSTS,
                maxsize=CONNECTIONS_PER_HOST,
                headers={"User-Agent": USER_AGENT},
                timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S),
            )
            self._pool = os.getpid(), pool
        return self._pool[1]


def _judge(answer: Any) -> None:
    """Let pass what comes with a body, sort out the rest."""
    if answer.status == 200:
        return
    text = f"HTTP {answer.status}"
    if answer.status not in PASSING and answer.status < 500:
        raise BadInputError(f"missing_file: {text}")
    wait = answer.headers.get("Retry-After", "")
    raise _AgainError(text, float(wait) if wait.isdecimal() else 0.0)


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200].replace("\n", " ")
