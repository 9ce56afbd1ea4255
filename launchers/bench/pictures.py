"""What the loader is measured on: JPEGs of a folder or of a packed dataset, as files and packed."""

import io
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

import vitscale
from vitscale.config.errors import UserError, VitscaleError
from vitscale.data.dataset import open_dataset

SUFFIXES = (".jpg", ".jpeg")
# Small shards: even a few thousand pictures make several shuffle windows.
SHARD_BYTES = "32MB"
# Small pictures that differ; all others are copies of them.
DISTINCT_SMALL = 500
SMALL_SIDE, SMALL_QUALITY = 64, 80

Inputs = list[tuple[str, int]]


@dataclass(frozen=True)
class Pictures:
    """JPEGs to measure with.

    Args:
        folder: With a folder for each class.
        inputs: Path and class of each file.
        uri: The same, or what they come from, as a packed dataset.
        origin: For the report.
    """

    folder: Path
    inputs: Inputs
    uri: str
    origin: str

    @property
    def described(self) -> str:
        """What they are, for the report."""
        num_bytes = sum(os.path.getsize(path) for path, _ in self.inputs)
        mean = num_bytes / len(self.inputs) / 1e3
        return f"{len(self.inputs)} JPEGs, mean {mean:.0f} kB, of {self.origin}"


def from_folder(root: str, count: int, work: Path) -> Pictures:
    """Take files of class folders, and pack them.

    Args:
        root: The folder.
        count: Pictures wanted: where there are fewer, they are repeated under other names.
        work: Where to write.

    Raises:
        UserError: There are no JPEGs in class folders.
    """
    paths = [path for path in sorted(Path(root).glob("*/*")) if path.suffix.lower() in SUFFIXES]
    if not paths:
        raise UserError(f"--images {root}: no {' or '.join(SUFFIXES)} in class folders there")
    classes = sorted({path.parent.name for path in paths})
    every = max(1, len(paths) // count)
    chosen = [(str(p), classes.index(p.parent.name)) for p in paths[::every]][:count]
    folder = work / "pictures"
    link_copies(chosen, folder, count)
    uri = pack(folder, work / "packed")
    return Pictures(folder, list_folder(folder), uri, root)


def from_dataset(uri: str, count: int, work: Path) -> Pictures:
    """Take samples of a packed dataset; they are written to files for those who read files.

    Args:
        uri: The dataset.
        count: Pictures wanted; where there are fewer, files are repeated under other names.
        work: Where to write.

    Raises:
        UserError: They are not all JPEGs.
    """
    dataset = open_dataset(uri)
    number = min(count, len(dataset))
    folder = work / "samples"
    for sample_index in range(0, len(dataset), len(dataset) // number):
        sample = dataset[sample_index]
        if sample.image_format != "jpg":
            raise UserError(
                f"--data {uri}: sample {sample.key} is {sample.image_format}; the references read "
                "JPEGs only, measure with --images or another dataset"
            )
        path = folder / f"class{max(sample.label, 0):06d}" / f"{sample_index:010d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample.image)
    link_copies(list_folder(folder)[:number], work / "pictures", count)
    return Pictures(work / "pictures", list_folder(work / "pictures"), uri, uri)


def small_ones(pictures: Pictures, count: int, work: Path) -> str:
    """Pack many small pictures, for what depends on their number alone.

    Args:
        pictures: Made smaller.
        count: How many; most are copies.
        work: Where to write.

    Returns:
        The dataset.
    """
    folder, inputs = work / "small-ones", []
    folder.mkdir()
    for number, (path, label) in enumerate(pictures.inputs[:DISTINCT_SMALL]):
        out = io.BytesIO()
        with Image.open(path) as picture:
            picture.draft("RGB", (SMALL_SIDE, SMALL_SIDE))
            small = picture.convert("RGB").resize((SMALL_SIDE, SMALL_SIDE))
        small.save(out, "JPEG", quality=SMALL_QUALITY)
        (folder / f"{number}.jpg").write_bytes(out.getvalue())
        inputs.append((str(folder / f"{number}.jpg"), label))
    link_copies(inputs, work / "small", count)
    return pack(work / "small", work / "small-packed")


def list_folder(root: Path) -> Inputs:
    """Give path and class of every file of class folders, sorted."""
    folders = sorted(path for path in root.iterdir() if path.is_dir())
    return [(str(file), k) for k, folder in enumerate(folders) for file in sorted(folder.iterdir())]


def link_copies(inputs: Inputs, root: Path, count: int) -> None:
    """Make class folders of so many files: the inputs under more and more names.

    Args:
        inputs: Path and class.
        root: New folder.
        count: Files to make; hard links where the file system allows them.
    """
    for number in range(count):
        path, label = inputs[number % len(inputs)]
        target = root / f"class{label:06d}" / f"{number:08d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(os.path.realpath(path), target)
        except OSError:  # another file system, or too many links
            shutil.copyfile(path, target)


def pack(folder: Path, out: Path) -> str:
    """Pack class folders with `vitscale pack`, in a process of its own.

    Raises:
        VitscaleError: It failed; its messages were shown.
    """
    words = ["--source", f"imagefolder:{folder}", "--out", str(out), "--shard-bytes", SHARD_BYTES]
    root = str(Path(vitscale.__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    print(f"packing {folder.name}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "data_prep.pack", *words],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        raise VitscaleError(f"packing {folder} ended with exit code {done.returncode}")
    return str(out)
