"""Who does the work: this process, local processes, or the ranks of an MPI job.

All three hand tasks out one by one, to whoever is free, and return results in the order they come.
This is the only file that knows mpi4py, and it loads it only in a process that an MPI launcher
started. An error on one rank ends the whole job: MPI would otherwise wait for the dead for ever.
"""

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context
from typing import Any, Protocol

from vitscale.config.errors import EXIT_FAILED, UserError, VitscaleError

# (rank, size) as the launchers of MPICH, Slurm, Open MPI and PMIx announce them; PMIx gives no
# size.
RANK_NAMES = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMIX_RANK", ""),
)
POLL_S = 0.002  # MPI's own waiting burns a core; so short a sleep costs nothing beside a shard
PR_SET_PDEATHSIG = 1

Work = Callable[[Any], Any]


class Crew(Protocol):
    """Those who work on tasks."""

    # how many work at the same time
    size: int

    def share(self, work: Work) -> None:
        """Give everybody other work than what the job was started with, for the next `map`."""

    def map(self, work: Work, tasks: Iterable[Any]) -> Iterator[Any]:
        """Run `work` on every task; give the results as they come."""


def launcher_rank() -> int | None:
    """Give the rank that an MPI launcher gave this process, or None without one."""
    for name, _ in RANK_NAMES:
        if name in os.environ:
            return int(os.environ[name])
    return None


def run(body: Callable[[Crew], int], follow: Callable[[], Work], workers: int) -> int:
    """Run a command's body in one process with the others of the job at its service.

    Args:
        body: The command, run on rank 0; returns the exit code.
        follow: Builds the work function on the other ranks of an MPI job.
        workers: Local processes, when there is no MPI job or it has one rank.

    Returns:
        The exit code, the same on all ranks.
    """
    rank, size = launcher_rank(), _launcher_size()
    if rank is None or size == 1:
        return body(LocalCrew(workers))
    crew = MpiCrew()
    found = crew.size + 1
    if size is not None and found != size:
        # Else every rank would take itself for the only one, and do everything.
        raise UserError(
            f"the launcher announces {size} ranks, the MPI library of mpi4py sees {found}: they "
            "are of different MPIs; start with the mpiexec that belongs to it, or without mpiexec"
        )
    if found == 1:
        return body(LocalCrew(workers))
    return crew.command(body, follow)


def _launcher_size() -> int | None:
    for rank_name, size_name in RANK_NAMES:
        if rank_name in os.environ and size_name in os.environ:
            return int(os.environ[size_name])
    return None


class LocalCrew:
    """This process, or forked children of it.

    Args:
        workers: 1 works in this process; more makes so many children.
    """

    def __init__(self, workers: int) -> None:
        self.size = workers

    def share(self, work: Work) -> None:
        """Do nothing: `map` hands its work to the children."""

    def map(self, work: Work, tasks: Iterable[Any]) -> Iterator[Any]:
        """Fork the children, if any, then run `work` on every task; results as they come."""
        if self.size == 1:
            return map(work, tasks)
        # Forked: imports and inputs are shared. No thread of ours is alive at this point, so no
        # lock is held.
        pool = ProcessPoolExecutor(
            self.size, get_context("fork"), initializer=_start_child, initargs=(work, os.getpid())
        )
        queue = iter(tasks)
        # Twice the size keeps everybody busy without holding all tasks in the queue.
        waiting = {pool.submit(_work_in_child, task) for task in islice(queue, 2 * self.size)}
        return _collect(pool, queue, waiting)


def _collect(
    pool: ProcessPoolExecutor, queue: Iterator[Any], waiting: set[Future[Any]]
) -> Iterator[Any]:
    try:
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            waiting |= {pool.submit(_work_in_child, task) for task in islice(queue, len(done))}
            yield from (future.result() for future in done)
    except BrokenProcessPool as error:
        raise VitscaleError(
            "a worker process died without a message (killed, perhaps for lack of memory); "
            "run the same command again to go on, with fewer --workers if it happens again"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_child_work: Work | None = None


def _start_child(work: Work, parent: int) -> None:
    global _child_work
    _child_work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends the pool
    # A parent that is killed cannot end its children: the kernel does it.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_FAILED)


def _work_in_child(task: Any) -> Any:
    assert _child_work is not None
    return _child_work(task)


class MpiCrew:
    """All other ranks of an MPI job; rank 0 hands out and does no work itself."""

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise UserError(
                f"an MPI launcher started this process, but mpi4py cannot load MPI ({error}); "
                "load the cluster's MPI, or `pip install mpi4py mpich`, or start without mpiexec"
            ) from error
        self._mpi = MPI
        self._comm = MPI.COMM_WORLD
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size() - 1

    def command(self, body: Callable[[Crew], int], follow: Callable[[], Work]) -> int:
        """Run the body on rank 0 and serve it on the others; any failure ends the whole job."""
        try:
            if self.rank > 0:
                return self._serve(follow())
            code = self._body_code(body)
            self._dismiss(code)
        except BaseException as error:
            self._abort(error)
            raise
        return code

    def _body_code(self, body: Callable[[Crew], int]) -> int:
        self._busy = 0
        try:
            return body(self)
        except VitscaleError as error:
            if self._busy:
                raise  # others are in the middle of a shard: do not wait for them
            print(f"error: {error}", file=sys.stderr, flush=True)
            return error.exit_code

    def share(self, work: Work) -> None:
        """Send the work to all ranks."""
        for rank in range(1, self.size + 1):
            self._comm.send(("work", work), dest=rank)

    def map(self, work: Work, tasks: Iterable[Any]) -> Iterator[Any]:
        """Send every task to a free rank; give the results as they come."""
        queue = iter(tasks)
        free = list(range(self.size, 0, -1))
        exhausted = False
        while True:
            while free and not exhausted:
                try:
                    task = next(queue)
                except StopIteration:
                    exhausted = True
                    break
                self._comm.send(("task", task), dest=free.pop())
                self._busy += 1
            if not self._busy:
                return
            source, result = self._receive(self._mpi.ANY_SOURCE)
            self._busy -= 1
            free.append(source)
            yield result

    def _serve(self, work: Work) -> int:
        while True:
            _, (kind, content) = self._receive(0)
            if kind == "end":
                return int(content)
            if kind == "work":
                work = content
            else:
                self._comm.send(work(content), dest=0)

    def _dismiss(self, code: int) -> None:
        for rank in range(1, self.size + 1):
            self._comm.send(("end", code), dest=rank)

    def _receive(self, source: int) -> tuple[int, Any]:
        status = self._mpi.Status()
        while not self._comm.iprobe(source=source, status=status):
            time.sleep(POLL_S)
        sender = status.Get_source()
        return sender, self._comm.recv(source=sender)

    def _abort(self, error: BaseException) -> None:
        if isinstance(error, VitscaleError):
            print(f"error: rank {self.rank}: {error}", file=sys.stderr)
        else:
            print(f"error: rank {self.rank} failed", file=sys.stderr)
            traceback.print_exception(error)
        sys.stderr.flush()
        sys.stdout.flush()
        self._comm.Abort(getattr(error, "exit_code", EXIT_FAILED))
