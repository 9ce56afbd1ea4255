"""Inputs that are files of their own: how they are read, and what their absence means."""

import os

from data_prep.sources.build import printable
from data_prep.verdict import BadInputError
from vitscale.config.errors import DataError


def read_listed(path: str | bytes, num_bytes: int) -> bytes:
    """Read a file that was listed with a size.

    Raises:
        DataError: It is gone, or has another size: the plan no longer holds.
        BadInputError: It may not be read.
        OSError: It cannot be reached now.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            data = file.readall()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(
            f"input {_shown(path)!r} was listed but is gone ({error.strerror}); "
            "put it back and run the same command again"
        ) from error
    except (PermissionError, IsADirectoryError) as error:
        raise BadInputError(f"unreadable: {error.strerror}") from error
    check_size(_shown(path), len(data), num_bytes)
    return data


def check_size(name: str, found: int, listed: int) -> None:
    """Compare the size of an input with the one that was listed, in bytes.

    Raises:
        DataError: They differ.
    """
    if found != listed:
        raise DataError(
            f"input {name!r} has {found} bytes, it had {listed} when it was listed; "
            "do not change inputs while they are packed"
        )


def _shown(path: str | bytes) -> str:
    return printable(os.fsdecode(path))
