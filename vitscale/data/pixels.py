"""What a picture looks like when it is shown: upright, 8 bits, sRGB, nothing transparent.

The packer applies it where it makes new pixels, the decoder where the stored ones are as they were.
"""

import contextlib
import io
import threading
import warnings
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms

WHITE = (255, 255, 255)

_EXIF_ORIENTATION = 0x0112
# TIFF field type -> bytes of one value: BYTE, SHORT, LONG (TIFF 6.0, section 2)
_WIDTHS = {1: 1, 3: 2, 4: 4}
# Pillow's mode -> what a picture becomes before transparency and colours are dealt with
_BASES = {"1": "L", "L": "L", "LA": "L", "CMYK": "CMYK"}
_BASES |= dict.fromkeys(("P", "PA", "RGB", "RGBA", "RGBX", "YCbCr", "HSV"), "RGB")
# ICC colour space (ICC.1:2022, table 19) -> Pillow mode that it describes
_SPACES = {b"GRAY": "L", b"RGB ": "RGB", b"CMYK": "CMYK"}
# A profile that moves no colour by more than this, of 255, is sRGB for us. Plain gamma 2.2 is 9
# away in the deepest shadows and 2 in the mean of greys, gamma 2.4 is 13 and 6, Adobe RGB 102.
_MAX_SHIFT, _MEAN_SHIFT = 10, 3


class UnknownPixelsError(ValueError):
    """There is no rule how to show pixels of this kind."""


def orientation_in(exif: bytes) -> int:
    """Find the EXIF orientation, 1 to 8; 1 (upright) where there is none or it is damaged.

    Only this one entry is looked at: nonsense in any other says nothing about it.

    Args:
        exif: What follows the marker: TIFF data, with or without the leading "Exif".
    """
    start = 6 if exif[:6] == b"Exif\0\0" else 0
    byte_order = exif[start : start + 2]
    if byte_order not in (b"II", b"MM"):
        return 1
    order = "little" if byte_order == b"II" else "big"

    def number(position: int, width: int) -> int:
        return int.from_bytes(exif[position : position + width], order)  # type: ignore[arg-type]

    entries = start + number(start + 4, 4)
    first, count = entries + 2, number(entries, 2)
    for entry in range(first, min(first + 12 * count, len(exif) - 11), 12):
        if number(entry, 2) == _EXIF_ORIENTATION:
            value = number(entry + 8, _WIDTHS.get(number(entry + 2, 2), 0))
            return value if 1 <= value <= 8 else 1
    return 1


def orientation_of(image: Image.Image) -> int:
    """EXIF orientation of a loaded image; 1 for TIFF, which Pillow turns while it loads."""
    exif = image.info.get("exif")
    return orientation_in(exif) if exif and image.format != "TIFF" else 1


def turned(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Turn pixels by [row, column, ...] of that orientation upright; a new array if at all."""
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def plain(image: Image.Image, background: tuple[int, int, int] = WHITE) -> Image.Image:
    """Turn a loaded image of any mode into L or RGB; not yet upright.

    Args:
        image: Values of 16 bits keep their upper byte; a colour profile is applied, and ignored
            where it is damaged or meant for other pixels.
        background: RGB behind what is transparent.

    Raises:
        UnknownPixelsError: There is no rule how to show them, such as floating-point values.
    """
    profile = image.info.get("icc_profile") or b""
    if image.mode in ("L", "RGB") and not profile and "transparency" not in image.info:
        return image
    if image.mode.startswith(("I", "F")):
        image = _upper_bytes(image)
    elif image.mode in ("RGBa", "La"):
        image = image.convert(image.mode.upper())
    if image.mode not in _BASES:
        raise UnknownPixelsError(f"pixels of mode {image.mode}")
    alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
    shown = _in_srgb(image.convert(_BASES[image.mode]), profile)
    if alpha is None:
        return shown
    canvas = Image.new("RGB", image.size, background)
    canvas.paste(shown, mask=alpha)
    return canvas


def _upper_bytes(image: Image.Image) -> Image.Image:
    # Pillow's own conversion clips 16-bit grey at 255 in some modes, which turns it white.
    values = np.asarray(image)
    if image.mode == "F" or values.min() < 0 or values.max() > 65_535:
        raise UnknownPixelsError(f"grey values of mode {image.mode} that are not of 8 or 16 bits")
    grey = Image.fromarray((values >> 8).astype(np.uint8))
    hidden = image.info.get("transparency")
    if isinstance(hidden, int):
        opaque = Image.fromarray(np.where(values == hidden, 0, 255).astype(np.uint8))
        return Image.merge("LA", (grey, opaque))
    return grey


def _in_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    transform = to_srgb(profile, image.mode) if profile else None
    if transform is None:
        return image.convert("RGB") if image.mode == "CMYK" else image
    shown = transform.apply(image)
    return shown.getchannel("G") if image.mode == "L" else shown


@lru_cache(maxsize=16)
def to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Build the way from a colour profile to sRGB; None where pixels are to stay as they are.

    They stay if the profile cannot be read, is for another kind of pixels, or is all but sRGB.

    Args:
        profile: ICC profile.
        mode: Of the pixels: L, RGB or CMYK.
    """
    if _SPACES.get(profile[16:20]) != mode:
        return None
    try:
        transform = ImageCms.buildTransform(
            ImageCms.ImageCmsProfile(io.BytesIO(profile)),
            ImageCms.createProfile("sRGB"),
            mode,
            "RGB",
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
            ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
    except (ImageCms.PyCMSError, OSError):  # viewers ignore a profile that they cannot read
        return None
    if mode == "CMYK":
        return transform
    before = _lattice(mode)
    after = transform.apply(before)
    shift = np.abs(np.asarray(before.convert("RGB"), int) - np.asarray(after, int))
    return transform if shift.max() > _MAX_SHIFT or shift.mean() > _MEAN_SHIFT else None


def _lattice(mode: str) -> Image.Image:
    if mode == "L":
        return Image.fromarray(np.arange(256, dtype=np.uint8)[None])
    steps = np.arange(0, 256, 51, dtype=np.uint8)
    return Image.fromarray(np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(1, -1, 3))


class _Quiet:
    """Silences Pillow's warnings while any thread is inside.

    `warnings.catch_warnings` alone is for one thread: the first to leave would take the silence
    away from the others, and the last would leave it behind.
    """

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._filters = warnings.catch_warnings()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._filters = warnings.catch_warnings()
                self._filters.__enter__()
                warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
                warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._filters.__exit__(None, None, None)


# Pillow warns of big images below our limit and of odd metadata; neither is damage.
quiet_pillow = _Quiet()
