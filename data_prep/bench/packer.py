"""The packer's own cases, started by path, each in a fresh process."""

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(
        Path(__file__).resolve().parents[2]
    )  # the checkout's root instead of the script's folder

import importlib
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from data_prep import comm, engine
from data_prep.bench.references import Request, Work, answer, versions
from data_prep.images import ImagePolicy, prepare_image
from data_prep.pack import make_work
from data_prep.pack_arguments import make_parser
from data_prep.plan import Task
from data_prep.writer import Done

PEAK_SUFFIX = ".peak"


class ClockedCrew(comm.LocalCrew):
    """Local processes, with a clock that runs from their start to the last result."""

    seconds = 0.0

    def map(self, work: comm.Work, tasks: Iterable[Any]) -> Iterator[Any]:
        """Run `work` on every task."""
        start = time.perf_counter()
        # Not in the generator: the processes are started here, before the caller has threads.
        return self._clocked(start, super().map(work, tasks))

    def _clocked(self, start: float, results: Iterator[Any]) -> Iterator[Any]:
        yield from results
        self.seconds = time.perf_counter() - start


class WatchedWork:
    """Does tasks, and notes the most memory that its process ever held.

    Args:
        work: What does them.
        folder: Where each process keeps its note.
    """

    def __init__(self, work: Any, folder: str) -> None:
        self._work, self._folder = work, folder

    def __getattr__(self, name: str) -> Any:
        """Give everything else that a pack asks of its work."""
        return getattr(self._work, name)

    def __call__(self, task: Task) -> Done:
        """Write one shard."""
        done: Done = self._work(task)
        Path(self._folder, f"{os.getpid()}{PEAK_SUFFIX}").write_text(str(peak_bytes()))
        return done


def peak_bytes() -> int:
    """Give the largest resident memory that this process had so far, in bytes.

    Raises:
        ImportError: The system does not say it.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        raise ImportError("peak memory is read from /proc/self/status, which this system lacks")
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def pack(request: Request) -> Work:
    """Pack a folder through the packer's Python interface."""
    work, out = _packing(request)
    crew = ClockedCrew(request["processes"])

    def run() -> dict[str, Any]:
        start = time.perf_counter()
        engine.pack(crew, work, engine.Limit(count=0), retry_failed=False, dry_run=False)
        whole_seconds = time.perf_counter() - start
        manifest = json.loads(Path(out, "manifest.json").read_bytes())
        if manifest["num_samples"] != request["num_inputs"]:
            raise RuntimeError(f"{manifest['num_samples']} samples of {request['num_inputs']}")
        found = versions("pyarrow", "xxhash", "simplejpeg", "opencv-python-headless")
        return {"seconds": crew.seconds, "whole_seconds": whole_seconds, **found}

    return run


def memory(request: Request) -> Work:
    """Pack a folder, and give the peak of every process: the first is the one that hands out."""
    work, _ = _packing(request)
    watched: Any = WatchedWork(work, request["work"])
    peak_bytes()

    def run() -> dict[str, Any]:
        crew = comm.LocalCrew(request["processes"])
        engine.pack(crew, watched, engine.Limit(count=0), retry_failed=False, dry_run=False)
        notes = sorted(Path(request["work"]).glob(f"*{PEAK_SUFFIX}"))
        return {"peaks": [peak_bytes(), *(int(note.read_text()) for note in notes)]}

    return run


def _packing(request: Request) -> tuple[Any, str]:
    out = os.path.join(request["work"], "out")
    flags = ["--source", f"imagefolder:{request['folder']}", "--out", out]
    flags += ["--shard-bytes", str(request["shard_bytes"]), *request["flags"]]
    work = make_work(make_parser().parse_args(flags))
    work.warm_up()
    return work, out


def fidelity(request: Request) -> Work:
    """Compare resized images with full decoding and averaging, in levels of 0 to 255.

    Both are compared as they are stored: what the encoding loses, it loses on both ways. The
    distance to the reference before its encoding is given too.
    """
    cv2 = importlib.import_module("cv2")
    side, quality = request["side"], request["quality"]
    policy = ImagePolicy("resize", side=side, quality=quality)

    def distances(path: str) -> tuple[float, float]:
        data = Path(path).read_bytes()
        stored = prepare_image(data, policy, "header")
        size = (stored.width, stored.height)
        whole = cv2.resize(_pixels(data), size, interpolation=cv2.INTER_AREA)
        out = io.BytesIO()
        Image.fromarray(whole).save(out, "JPEG", quality=quality, subsampling="4:2:0")
        found, wanted = _pixels(stored.data), _pixels(out.getvalue())
        return _distance(found, wanted), _distance(found, whole)

    def run() -> dict[str, Any]:
        both = np.asarray([distances(path) for path, _ in request["inputs"]])
        means, most = both.mean(0).tolist(), both.max(0).tolist()
        names = ("mean_levels", "mean_levels_unencoded")
        return dict(zip(names, means, strict=True)) | {"worst_levels": most[0]}

    return run


def _pixels(data: bytes) -> npt.NDArray[np.uint8]:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def _distance(first: npt.NDArray[np.uint8], second: npt.NDArray[np.uint8]) -> float:
    return float(np.abs(first.astype(np.int16) - second).mean())


def dispatch(request: Request) -> Work:
    """Hand out tasks that do nothing, to the other ranks of an MPI job."""

    def run() -> dict[str, Any]:
        found: dict[str, Any] = {}

        def body(crew: comm.Crew) -> int:
            start = time.perf_counter()
            for _ in crew.map(_nothing, range(request["num_inputs"])):
                pass
            found["seconds"] = time.perf_counter() - start
            return 0

        comm.run(body, lambda: _nothing, 1)
        return {**found, **versions("mpi4py")}

    return run


def _nothing(task: Any) -> Any:
    return task


CASES: dict[str, Callable[[Request], Work]] = {
    "pack": pack,
    "memory": memory,
    "fidelity": fidelity,
    "dispatch": dispatch,
}


def main() -> None:
    """Run the case that the request on the command line names; print its result as JSON."""
    request = json.loads(Path(sys.argv[1]).read_bytes())
    rank = comm.launcher_rank() or 0
    if rank:
        CASES[request["case"]](request)()
    else:
        answer(CASES, request)


if __name__ == "__main__":
    main()
