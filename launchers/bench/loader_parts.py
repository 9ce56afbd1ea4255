"""The cases of `vitscale bench data`: what each part measures, and on which pictures."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.bench import peers
from launchers.bench.pictures import Pictures, small_ones
from vitscale.data.manifest import load_manifest
from vitscale.data.storage import open_storage
from vitscale.observe.rounds import Case

# Names of cases, for the ratios too.
EXACT, FAST, LIMIT = "vitscale, exact", "vitscale, fast", "limit: decode only"
DALI, TORCHVISION, WEBDATASET, MOSAIC, LITDATA = (
    "DALI on CPU",
    "torchvision ImageFolder, v2",
    "webdataset",
    "MosaicML streaming",
    "litdata",
)
FIDELITY_EXACT, FIDELITY_FAST = "fidelity, exact", "fidelity, fast"
BREAKDOWN_EXACT, BREAKDOWN_FAST = "breakdown, exact", "breakdown, fast"
RESUME, MEMORY = "resume", "memory"

SIDE, AREA = 224, (0.05, 1.0)
# Before the clock: by then a faster consumer has emptied all queues. After it: an epoch's end, at
# which some readers run dry, must not be seen.
WARM_BATCHES, TAIL_BATCHES = 8, 6
BREAKDOWN_BATCHES = 12
FIDELITY_IMAGES = 100
MEMORY_SIDE, MEMORY_BATCH = 32, 4
# Name of --peer -> case, and what to install.
PEERS = {
    "dali": (DALI, "nvidia-dali-cuda130"),
    "torchvision": (TORCHVISION, "torchvision"),
    "webdataset": (WEBDATASET, "webdataset"),
    "mosaic": (MOSAIC, "mosaicml-streaming"),
    "litdata": (LITDATA, "litdata"),
}


@dataclass(frozen=True)
class Bench:
    """What the cases are made from.

    Args:
        work: Folder for all that is written.
        pictures: What is read.
        peers: Name of --peer -> interpreter.
        workers: Processes or threads of every loader.
        batch: Pictures of a batch.
        small_samples: Samples where only their number matters.
        memory_batches: Batches over which memory is watched.
    """

    work: Path
    pictures: Pictures
    peers: dict[str, str]
    workers: int
    batch: int
    small_samples: int
    memory_batches: int

    @property
    def request(self) -> dict[str, Any]:
        """What all cases are told."""
        return {
            "uri": self.pictures.uri,
            "cache_dir": str(self.work / "cache"),
            "workers": self.workers,
            "batch": self.batch,
            "side": SIDE,
            "area": AREA,
        }

    @property
    def num_batches(self) -> int:
        """Batches that are taken under the clock: an epoch of the pictures, less both ends."""
        return len(self.pictures.inputs) // self.batch - WARM_BATCHES - TAIL_BATCHES

    @property
    def shards(self) -> list[str]:
        """The files of the packed dataset, where it is a local one."""
        storage = open_storage(self.pictures.uri)
        names = load_manifest(storage).shards.names
        paths = [storage.local_path(name) for name in names]
        return [str(path) for path in paths if path is not None]


def _own(
    name: str,
    case: str,
    request: dict[str, Any],
    read: list[str],
    rounds: int | None = None,
) -> Case:
    command = [sys.executable, str(Path(__file__).with_name("own_cases.py"))]
    return Case(name, command, {**request, "case": case}, read, rounds)


def speed_cases(bench: Bench) -> list[Case]:
    """Batches a second, beside the limit and the peers."""
    common: dict[str, Any] = {
        **bench.request,
        "warm_batches": WARM_BATCHES,
        "num_batches": bench.num_batches,
        "num_inputs": bench.num_batches * bench.batch,
    }
    files: dict[str, Any] = {
        **common,
        "inputs": bench.pictures.inputs,
        "folder": str(bench.pictures.folder),
        "store": str(bench.work),
    }
    paths = [path for path, _ in bench.pictures.inputs]
    cases = [
        _own(EXACT, "loader", {**common, "jpeg_scale": "exact"}, bench.shards),
        _own(FAST, "loader", {**common, "jpeg_scale": "fast"}, bench.shards),
        Case(LIMIT, [sys.executable, peers.__file__], {**files, "case": "limit"}, paths),
    ]
    for peer, (name, package) in PEERS.items():
        command = [bench.peers.get(peer, sys.executable), peers.__file__]
        hint = f"pip install {package}, or --peer {peer}=PYTHON"
        cases.append(Case(name, command, {**files, "case": peer}, paths, hint=hint))
    return cases


def fidelity_cases(bench: Bench) -> list[Case]:
    """Distance to Pillow's result."""
    every = max(1, len(bench.pictures.inputs) // FIDELITY_IMAGES)
    some = bench.pictures.inputs[::every][:FIDELITY_IMAGES]
    request = {**bench.request, "inputs": some, "num_inputs": len(some)}
    return [
        _own(name, "fidelity", {**request, "jpeg_scale": scale}, [], 1)
        for name, scale in ((FIDELITY_EXACT, "exact"), (FIDELITY_FAST, "fast"))
    ]


def breakdown_cases(bench: Bench) -> list[Case]:
    """Where the time of an image goes."""
    request = {
        **bench.request,
        "num_batches": BREAKDOWN_BATCHES,
        "num_inputs": BREAKDOWN_BATCHES * bench.batch,
    }
    return [
        _own(name, "breakdown", {**request, "jpeg_scale": scale}, bench.shards)
        for name, scale in ((BREAKDOWN_EXACT, "exact"), (BREAKDOWN_FAST, "fast"))
    ]


def resume_cases(bench: Bench) -> list[Case]:
    """Time to the first batch at the start and late in an epoch of many samples."""
    uri = _small(bench)
    request = {**bench.request, "uri": uri, "num_inputs": bench.small_samples}
    return [_own(RESUME, "resume", request, [], 1)]


def memory_cases(bench: Bench) -> list[Case]:
    """Memory while very many small batches pass."""
    request = {
        **bench.request,
        "uri": _small(bench),
        "batch": MEMORY_BATCH,
        "side": MEMORY_SIDE,
        "num_batches": bench.memory_batches,
        "num_inputs": bench.memory_batches * MEMORY_BATCH,
    }
    return [_own(MEMORY, "memory", request, [], 1)]


def _small(bench: Bench) -> str:
    """Give the dataset of many small pictures; made once."""
    packed = bench.work / "small-packed"
    if packed.exists():
        return str(packed)
    return small_ones(bench.pictures, bench.small_samples, bench.work)


PARTS: dict[str, Callable[[Bench], list[Case]]] = {
    "speed": speed_cases,
    "fidelity": fidelity_cases,
    "breakdown": breakdown_cases,
    "resume": resume_cases,
    "memory": memory_cases,
}
