"""Pictures to measure with: a folder of the user's, or made ones."""

import io
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from data_prep.sources.build import SourceOptions
from data_prep.sources.imagefolder import ImageFolder
from vitscale.config.errors import UserError

NUM_CLASSES = 20
# Made pictures that differ; the others are copies of them in files of their own.
DISTINCT_IMAGES = 200
DISTINCT_ORIGINALS = 25
MADE = (
    "made: crops of scikit-learn's two photographs, brought to other sizes, with noise; "
    f"{DISTINCT_IMAGES} images and {DISTINCT_ORIGINALS} originals differ, the rest are copies"
)

Inputs = list[tuple[str, int]]


def list_folder(root: Path) -> Inputs:
    """Give path and class of every file of an image folder, as the packer finds them.

    Raises:
        UserError: It has no class folders or no files.
    """
    found = sorted(ImageFolder(str(root), SourceOptions()).entries())
    classes = sorted({entry.labels for entry in found})
    return [(os.path.join(root, entry.name), classes.index(entry.labels)) for entry in found]


def make_images(root: Path, count: int) -> None:
    """Write JPEGs of about 110 kB and 500 x 375 px into class folders."""
    rng = np.random.default_rng(0)
    sizes = [(500, 375), (375, 500), (500, 333), (640, 480), (400, 300)]
    shares = [0.5, 0.15, 0.2, 0.1, 0.05]
    distinct = [
        _picture(rng, *sizes[rng.choice(len(sizes), p=shares)], (3, 12))
        for _ in range(min(count, DISTINCT_IMAGES))
    ]
    _write(root, distinct, count)


def make_originals(root: Path, count: int) -> None:
    """Write JPEGs of 2 to 8 megapixels into class folders."""
    rng = np.random.default_rng(0)
    distinct = []
    for _ in range(min(count, DISTINCT_ORIGINALS)):
        long = int(rng.integers(1700, 3200))
        width, height = (long, long * 3 // 4) if rng.random() < 0.7 else (long * 3 // 4, long)
        distinct.append(_picture(rng, width, height, (1, 4)))
    _write(root, distinct, count)


def link_copies(inputs: Inputs, root: Path, count: int) -> None:
    """Make a folder of so many inputs: the given ones under more and more names, without copying.

    Raises:
        UserError: The folder lies on another file system.
    """
    for number in range(count):
        path, label = inputs[number % len(inputs)]
        folder = root / f"class{label:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            os.link(os.path.realpath(path), folder / f"{number:08d}.jpg")
        except OSError as error:
            raise UserError(
                f"cannot link {path} below {root}: {error.strerror}; give --work DIR on the file "
                "system of the images"
            ) from error


def _write(root: Path, distinct: list[bytes], count: int) -> None:
    for number in range(count):
        folder = root / f"class{number % NUM_CLASSES:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:06d}.jpg").write_bytes(distinct[number % len(distinct)])


def _picture(
    rng: np.random.Generator, width: int, height: int, sigmas: tuple[float, float]
) -> bytes:
    """Encode a random crop at a given size, in px, with noise of a size in levels."""
    photo = _photos()[rng.integers(2)]
    scale = min(photo.shape[1] / width, photo.shape[0] / height) * rng.uniform(0.5, 1.0)
    columns, rows = max(1, int(width * scale)), max(1, int(height * scale))
    left = rng.integers(photo.shape[1] - columns + 1)
    top = rng.integers(photo.shape[0] - rows + 1)
    crop = Image.fromarray(photo[top : top + rows, left : left + columns])
    pixels = np.asarray(crop.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    noise = rng.standard_normal(pixels.shape, np.float32) * np.float32(rng.uniform(*sigmas))
    out = io.BytesIO()
    made = Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8))
    made.save(out, "JPEG", quality=int(rng.integers(85, 96)))
    return out.getvalue()


def _photos() -> list[npt.NDArray[np.uint8]]:
    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise UserError(
            "pictures are made from two photographs of scikit-learn, which is not installed: "
            "`pip install scikit-learn`, or give --images and --originals"
        ) from error
    images: list[npt.NDArray[np.uint8]] = load_sample_images().images
    return images
