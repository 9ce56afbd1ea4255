"""Folders of real image files for tests: crops of scikit-learn's two photographs."""

import hashlib
import io
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image


@cache
def photos() -> tuple[np.ndarray, ...]:
    from sklearn.datasets import load_sample_images

    return tuple(load_sample_images().images)


def crop(seed: int, side: int | None = None) -> np.ndarray:
    """Cut a piece of a photograph; its place and size depend on the seed."""
    rng = np.random.default_rng(seed)
    photo = photos()[seed % 2]
    height, width = (side, side) if side else rng.integers(16, 64, 2)
    top = rng.integers(0, photo.shape[0] - height)
    left = rng.integers(0, photo.shape[1] - width)
    return photo[top : top + height, left : left + width]


def encoded(pixels: np.ndarray, image_format: str = "JPEG", **options) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, image_format, **options)
    return out.getvalue()


def make_folder(root: Path, counts: dict[str, int], seed: int = 0) -> Path:
    """Write an image folder: every third image a PNG, the others JPEG.

    Args:
        root: Where to; made.
        counts: Class name -> number of images.
        seed: Other seeds give other images.
    """
    number = seed * 1_000_000
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for index in range(count):
            kind, ending = ("PNG", "png") if index % 3 == 2 else ("JPEG", "jpg")
            (root / name / f"img_{index:05d}.{ending}").write_bytes(encoded(crop(number), kind))
            number += 1
    return root


def object_hashes(root: Path) -> dict[str, str]:
    """Give name -> sha256 of every file below a folder, hidden ones too."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
