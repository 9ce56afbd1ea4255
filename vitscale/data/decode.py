"""From the stored bytes of an image to pixels, with Pillow: the reference of picture.py.

A picture comes out as a viewer shows it: upright, in sRGB, white where transparent. What the packer
stores is like that already and passes through. Truncated files are refused, never patched up;
damage inside a JPEG's codes, which Pillow does not tell, is found by the compiled decoder only.
"""

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, JpegImagePlugin

from vitscale.config.errors import DataError
from vitscale.data.pixels import orientation_of, plain, quiet_pillow, turned

# Pillow's own limit against decompression bombs (twice Image.MAX_IMAGE_PIXELS as shipped).
MAX_PIXELS = 178_956_970

# Width and height in px, components, bits of a value, and (marker, body) of the APPn segments.
JpegHeader = tuple[int, int, int, int, list[tuple[int, bytes]]]


def decode_rgb(data: bytes, in_chans: int, eighths: int = 8) -> NDArray[np.uint8]:
    """Decode one image.

    Palettes are looked up, transparency lies over white, EXIF orientation and colour profiles are
    applied, CMYK is converted, 16-bit values keep their upper byte, and of an animation the first
    frame is taken.

    Args:
        data: The file's bytes: JPEG, PNG, WebP or whatever else Pillow reads.
        in_chans: 3 for RGB, 1 for luminance.
        eighths: Decode a JPEG at that many eighths of its sides, rounded up: 1, 2, 4 or 8. Both
            sides come out as 1 px or more before rounding. Other formats stay as they are.

    Returns:
        Pixels by [row, column, channel]; the array may be read-only.

    Raises:
        DataError: The bytes are no whole image, or one of more than MAX_PIXELS.
        ValueError: in_chans is neither 1 nor 3, or eighths is none of its values.
    """
    if in_chans not in (1, 3):
        raise ValueError(f"in_chans = {in_chans}: images can be decoded to 1 or 3 channels")
    if eighths not in (1, 2, 4, 8):
        raise ValueError(f"eighths = {eighths}: a JPEG can be decoded at 1, 2, 4 or 8 eighths")
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise RuntimeError("ImageFile.LOAD_TRUNCATED_IMAGES is set: damage would go unnoticed")
    try:
        with quiet_pillow():
            return _decode(data, in_chans, eighths)
    except (DataError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise DataError(f"the image is too big: {error}") from error
    except Exception as error:  # a damaged file can raise nearly anything out of Pillow's readers
        raise DataError(
            f"cannot decode {len(data)} bytes: {type(error).__name__}: {error}"
        ) from error


def check_size(width: int, height: int) -> None:
    """Refuse a picture of more than MAX_PIXELS pixels.

    Raises:
        DataError: It has more.
    """
    if width * height > MAX_PIXELS:
        raise DataError(
            f"the image is too big: {width} x {height} px are {width * height} pixels, "
            f"the limit is {MAX_PIXELS}"
        )


def jpeg_header(data: bytes) -> JpegHeader:
    """Read the header of a JPEG.

    Raises:
        ValueError: It has none that Pillow understands.
    """
    try:
        with quiet_pillow(), Image.open(io.BytesIO(data)) as image:
            if not isinstance(image, JpegImagePlugin.JpegImageFile):
                raise ValueError(f"a {image.format} file, not a JPEG")
            segments = [(0xE0 + int(name[3:]), body) for name, body in image.applist]
            return *image.size, image.layers, image.bits, segments
    except Exception as error:  # as in decode_rgb
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _decode(data: bytes, in_chans: int, eighths: int) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(data)) as image:
        width, height = image.size
        check_size(width, height)
        if eighths < 8:
            # Pillow takes the smallest scale that still gives this size.
            part = max(width * eighths // 8, 1), max(height * eighths // 8, 1)
            image.draft(None, part)
        image.load()
        mode = "RGB" if in_chans == 3 else "L"
        shown = plain(image)
        pixels = np.asarray(shown if shown.mode == mode else shown.convert(mode))
        # After loading: a PNG may have its EXIF behind its pixels.
        pixels = turned(pixels, orientation_of(image))
    return pixels if in_chans == 3 else pixels[:, :, None]
