"""One image on its way into a shard: its format, whether it is whole, the size it is kept at.

Names and extensions of inputs are not looked at. Nothing is decoded before its header has shown a
sane number of pixels. Whatever is wrong with an image is a `BadImageError` with a reason for the
ledger, `WORD: detail`.
"""

import io
import warnings
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from vitscale.data.pixels import is_plain, orientation_of, plain, turned

Check = Literal["none", "header", "full"]

# Ours: what Pillow itself starts to warn at (Image.MAX_IMAGE_PIXELS), 256 MiB of RGB.
MAX_PIXELS = 89_478_485
FORMATS = ("JPEG", "PNG", "WEBP")
# Pillow calls a JPEG with further pictures behind the first one MPO; the first is the image.
EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}
RESIZABLE_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")
# Real formats that are not taken as they are; their first bytes, for a clear reason in the ledger.
OTHER_FORMATS = {
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\x00": "TIFF",
    b"MM\x00*": "TIFF",
    b"\x00\x00\x00\x0cjP": "JPEG 2000",
    b"\xff\x0a": "JPEG XL",
    b"8BPS": "Photoshop",
}


class BadImageError(Exception):
    """An input that cannot be packed; the text is the ledger's reason."""


@dataclass(frozen=True)
class ImagePolicy:
    """How images are stored.

    Args:
        policy: "keep" stores the input's bytes; "resize" makes the shorter side at most `side` and
            stores JPEG.
        side: px.
        quality: JPEG quality, 1 to 100.
    """

    policy: Literal["keep", "resize"]
    side: int = 512
    quality: int = 90

    def describe(self) -> dict[str, Any]:
        """Give the fields that affect bytes, for plan and manifest."""
        if self.policy == "keep":
            return {"policy": "keep"}
        return {"policy": "resize", "side": self.side, "quality": self.quality}


@dataclass(frozen=True)
class Prepared:
    """An image as it goes into the shard."""

    data: bytes
    # "jpg", "png" or "webp"
    image_format: str
    # px, as stored (before any EXIF orientation)
    width: int
    height: int


def prepare_image(data: bytes, policy: ImagePolicy, check: Check) -> Prepared:
    """Check an image and bring it to its stored form.

    Args:
        data: The input's bytes.
        policy: keep or resize.
        check: "none" parses the header; "header" also looks for the end of the data and PNG's
            checksums, and decodes only where those are missing; "full" decodes.

    Raises:
        BadImageError: It cannot be packed.
    """
    image = _open(data)
    if policy.policy == "resize":
        return _resize(image, data, policy)
    if check == "full" or (check == "header" and not _is_whole(data, image.format)):
        _decode(image)
    return Prepared(data, EXTENSIONS[str(image.format)], *image.size)


def decode_fully(data: bytes) -> tuple[str, int, int]:
    """Decode an image to the last pixel; give its format ("jpg", ...), width and height.

    Raises:
        BadImageError: It cannot be decoded.
    """
    image = _open(data)
    width, height = image.size
    _decode(image)
    return EXTENSIONS[str(image.format)], width, height


def encode_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Encode a grey (h, w) or RGB (h, w, 3) array."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def _open(data: bytes) -> Image.Image:
    if not data:
        raise BadImageError("empty: zero bytes")
    _refuse_other_content(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd metadata is no reason to refuse pixels
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise BadImageError(f"too_large: {error}") from error
        except (
            Exception
        ) as error:  # a parser may raise anything on hostile bytes: each is a verdict on this input
            word = _word_for(error)
            raise BadImageError(f"{word}: the header cannot be parsed ({_brief(error)})") from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadImageError(f"too_large: {width} x {height} px, the limit is {MAX_PIXELS} px")
    return image


def _refuse_other_content(data: bytes) -> None:
    if data.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")):
        return
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return
    for magic, name in OTHER_FORMATS.items():
        if data.startswith(magic):
            raise BadImageError(f"unsupported: {name}; JPEG, PNG and WebP are taken")
    if data[4:8] == b"ftyp":
        raise BadImageError("unsupported: HEIF or AVIF; JPEG, PNG and WebP are taken")
    raise BadImageError(f"not_an_image: starts with {data[:16]!r}")


def _is_whole(data: bytes, image_format: str | None) -> bool:
    """Tell whether the end of the data is there; False asks for a decode to find out."""
    if image_format in ("JPEG", "MPO"):
        return _jpeg_has_end(data)
    if image_format == "PNG":
        return _png_has_end(data)
    # RIFF: the size after the four letters counts everything behind itself.
    return int.from_bytes(data[4:8], "little") + 8 <= len(data)


def _jpeg_has_end(data: bytes) -> bool:
    # Up to the first scan, segments give their length; thumbnails with end markers of their own lie
    # inside them.
    position = 2
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:
            position += 1
            continue
        if marker == 0xDA:
            return data.rfind(b"\xff\xd9", position) >= 0
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return False


def _png_has_end(data: bytes) -> bool:
    position, view = 8, memoryview(data)
    while position + 12 <= len(data):
        length = int.from_bytes(view[position : position + 4], "big")
        end = position + 12 + length
        if end > len(data):
            return False
        kind = bytes(view[position + 4 : position + 8])
        checksum = int.from_bytes(view[end - 4 : end], "big")
        # A capital letter first: the chunk is needed for the pixels. Decoders skip the checksum of
        # the others too.
        if kind[:1].isupper() and zlib.crc32(view[position + 4 : end - 4]) != checksum:
            raise BadImageError(f"corrupt: wrong checksum of PNG chunk {kind!r} at byte {position}")
        if kind == b"IEND":
            return True
        position = end
    return False


def _decode(image: Image.Image) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image.load()
        except Exception as error:  # as in _open
            raise BadImageError(f"{_word_for(error)}: {_brief(error)}") from error


def _resize(image: Image.Image, data: bytes, policy: ImagePolicy) -> Prepared:
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise BadImageError("unsupported: more than one frame")
    if image.mode not in RESIZABLE_MODES:
        raise BadImageError(f"unsupported: pixels of kind {image.mode}")
    width, height = image.size
    scale = policy.side / min(width, height)
    if scale < 1:
        width, height = max(1, round(width * scale)), max(1, round(height * scale))
        # libjpeg scales by 1/2, 1/4, 1/8 while it decodes; staying at twice the target keeps the
        # result sharp.
        image.draft(None, (2 * width, 2 * height))
    _decode(image)
    # After decoding: to find a PNG's EXIF, Pillow decodes, and an error of that must not be lost.
    orientation = orientation_of(image)
    if scale >= 1 and orientation == 1 and is_plain(image):
        return Prepared(data, EXTENSIONS[str(image.format)], width, height)
    pixels = plain(image)
    if pixels.size != (width, height):
        pixels = pixels.resize((width, height), Image.Resampling.BICUBIC)
    pixels = turned(pixels, orientation)
    out = io.BytesIO()
    pixels.save(out, "JPEG", quality=policy.quality, subsampling="4:2:0")
    return Prepared(out.getvalue(), "jpg", *pixels.size)


def _word_for(error: Exception) -> str:
    return "truncated" if "truncated" in str(error).lower() else "corrupt"


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200].replace("\n", " ")
