"""Pictures that are all different, however many: patchworks of crops of two photographs."""

import io
from itertools import pairwise

import numpy as np
from PIL import Image, ImageOps

from tests.helpers.corpus import photos


def collage(seed: int, side: int = 160) -> Image.Image:
    """Make a picture of three by three pieces, each from another place, scaled and tinted."""
    rng = np.random.default_rng(seed)
    sheet = Image.new("RGB", (side, side))
    edges = [0, *sorted(rng.integers(side // 5, 4 * side // 5, 2).tolist()), side]
    for top, bottom in pairwise(edges):
        for left, right in pairwise(edges):
            if right <= left or bottom <= top:
                continue
            photo = photos()[int(rng.integers(2))]
            size = int(rng.integers(40, 300))
            y = int(rng.integers(0, photo.shape[0] - size))
            x = int(rng.integers(0, photo.shape[1] - size))
            piece = photo[y : y + size, x : x + size] * rng.uniform(0.3, 1.0, 3)
            image = Image.fromarray(piece.astype(np.uint8)).resize((right - left, bottom - top))
            sheet.paste(image, (left, top))
    return sheet


def saved(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def copies(data: bytes, seed: int) -> dict[str, bytes]:
    """Give copies of an image file by kind: exact, encoded, resized, cropped and flipped."""
    rng = np.random.default_rng(seed)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    width, height = image.size
    share = rng.uniform(0.4, 0.9)
    cut = rng.uniform(0.05, 0.1)
    box = (int(width * cut), int(height * cut / 2), width, height - int(height * cut / 2))
    return {
        "exact": saved(image, "PNG"),
        "encoded": saved(image, quality=int(rng.integers(50, 91))),
        "resized": saved(image.resize((int(width * share), int(height * share))), quality=90),
        "flipped": saved(ImageOps.mirror(image), quality=90),
        "cropped": saved(ImageOps.mirror(image.crop(box)), quality=90),
    }
