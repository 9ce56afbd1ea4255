"""From the stored bytes of an image to the square uint8 example that a model is fed.

A plain JPEG (8 bits, grey or three components, upright, its colours those of sRGB) takes the fast
path where the C extension is built: the part that the example needs is decoded and resized in one
go. Everything else is decoded by the reference decoder. Both make the same pixels, bit for bit, so
that a run does not depend on what a machine could compile. Normalisation is not done here; it
happens on the training device.

Legend: H W rows and columns of the picture, C channels, S side of the example in px.
"""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitscale.config.errors import DataError
from vitscale.config.recipe import AugmentConfig
from vitscale.data import resample
from vitscale.data.augment import inception_box, part_box, simple_box
from vitscale.data.decode import JpegHeader, check_size, decode_rgb, jpeg_header
from vitscale.data.image_ops import augment_example
from vitscale.data.pixels import orientation_in, to_srgb
from vitscale.data.resample import Box

try:
    from vitscale.data import _pixels
except ImportError:  # not built: no compiler or no libjpeg-turbo where vitscale was installed
    fast_path = False
else:
    fast_path = True

_START, _END = b"\xff\xd8", b"\xff\xd9"
_APP1, _APP2 = 0xE1, 0xE2
_EXIF, _PROFILE = b"Exif\0\0", b"ICC_PROFILE\0"

JpegScale = Literal["exact", "fast"]
Pixels = NDArray[np.uint8]


def train_example(
    data: bytes,
    out: Pixels,
    augment: AugmentConfig,
    jpeg_scale: JpegScale,
    rng: np.random.Generator,
    compiled: bool = fast_path,
) -> None:
    """Make the training example of one image.

    Args:
        data: The image file.
        out: The example by [C, S, S], C-contiguous; overwritten.
        augment: Which crop, how it is resized, how often to flip, and what is done afterwards.
        jpeg_scale: "exact" decodes at full size; "fast" decodes a JPEG at the smallest of 1/8, 1/4
            and 1/2 that leaves S px or more on both sides of the crop, if there is one.
        rng: The randomness of this example alone.
        compiled: Use the C extension; the pixels are the same without.

    Raises:
        DataError: The bytes are no whole image, or one with too many pixels. The compiled decoder
            looks no further than to the last row that it needs.
    """
    # Drawn first, so that the flip does not depend on how many crops were tried.
    flip = bool(rng.random() < augment.hflip)

    size = _plain_jpeg(data, compiled) if compiled or jpeg_scale == "fast" else None
    if size is None:
        pixels = decode_rgb(data, len(out))
        height, width = pixels.shape[:2]
        box, shift = _crop(height, width, out.shape[1], augment, rng)
        _resize(pixels, box, out, flip, augment.antialias, compiled)
    else:
        box, shift = _crop(*size, out.shape[1], augment, rng)
        eighths = _eighths(box, out.shape[1]) if jpeg_scale == "fast" else 8
        _decode_part(data, eighths, box, out, flip, augment.antialias, compiled)
    if shift != (0, 0):
        _shift(out, shift[0], -shift[1] if flip else shift[1])
    augment_example(out, augment, rng)


def _crop(
    height: int, width: int, size: int, augment: AugmentConfig, rng: np.random.Generator
) -> tuple[Box, tuple[int, int]]:
    """Draw what an example shows, and by how many px of its own it goes on beyond the border."""
    if augment.train_crop == "simple":
        return simple_box(height, width, size, rng)
    if augment.train_crop == "resize":
        return Box(0, 0, height, width), (0, 0)
    if augment.train_crop == "resize_crop":
        return part_box(height, width, augment.resize_crop_ratio, rng), (0, 0)
    return inception_box(height, width, augment.crop_scale, augment.crop_ratio, rng), (0, 0)


def _shift(out: Pixels, down: int, right: int) -> None:
    """Move the part that an example shows, px; what it has not is mirrored at its border."""
    last = out.shape[1] - 1
    rows, columns = (last - abs(last - abs(np.arange(last + 1) + by)) for by in (down, right))
    out[:] = out.take(rows, axis=1).take(columns, axis=2)


def eval_example(
    data: bytes, out: Pixels, augment: AugmentConfig, compiled: bool = fast_path
) -> None:
    """Make the evaluation example of one image; nothing is random.

    Args:
        data: The image file.
        out: The example by [C, S, S], C-contiguous; overwritten.
        augment: eval_crop "resize": the whole image, squared. "center": the shorter side is brought
            to S / eval_crop_ratio, averaging areas where that shrinks and bilinear where it
            enlarges, then the middle is cut out.
        compiled: Use the C extension; the pixels are the same without.

    Raises:
        DataError: The bytes are no whole image, or one with too many pixels.

    Source:
        Square resize: google-research/vision_transformer. Shorter side to 256 by area, centre crop
        224: big_vision, resize_small and central_crop.
    """
    pixels = decode_rgb(data, len(out))
    height, width = pixels.shape[:2]
    if augment.eval_crop == "resize":
        _resize(pixels, Box(0, 0, height, width), out, False, augment.antialias, compiled)
        return
    size = out.shape[1]
    factor = round(size / augment.eval_crop_ratio) / min(height, width)
    new_height, new_width = max(round(height * factor), 1), max(round(width * factor), 1)
    kind = Image.Resampling.BOX if factor < 1 else Image.Resampling.BILINEAR
    mode_pixels: Any = pixels if pixels.shape[2] == 3 else pixels[:, :, 0]
    image = Image.fromarray(mode_pixels).resize((new_width, new_height), kind)
    top, left = (new_height - size) // 2, (new_width - size) // 2
    middle = np.asarray(image.crop((left, top, left + size, top + size)))
    out[:] = middle.reshape(size, size, -1).transpose(2, 0, 1)


def _plain_jpeg(data: bytes, compiled: bool) -> tuple[int, int] | None:
    """Give height and width of a plain JPEG, px; None: the reference decoder is to judge.

    A file without its end marker may be truncated, which only a look at all of it can tell.
    """
    if not (data.startswith(_START) and data.endswith(_END)):
        return None
    try:
        header: JpegHeader = _pixels.header(data) if compiled else jpeg_header(data)
    except ValueError:
        return None
    width, height, components, precision, segments = header
    if components not in (1, 3) or precision != 8:
        return None
    if segments and not _is_shown_as_stored(segments, "L" if components == 1 else "RGB"):
        return None
    check_size(width, height)
    return height, width


def _is_shown_as_stored(segments: list[tuple[int, bytes]], mode: str) -> bool:
    """Whether metadata leave the pixels as they are, by the judgement of the reference decoder."""
    blocks = [body for marker, body in segments if marker == _APP1 and body.startswith(_EXIF)]
    exif = b"".join(body[len(_EXIF) :] for body in blocks)
    if orientation_in(exif) != 1:
        return False
    parts = sorted(
        body for marker, body in segments if marker == _APP2 and body.startswith(_PROFILE)
    )
    # Behind the name: number of the part, number of parts. An incomplete profile is ignored.
    after = len(_PROFILE)
    if not parts or len(parts[0]) <= after + 1 or parts[0][after + 1] != len(parts):
        return True
    return to_srgb(b"".join(part[after + 2 :] for part in parts), mode) is None


def _eighths(box: Box, size: int) -> int:
    """Give the smallest scale that leaves enough pixels; 3, 5, 6 and 7 eighths are slower than 8.

    libjpeg-turbo has vector code for 8, 4 and 2 only: at 6 eighths, whole pictures of 500 x 375 px
    took 1.3 times as long as at full size.
    """
    side = min(box.height, box.width)
    return next((n for n in (1, 2, 4) if side * n >= 8 * size), 8)


def _decode_part(
    data: bytes,
    eighths: int,
    box: Box,
    out: Pixels,
    flip: bool,
    antialias: bool,
    compiled: bool,
) -> None:
    """Make an example of a rectangle, px at full size, of a plain JPEG."""
    try:
        if compiled and _pixels.example(data, eighths, *box, out, flip, antialias):
            return
    except ValueError as error:
        raise DataError(f"cannot decode {len(data)} bytes: {error}") from error
    # Also for a progressive file with scans missing: versions of libjpeg differ in what they show.
    pixels = decode_rgb(data, len(out), eighths)
    part = Box(*(side * eighths / 8 for side in box))
    _resize(pixels, part, out, flip, antialias, compiled)


def _resize(
    pixels: Pixels, box: Box, out: Pixels, flip: bool, antialias: bool, compiled: bool
) -> None:
    if compiled:
        _pixels.resize(np.ascontiguousarray(pixels), *box, out, flip, antialias)
    else:
        resample.resize(pixels, box, out, flip, antialias)
