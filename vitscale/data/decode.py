"""From the stored bytes of an image to pixels, with Pillow.

One decoder for everything, so that the pixels of a sample do not depend on what else is installed;
torchvision's JPEG decoder was measured within 3 % of it. Damaged or truncated files are refused,
never patched up. A picture comes out as a viewer shows it: upright, in sRGB, white where
transparent. What the packer stores is like that already and passes through.
"""

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile

from vitscale.config.errors import DataError
from vitscale.data.pixels import orientation_of, plain, quiet_pillow, turned

# Pillow's own limit against decompression bombs (twice Image.MAX_IMAGE_PIXELS as shipped).
MAX_PIXELS = 178_956_970


def decode_rgb(data: bytes, in_chans: int) -> NDArray[np.uint8]:
    """Decode one image.

    Palettes are looked up, transparency lies over white, EXIF orientation and colour profiles are
    applied, CMYK is converted, 16-bit values keep their upper byte, and of an animation the first
    frame is taken.

    Args:
        data: The file's bytes: JPEG, PNG, WebP or whatever else Pillow reads.
        in_chans: 3 for RGB, 1 for luminance.

    Returns:
        Pixels by [row, column, channel]; the array may be read-only.

    Raises:
        DataError: The bytes are no whole image, or one of more than MAX_PIXELS.
        ValueError: in_chans is neither 1 nor 3.
    """
    if in_chans not in (1, 3):
        raise ValueError(f"in_chans = {in_chans}: images can be decoded to 1 or 3 channels")
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise RuntimeError("ImageFile.LOAD_TRUNCATED_IMAGES is set: damage would go unnoticed")
    try:
        with quiet_pillow():
            return _decode(data, in_chans)
    except (DataError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise DataError(f"the image is too big: {error}") from error
    except Exception as error:  # a damaged file can raise nearly anything out of Pillow's readers
        raise DataError(
            f"cannot decode {len(data)} bytes: {type(error).__name__}: {error}"
        ) from error


def _decode(data: bytes, in_chans: int) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(data)) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise DataError(
                f"the image is too big: {width} x {height} px are {width * height} pixels, "
                f"the limit is {MAX_PIXELS}"
            )
        image.load()
        mode = "RGB" if in_chans == 3 else "L"
        shown = plain(image)
        pixels = np.asarray(shown if shown.mode == mode else shown.convert(mode))
        # After loading: a PNG may have its EXIF behind its pixels.
        pixels = turned(pixels, orientation_of(image))
    return pixels if in_chans == 3 else pixels[:, :, None]
