"""The cases of `vitscale bench pack`: what each part measures, and on which inputs."""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.bench import references
from data_prep.bench.corpus import Inputs, link_copies, list_folder
from vitscale.observe.rounds import Case

# Names of cases, for the ratios too.
KEEP, KEEP_SHARD_WRITER, KEEP_MDS, KEEP_TARFILE, KEEP_TAR = (
    "keep: vitscale",
    "keep: ShardWriter",
    "keep: MDSWriter",
    "keep: tarfile",
    "keep: limit, tar",
)
RESIZE, RESIZE_ONE, RESIZE_IMG2DATASET, RESIZE_PILLOW, RESIZE_LIMIT, FIDELITY = (
    "resize x2: vitscale",
    "resize x1: vitscale",
    "resize x2: img2dataset",
    "resize x2: ShardWriter+Pillow",
    "resize x2: limit, turbo",
    "resize: fidelity",
)
KEEP_LONG_ONE, KEEP_LONG_TWO = "keep x1, long: vitscale", "keep x2, long: vitscale"
MEMORY_FEW, MEMORY_MANY = "memory x2, few: vitscale", "memory x2, many: vitscale"
DISPATCH = "dispatch: 3 MPI ranks"

SIDE, QUALITY = 512, 90
KEEP_SHARD_BYTES = 64 << 20
# Resized and long inputs are cut into so many shards: two processes end at nearly the same time.
NUM_SHARDS = 16
# Links to every image in the long runs, which are to be long beside the start of a process.
LONG_COPIES = 3
FIDELITY_IMAGES = 24
DISPATCHED = 2000
MPI_RANKS = 3
# Name of --peer -> distribution.
PEERS = {
    "webdataset": "webdataset",
    "mosaic": "mosaicml-streaming",
    "img2dataset": "img2dataset",
}


@dataclass(frozen=True)
class Folder:
    """An image folder to measure with."""

    root: Path
    inputs: Inputs

    @classmethod
    def at(cls, root: Path) -> "Folder":
        """List a folder."""
        return cls(root, list_folder(root))

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(os.path.getsize(path) for path, _ in self.inputs)

    @property
    def paths(self) -> list[str]:
        """Paths of all files."""
        return [path for path, _ in self.inputs]


@dataclass(frozen=True)
class Bench:
    """What the cases are made from.

    Args:
        work: Folder for links, on the file system of the images.
        peers: Name of --peer -> interpreter.
        images: To be kept.
        originals: To be resized.
        memory_images: Inputs of the two packs whose memory is compared.
    """

    work: Path
    peers: dict[str, str]
    images: Folder
    originals: Folder
    memory_images: tuple[int, int]

    def linked(self, count: int) -> Folder:
        """Give a folder with so many names of the images; made once."""
        root = self.work / f"linked-{count}"
        if not root.exists():
            link_copies(self.images.inputs, root, count)
        return Folder.at(root)

    def reference(
        self, name: str, case: str, folder: Folder, peer: str = "", **request: Any
    ) -> Case:
        """Make a case of somebody else's code.

        Args:
            name: For the table.
            case: In references.CASES.
            folder: Its inputs.
            peer: Name in PEERS of what it needs, if anything.
            request: What it needs besides.
        """
        hint = f"pip install {PEERS[peer]}, or --peer {peer}=PYTHON" if peer else ""
        command = [self.peers.get(peer, sys.executable), references.__file__]
        request |= {"case": case, "inputs": folder.inputs, "num_bytes": folder.num_bytes}
        return Case(name, command, request, folder.paths, hint=hint)

    def packing(
        self,
        name: str,
        folder: Folder,
        processes: int,
        shard_bytes: int,
        flags: list[str],
        case: str = "pack",
        rounds: int | None = None,
    ) -> Case:
        """Make a case of the packer."""
        request = {
            "case": case,
            "folder": str(folder.root),
            "num_inputs": len(folder.inputs),
            # How long a measurement of memory takes does not matter.
            "num_bytes": folder.num_bytes if case == "pack" else 0,
            "processes": processes,
            "shard_bytes": shard_bytes,
            "flags": flags,
        }
        read = folder.paths if case == "pack" else []
        return Case(name, _own_command(), request, read, rounds)


def _own_command() -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("packer.py"))]


def keep_cases(bench: Bench) -> list[Case]:
    """Storing images as they are, one process each."""
    images, shard_bytes = bench.images, KEEP_SHARD_BYTES

    def reference(name: str, case: str, peer: str = "") -> Case:
        return bench.reference(name, case, images, peer, shard_bytes=shard_bytes)

    return [
        bench.packing(KEEP, images, 1, shard_bytes, []),
        reference(KEEP_SHARD_WRITER, "shard_writer", "webdataset"),
        reference(KEEP_MDS, "mds_writer", "mosaic"),
        reference(KEEP_TARFILE, "tarfile"),
        reference(KEEP_TAR, "tar"),
    ]


def resize_cases(bench: Bench) -> list[Case]:
    """Making large images smaller, two processes each."""
    originals = bench.originals
    common: dict[str, Any] = {"processes": 2, "side": SIDE, "quality": QUALITY}
    shards: dict[str, Any] = {"shard_bytes": KEEP_SHARD_BYTES, "num_shards": NUM_SHARDS}
    some = Folder(originals.root, originals.inputs[:: -(-len(originals.inputs) // FIDELITY_IMAGES)])
    fidelity = {
        "case": "fidelity",
        "inputs": some.inputs,
        "num_bytes": 0,
        "num_inputs": len(some.inputs),
        **common,
    }
    return [
        _resizing(bench, RESIZE, 2),
        bench.reference(
            RESIZE_IMG2DATASET, "img2dataset", originals, "img2dataset", **common, **shards
        ),
        bench.reference(
            RESIZE_PILLOW, "shard_writer_pillow", originals, "webdataset", **common, **shards
        ),
        bench.reference(RESIZE_LIMIT, "turbo", originals, **common),
        Case(FIDELITY, _own_command(), fidelity, some.paths, rounds=1),
    ]


def _resizing(bench: Bench, name: str, processes: int) -> Case:
    flags = ["--image", "resize", "--side", str(SIDE), "--quality", str(QUALITY)]
    return bench.packing(name, bench.originals, processes, _sixteenth(bench.originals), flags)


def _sixteenth(folder: Folder) -> int:
    # Blocks and headers of a tar take some space, which shall not make one shard more.
    return folder.num_bytes // NUM_SHARDS + 2048 * len(folder.inputs) // NUM_SHARDS + 1


def scaling_cases(bench: Bench) -> list[Case]:
    """One process against two."""
    images = bench.linked(LONG_COPIES * len(bench.images.inputs))
    return [
        bench.packing(KEEP_LONG_ONE, images, 1, _sixteenth(images), []),
        bench.packing(KEEP_LONG_TWO, images, 2, _sixteenth(images), []),
        _resizing(bench, RESIZE_ONE, 1),
        _resizing(bench, RESIZE, 2),
    ]


def memory_cases(bench: Bench) -> list[Case]:
    """The same pack with few and many inputs, once each."""
    return [
        bench.packing(name, bench.linked(count), 2, KEEP_SHARD_BYTES, [], "memory", 1)
        for name, count in zip((MEMORY_FEW, MEMORY_MANY), bench.memory_images, strict=True)
    ]


def dispatch_cases(bench: Bench) -> list[Case]:
    """Handing out tasks over MPI."""
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = shutil.which("mpiexec") or (str(beside) if beside.exists() else "")
    # Without a launcher the process starts, and says what is missing.
    launcher = [mpiexec, "-n", str(MPI_RANKS)] if mpiexec else []
    request = {"case": "dispatch", "num_bytes": 0, "num_inputs": DISPATCHED}
    hint = "pip install mpi4py mpich"
    return [Case(DISPATCH, [*launcher, *_own_command()], request, hint=hint)]


CASES: dict[str, Callable[[Bench], list[Case]]] = {
    "keep": keep_cases,
    "resize": resize_cases,
    "scaling": scaling_cases,
    "memory": memory_cases,
    "dispatch": dispatch_cases,
}
