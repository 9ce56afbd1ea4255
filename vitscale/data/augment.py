"""Which part of a picture an example shows."""

import math

import numpy as np

from vitscale.data.resample import Box

# Tries before the whole image is taken: default of TensorFlow's sample_distorted_bounding_box,
# which the paper's code calls without naming a number.
CROP_TRIES = 100
# Border of mirrored pixels around a simple crop's picture, px of the example.
_SIMPLE_PAD = 4


def inception_box(
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    rng: np.random.Generator,
) -> Box:
    """Draw the rectangle of an Inception crop.

    Aspect and height are uniform, so small areas are more likely than in torchvision's
    RandomResizedCrop, where the area is. After CROP_TRIES misses the whole image is taken. Unlike
    the original, the last row and column can be reached by a crop that is smaller than the image.

    Args:
        height: Rows of the image, px.
        width: Columns of the image, px.
        scale: Least and largest area as a fraction of the image's.
        ratio: Least and largest width / height of the crop.
        rng: Source of randomness; only `random()` is called, whose stream NumPy keeps.

    Returns:
        The rectangle, of whole pixels.

    Source:
        TensorFlow, op sample_distorted_bounding_box with min_object_covered = 0, as called by
        google-research/vision_transformer and big_vision (inception_crop).
    """
    least, most = scale[0] * height * width, scale[1] * height * width
    for _ in range(CROP_TRIES):
        aspect = ratio[0] + rng.random() * (ratio[1] - ratio[0])
        crop = _crop_size(height, width, (least, most), aspect, rng)
        if crop is not None:
            top = int(rng.random() * (height - crop[0] + 1))
            left = int(rng.random() * (width - crop[1] + 1))
            return Box(top, left, *crop)
    return Box(0, 0, height, width)


def part_box(height: int, width: int, ratio: float, rng: np.random.Generator) -> Box:
    """Draw a part of the picture of its own shape: squared, it is a square of the squared picture.

    Args:
        height: Rows of the image, px.
        width: Columns of the image, px.
        ratio: Side of the part over that of the whole, above 0 to 1.
        rng: Source of randomness; only `random()` is called.

    Returns:
        The rectangle, of whole pixels.

    Source:
        Random crop of the squared picture: arXiv:1912.11370, section 3.3.
    """
    rows, columns = (max(round(ratio * length), 1) for length in (height, width))
    top = int(rng.random() * (height - rows + 1))
    left = int(rng.random() * (width - columns + 1))
    return Box(top, left, rows, columns)


def simple_box(
    height: int, width: int, size: int, rng: np.random.Generator
) -> tuple[Box, tuple[int, int]]:
    """Draw the square of a simple random crop.

    The picture is thought of with its shorter side at `size` and a mirrored border of 4 px; a
    square of `size` lies anywhere in it. The square is moved back into the picture, so that its
    pixels alone need be resized.

    Args:
        height: Rows of the image, px.
        width: Columns of the image, px.
        size: Side of the example, px; more than 4.
        rng: Source of randomness; only `random()` is called.

    Returns:
        The square inside the image, which may begin between two pixels, and by how many px of the
        example, down and right, it was moved back: from -4 to 4.

    Source:
        "Simple random crop": arXiv:2204.07118 section 3; facebookresearch/deit, augment.py.
    """
    side = min(height, width)
    starts: list[float] = []
    shifts: list[int] = []
    for length in (height, width):
        free = max(length * size // side - size, 0)
        place = int(rng.random() * (free + 2 * _SIMPLE_PAD + 1)) - _SIMPLE_PAD
        inside = min(max(place, 0), free)
        # Across the longer side the last place ends at the last pixel.
        starts.append(inside / free * (length - side) if free else 0.0)
        shifts.append(place - inside)
    return Box(starts[0], starts[1], side, side), (shifts[0], shifts[1])


def _crop_size(
    height: int, width: int, area: tuple[float, float], aspect: float, rng: np.random.Generator
) -> tuple[int, int] | None:
    low = round(math.sqrt(area[0] / aspect))
    high = round(math.sqrt(area[1] / aspect))
    if round(high * aspect) > width:
        high = int((width + 0.5) / aspect)
        high -= round(high * aspect) > width
    high = min(high, height)
    low = min(low, high)
    rows = low + int(rng.random() * (high - low + 1))
    # Rounding can put the area just outside its limits; the neighbouring height may be inside.
    if rows * round(rows * aspect) < area[0]:
        rows += 1
    if rows * round(rows * aspect) > area[1]:
        rows -= 1
    columns = round(rows * aspect)
    fits = 0 < rows <= height and 0 < columns <= width
    return (rows, columns) if fits and area[0] <= rows * columns <= area[1] else None
