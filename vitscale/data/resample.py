"""Resizing a rectangle of a picture to a square, in NumPy: the rule that the C extension follows.

Used where the extension is not built, and to test it: both give the same bits. So all weights are
computed in float64 and rounded once, pixels are added in float32, rows before columns and source
places in rising order, and nothing is left to a library that may add in another order.

Legend: H W rows and columns of the picture, C channels, S side of the example in px.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
Values = NDArray[np.float32]


class Box(NamedTuple):
    """A rectangle of a picture, px; pixel i covers i .. i + 1."""

    top: float
    left: float
    height: float
    width: float


@dataclass(frozen=True)
class Taps:
    """Which source places each output place is made of.

    Args:
        start: [S] first source place.
        weight: [S, n] float32 weights of the places from there on; they sum to 1.
    """

    start: NDArray[np.int64]
    weight: Values


def taps(start: float, length: float, size: int, num_places: int, antialias: bool) -> Taps:
    """Weigh the source places of output places that are laid evenly over a stretch.

    A stretch is treated as a picture of its own: places beyond the pixels that it touches do not
    count, and the weights of the others grow accordingly.

    Args:
        start: Where the stretch starts, px.
        length: Its length, px.
        size: Output places.
        num_places: Source places of the picture.
        antialias: Average under a triangle as wide as the picture shrinks; otherwise interpolate
            between the two nearest places.

    Returns:
        The weights.

    Source:
        Pillow's and torchvision's antialiased BILINEAR; without antialiasing, tf.image.resize.
    """
    first, last = int(start), min(int(np.ceil(start + length)), num_places)
    scale = length / size
    centre = start + (np.arange(size) + 0.5) * scale
    if not antialias:
        place = np.maximum(centre - 0.5, first)
        start_at = np.minimum(place.astype(np.int64), last - 1)
        rest = np.where(start_at < last - 1, place - start_at, 0.0)
        return Taps(start_at, np.stack([1.0 - rest, rest], axis=1).astype(np.float32))
    reach = max(scale, 1.0)
    start_at = np.maximum((centre - reach + 0.5).astype(np.int64), first)
    end = np.minimum((centre + reach + 0.5).astype(np.int64), last)
    places = start_at[:, None] + np.arange((end - start_at).max())
    heights = np.maximum(1.0 - np.abs(places - centre[:, None] + 0.5) / reach, 0.0)
    heights[places >= end[:, None]] = 0.0
    total = np.zeros(size)
    for column in heights.T:  # np.sum adds in another order
        total += column
    return Taps(start_at, (heights / total[:, None]).astype(np.float32))


def resize(pixels: Pixels, box: Box, out: Pixels, flip: bool, antialias: bool) -> None:
    """Resize a rectangle of a picture to a square.

    Args:
        pixels: The picture by [H, W, C].
        box: The rectangle; it lies inside.
        out: The square by [C, S, S]; overwritten.
        flip: Mirror left and right.
        antialias: As in `taps`.

    Raises:
        ValueError: The rectangle is not inside, or the channels differ.
    """
    height, width, channels = pixels.shape
    inside = box.top >= 0 and box.left >= 0 and box.height > 0 and box.width > 0
    if not (inside and box.top + box.height <= height and box.left + box.width <= width):
        raise ValueError(f"{box} is not inside a picture of {width} x {height} px")
    if channels != len(out):
        raise ValueError(f"pixels of {channels} channels do not fit an example of {len(out)}")
    size = out.shape[1]
    down = taps(box.top, box.height, size, height, antialias)
    across = taps(box.left, box.width, size, width, antialias)
    left, right = int(box.left), min(int(np.ceil(box.left + box.width)), width)
    rows = _weighed(pixels[:, left:right].astype(np.float32), down)
    columns = Taps(across.start - left, across.weight)
    square = _weighed(rows.swapaxes(0, 1), columns)  # [column, row, channel]
    rounded = (square + np.float32(0.5)).astype(np.uint8).transpose(2, 1, 0)
    out[:] = rounded[:, :, ::-1] if flip else rounded


def _weighed(values: Values, weights: Taps) -> Values:
    """Combine slices along the first axis."""
    shape = (-1,) + (1,) * (values.ndim - 1)
    total = np.zeros((len(weights.start), *values.shape[1:]), dtype=np.float32)
    for number, weight in enumerate(weights.weight.T):
        # Where the weight is 0, the place may be beyond the last.
        places = np.minimum(weights.start + number, len(values) - 1)
        total += values[places] * weight.reshape(shape)
    return total
