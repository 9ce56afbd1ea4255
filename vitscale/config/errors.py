"""The errors that end a command, each with its exit code.

Every other exception is a fault of ours and leaves with a traceback and code 1.
"""

import sys
from collections.abc import Callable

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USER = 2
EXIT_DATA = 3
EXIT_NUMBERS = 4
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: what batch systems take as "run it again"


class VitscaleError(Exception):
    """A failure that the message explains in full; the traceback would add nothing."""

    exit_code = EXIT_FAILED


class UserError(VitscaleError, ValueError):
    """The user's input is wrong; the message says what to change."""

    exit_code = EXIT_USER


class DataError(VitscaleError, ValueError):
    """Stored data is damaged or failed its limits; the message names shard, key and offset."""

    exit_code = EXIT_DATA


class NumbersError(VitscaleError, ArithmeticError):
    """Loss or gradients stopped being finite."""

    exit_code = EXIT_NUMBERS


class Stopped(VitscaleError):
    """The run was asked to stop and can be resumed."""

    exit_code = EXIT_STOPPED


def exit_code_of(body: Callable[[], int], *, quiet: bool = False) -> int:
    """Run a command's body and turn its outcome into an exit code.

    Args:
        body: The command; returns its exit code.
        quiet: Leave the message to another process (ranks other than the first say the same).

    Returns:
        The body's own code, or the code of the VitscaleError that ended it.
    """
    try:
        return body()
    except VitscaleError as error:
        if not quiet:
            label = "stopped" if isinstance(error, Stopped) else "error"
            print(f"{label}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return 130
