"""What every helper process of a rank does first: outlive its signals, and die with it."""

import ctypes
import os
import resource
import signal
import sys

# Files such a process may have open, where the system allows it to ask for so many.
MAX_FILES = 8192
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def settle(parent: int) -> None:
    """Tie a forked process to its parent.

    A batch system signals the whole process group. The rank then saves and stops its helpers
    itself; it needs them until it does.

    Args:
        parent: Process id of the rank, taken before the fork.
    """
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before prctl took effect
        os._exit(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wish = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wish), hard))
