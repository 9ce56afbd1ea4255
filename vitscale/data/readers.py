"""The reader processes of a rank: forked from it, fed with requests, ending with it.

Micro-batch n is made by reader n modulo their number, in a slot of memory that both sides see;
only the slot's number and what was found to be bad travel through pipes. A reader that dies is
noticed at once, one that is stuck is named with what it waits for.
"""

import contextlib
import faulthandler
import os
import signal
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import NamedTuple

from vitscale.config.errors import VitscaleError
from vitscale.data import activity
from vitscale.data.activity import Activity, Writer
from vitscale.data.examples import Examples
from vitscale.data.forked import settle
from vitscale.data.quarantine import BadSample
from vitscale.data.requests import Requests
from vitscale.data.slots import BatchShape, Slot

# Batches that stay valid after they were handed out: the latest one, and the one before it, whose
# copy to an accelerator may still be under way.
HELD_SLOTS = 2
# Makes a reader print where it is; not used by torch or NCCL.
STACKS_SIGNAL = signal.SIGRTMIN


class Reply(NamedTuple):
    """What a reader sends back for a slot."""

    slot: int
    # Found to be bad and replaced; or why the batch could not be made.
    outcome: list[BadSample] | VitscaleError | str


class Readers:
    """Makes micro-batches in processes of their own, or here.

    Build it in the main thread: readers end with the thread that started them.

    Args:
        examples: Makes the examples.
        requests: What to make, in order.
        shape: Sizes of a micro-batch.
        num_workers: Reader processes; 0 works in this process, when it is asked to.
        prefetch_batches: Micro-batches that each reader prepares ahead.
        watched: Has a slot for each reader.
    """

    def __init__(
        self,
        examples: Examples,
        requests: Iterator[Requests],
        shape: BatchShape,
        num_workers: int,
        prefetch_batches: int,
        watched: Activity,
    ) -> None:
        self._examples, self._requests = examples, requests
        ahead = num_workers * prefetch_batches
        self.slots = [Slot(shape, num_workers > 0) for _ in range(ahead + HELD_SLOTS)]
        self._free: deque[int] = deque(range(len(self.slots)))
        self._held: deque[int] = deque()
        # Slots in the order in which their batches are due.
        self._asked: deque[int] = deque()
        self._done: dict[int, Reply] = {}
        self._links: list[Connection] = []
        self.processes: list[ForkProcess] = []
        self._next_worker = 0
        for number in range(num_workers):
            self._start(number, examples, watched.slot(number))
        while len(self._free) > HELD_SLOTS and self._ask():
            pass

    def _start(self, number: int, examples: Examples, writer: Writer) -> None:
        context = get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve,
            args=(examples, self.slots, writer, theirs, ours, os.getpid()),
            name=f"reader-{number}",
            daemon=True,
        )
        process.start()
        theirs.close()
        self._links.append(ours)
        self.processes.append(process)

    def _ask(self) -> bool:
        """Ask for the next micro-batch; False: there is none."""
        requests = next(self._requests, None)
        if requests is None:
            return False
        slot = self._free.popleft()
        self.slots[slot].ask(requests)
        self._asked.append(slot)
        if self._links:
            # A dead one is noticed when its batch is due.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._links[self._next_worker].send(slot)
            self._next_worker = (self._next_worker + 1) % len(self._links)
        return True

    @property
    def num_ready(self) -> int:
        """Micro-batches that are made and wait to be taken."""
        for link in self._links:
            self._drain(link)
        return len(self._done)

    def take(self, timeout_s: float) -> Reply | None:
        """Give the next micro-batch; it stays valid until the next but one is taken.

        Args:
            timeout_s: How long to wait for it.

        Returns:
            The reply, or None when it did not come in this time.

        Raises:
            StopIteration: There are no more.
            VitscaleError: The reader that should make it is dead.
        """
        if not self._links:
            return self._make_here()
        if not self._asked:
            raise StopIteration
        due = self._asked[0]
        if due not in self._done and not self._wait_for(due, timeout_s):
            return None
        self._asked.popleft()
        reply = self._done.pop(due)
        self._hold(due)
        return reply

    def _make_here(self) -> Reply:
        if not self._asked and not self._ask():
            raise StopIteration
        slot = self._asked.popleft()
        reply = Reply(slot, _fill(self._examples, self.slots[slot]))
        self._held.append(slot)
        while len(self._held) >= HELD_SLOTS:
            self._free.append(self._held.popleft())
        return reply

    def _hold(self, slot: int) -> None:
        self._held.append(slot)
        while len(self._held) > HELD_SLOTS:
            self._free.append(self._held.popleft())
        while self._free and self._ask():
            pass

    def _wait_for(self, due: int, timeout_s: float) -> bool:
        # Asked in turn, so the reader of the oldest one follows from how many came after it.
        worker = (self._next_worker - len(self._asked)) % len(self._links)
        link, process = self._links[worker], self.processes[worker]
        connection.wait([link, process.sentinel], timeout_s)
        self._drain(link)
        if due not in self._done and not process.is_alive():
            self._drain(link)  # it may have answered right before its end
            if due not in self._done:
                raise VitscaleError(_obituary(process))
        return due in self._done

    def _drain(self, link: Connection) -> None:
        with contextlib.suppress(EOFError, ConnectionResetError):  # a dead one's
            while link.poll():
                reply = link.recv()
                self._done[reply.slot] = reply

    def print_stacks(self) -> None:
        """Let every reader write to standard error where in the program it is."""
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, STACKS_SIGNAL)

    def stop(self) -> None:
        """End the reader processes."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()

    def close(self) -> None:
        """End the reader processes, if they were not, and close the shards."""
        self.stop()
        for link in self._links:
            link.close()
        self.processes.clear()
        self._links.clear()
        self._asked.clear()
        self._requests = iter(())
        self._examples.reader.close()


def _fill(examples: Examples, slot: Slot) -> list[BadSample] | VitscaleError:
    try:
        return examples.fill(slot.requests, slot.filled)
    except VitscaleError as error:
        return error


def _serve(
    examples: Examples,
    slots: Sequence[Slot],
    writer: Writer,
    link: Connection,
    other: Connection,
    parent: int,
) -> None:
    """Run a reader process."""
    other.close()
    settle(parent)
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
    activity.use(writer)
    while True:
        try:
            number = link.recv()
        except EOFError:
            return
        try:
            with activity.doing("making a micro-batch"):
                outcome: list[BadSample] | VitscaleError | str = _fill(examples, slots[number])
        except Exception:  # a fault of ours: the rank reports it with this process's traceback
            outcome = traceback.format_exc()
        link.send(Reply(number, outcome))


def _obituary(process: ForkProcess) -> str:
    process.join()
    code = process.exitcode
    if code is None or code == 0:
        how = f"exit code {code}"
    else:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return (
        f"reader process {process.pid} was ended from outside ({how}); if the machine ran out of "
        "memory, lower data.num_workers or data.prefetch_batches"
    )
