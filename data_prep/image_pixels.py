"""From encoded images to pixels and back: whole or not at all, sized, in the colours shown.

JPEG goes through simplejpeg and sizes through OpenCV, which both let other threads run; what they
do not read goes through Pillow.
"""

import io
import re
from functools import cache
from types import ModuleType

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

from data_prep.image_headers import Header
from data_prep.jpeg_header import EOI
from data_prep.verdict import BadInputError
from vitscale.data.pixels import UnknownPixelsError, plain, quiet_pillow

Pixels = npt.NDArray[np.uint8]

_PILLOW_FORMATS = {
    "jpg": ("JPEG", "MPO"),
    "png": ("PNG",),
    "webp": ("WEBP",),
    "gif": ("GIF",),
    "bmp": ("BMP",),
    "tiff": ("TIFF",),
}
_LOSSY_TIFF = ("jpeg", "tiff_jpeg", "webp")
# Up to this ratio of sizes; from measured distances to full decoding and averaging.
_NEAR = 1.35
_NO_END = "Premature end of JPEG file"
_STRAY_BYTES = re.compile(r"Corrupt JPEG data: (\d+) extraneous bytes before marker 0xd9")


def decode_jpeg(
    data: bytes, header: Header, eighths: int = 8, in_grey: bool = False
) -> tuple[Pixels | None, bytes]:
    """Decode a JPEG at full size or, faster, at a fraction that its transform has.

    Any sign of damage in the scans is an error. Bytes that a decoder skips right before the end
    marker are none, and neither is a missing end marker if every pixel is there.

    Args:
        data: The JPEG.
        header: Its header.
        eighths: Of the sides, rounded up: 1, 2, 4 or 8.
        in_grey: Leave the colours out.

    Returns:
        Pixels by [row, column, 1 or 3]; None if the decoder does not know files of this kind, or
        stumbles over something odd in their headers. The bytes, with an end marker if it was
        missing.

    Raises:
        BadInputError: Pixels are missing or damaged.
    """
    colours = "GRAY" if in_grey or header.mode == "L" else "RGB"
    min_height, min_width = -(-header.height * eighths // 8), -(-header.width * eighths // 8)
    stored = stream = data
    for _ in range(4):
        try:
            pixels: Pixels = simplejpeg.decode_jpeg(
                stream, colours, min_height=min_height, min_width=min_width
            )
            return pixels, stored
        except ValueError as error:
            message = str(error)
        stray = _STRAY_BYTES.match(message)
        if message == _NO_END and stream is data:
            stored = stream = data + EOI
        elif stray:
            # Without them the decoder must have nothing more to say.
            stream = stream[: stream.rfind(EOI) - int(stray[1])] + EOI
        elif message == _NO_END or "premature end" in message:
            raise header.bad(f"truncated: {message}")
        elif message.startswith("Corrupt JPEG data"):
            raise header.bad(f"corrupt: {message}")
        else:  # libjpeg tells its first warning only: odd headers may hide damage behind them
            return None, data
    raise header.bad(f"corrupt: {message}")


def check_pixels(data: bytes, header: Header) -> bytes:
    """Decode an image to see that it is whole.

    Returns:
        Its bytes, with the end marker if only that was missing.

    Raises:
        BadInputError: It is not.
    """
    if header.image_format == "jpg":
        # An eighth of the size: every code is still read, and most of the arithmetic is not done.
        pixels, stored = decode_jpeg(data, header, 1, in_grey=True)
        if pixels is not None:
            return stored
    _loaded(data, header)
    return data


def decode_any(
    data: bytes, header: Header, background: tuple[int, int, int]
) -> tuple[Pixels, Header]:
    """Decode the first picture of a file with Pillow, in the colours shown but not yet turned.

    Returns:
        Grey (h, w) or RGB (h, w, 3); the header, with what only Pillow can tell.

    Raises:
        BadInputError: It is damaged or of a kind that is not read.
    """
    if header.image_format == "jpg":  # Pillow shows grey where a scan breaks off
        _, data = decode_jpeg(data, header, 1, in_grey=True)
    image = _loaded(data, header)
    try:
        with quiet_pillow():
            header = _completed(header, image)
            pixels = np.asarray(plain(image, background))
    except UnknownPixelsError as error:
        raise header.bad(f"unsupported: {error}") from error
    except Exception as error:  # as in _opened
        raise _verdict(header, error) from error
    size = (header.width, header.height)
    if header.image_format == "tiff" and header.orientation >= 5:  # Pillow has turned it
        size = size[::-1]
    if (pixels.shape[1], pixels.shape[0]) != size:
        found = f"{pixels.shape[1]} x {pixels.shape[0]} px"
        raise header.bad(f"corrupt: decodes to {found}, not to {size[0]} x {size[1]} px")
    return pixels, header


def read_tiff(data: bytes) -> Header:
    """Read a TIFF's first page; it is never stored as it is.

    Raises:
        BadInputError: It is damaged, or a camera's raw file.
    """
    header = Header("tiff", 0, 0, ("format",), lossless=True)
    image = _opened(data, header)
    tags = image.tag_v2  # type: ignore[attr-defined]
    width, height = tags.get(256), tags.get(257)
    if not isinstance(width, int) or not isinstance(height, int):
        raise header.bad("corrupt: the TIFF does not say its size")
    header = header._replace(width=width, height=height)
    if tags.get(254, 0) == 1:  # NewSubfileType: a reduced version of another picture
        raise header.bad("unsupported: TIFF that begins with a preview, such as camera raw files")
    orientation = tags.get(274, 1)
    return header._replace(
        orientation=orientation if orientation in range(1, 9) else 1,
        lossless=image.info.get("compression") not in _LOSSY_TIFF,
    )


def eighths_for(header: Header, width: int, height: int) -> int:
    """Give the smallest fraction to decode a JPEG at that is not below a size.

    The other eighths that libjpeg-turbo offers take as long as the next of these, or longer.
    """
    for eighths in (1, 2, 4):
        if header.width * eighths >= 8 * width and header.height * eighths >= 8 * height:
            return eighths
    return 8


def resized(
    pixels: Pixels, width: int, height: int, extent: tuple[float, float] | None = None
) -> Pixels:
    """Make a picture smaller: each pixel becomes the mean of the area that it covers.

    Args:
        pixels: By [row, column, ...].
        width: px, not above the picture's.
        height: px, likewise.
        extent: Columns and rows that the picture really fills, where it was decoded at a fraction
            of its size and the last ones only partly belong to it; without this it would shift
            by up to half a pixel.
    """
    columns, rows = extent or (pixels.shape[1], pixels.shape[0])
    if (columns, rows) == (width, height):
        return pixels
    cv2 = _opencv()
    # Decoding at a fraction was a mean already; one more over hardly more than a pixel would blur.
    is_averaged = extent is not None and columns < _NEAR * width
    how = cv2.INTER_CUBIC if is_averaged else cv2.INTER_AREA
    small: Pixels = cv2.resize(
        pixels, None, fx=width / columns, fy=height / rows, interpolation=how
    )
    return small[:height, :width]


def recoloured(pixels: Pixels, profile: bytes) -> Pixels:
    """Bring grey or RGB pixels with a colour profile to sRGB."""
    image = Image.fromarray(_flat(pixels))
    image.info["icc_profile"] = profile
    return np.asarray(plain(image))


def encode_jpeg(pixels: Pixels, quality: int, subsampling: str) -> bytes:
    """Encode grey (h, w) or RGB (h, w, 3) pixels.

    Args:
        pixels: 8 bits.
        quality: 1 to 100.
        subsampling: Of the colours: "444" or "420".
    """
    grey = pixels.ndim == 2 or pixels.shape[2] == 1
    pixels = np.ascontiguousarray(pixels.reshape(*pixels.shape[:2], 1 if grey else 3))
    data: bytes = simplejpeg.encode_jpeg(
        pixels, quality, "GRAY" if grey else "RGB", "Gray" if grey else subsampling
    )
    return data


def encode_webp(pixels: Pixels, quality: int) -> bytes:
    """Encode grey (h, w) or RGB (h, w, 3) pixels."""
    out = io.BytesIO()
    Image.fromarray(_flat(pixels)).save(out, "WEBP", quality=quality)
    return out.getvalue()


def encode_png(pixels: Pixels) -> bytes:
    """Encode a grey (h, w) or RGB (h, w, 3) array."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def _flat(pixels: Pixels) -> Pixels:
    # simplejpeg gives grey as (h, w, 1), for which Pillow has no word.
    return pixels[..., 0] if pixels.shape[2:] == (1,) else pixels


@cache
def _opencv() -> ModuleType:
    import cv2

    # The packer has threads of its own, and the bytes must not depend on the processor's maker.
    cv2.setNumThreads(0)
    cv2.ipp.setUseIPP(False)
    return cv2


def _opened(data: bytes, header: Header) -> Image.Image:
    try:
        with quiet_pillow():
            return Image.open(io.BytesIO(data), formats=_PILLOW_FORMATS[header.image_format])
    except Exception as error:  # a parser may raise anything on hostile bytes: each is a verdict
        raise _verdict(header, error) from error


def _loaded(data: bytes, header: Header) -> Image.Image:
    image = _opened(data, header)
    try:
        with quiet_pillow():
            image.load()
    except Exception as error:  # as in _opened
        raise _verdict(header, error) from error
    return image


def _completed(header: Header, image: Image.Image) -> Header:
    """Add what was not looked for in the headers of GIF, BMP and TIFF."""
    faults = list(header.faults)
    if image.format in ("GIF", "TIFF") and getattr(image, "is_animated", False):
        faults.append("first_frame")
    if image.format in ("GIF", "BMP", "TIFF"):
        faults += ["16bit"] if image.mode.startswith("I") else []
        faults += ["cmyk"] if image.mode == "CMYK" else []
        faults += ["alpha"] if image.has_transparency_data else []
    return header._replace(faults=tuple(faults))


def _verdict(header: Header, error: Exception) -> BadInputError:
    if isinstance(error, Image.DecompressionBombError):
        return header.bad(f"too_large: {error}")
    word = "truncated" if "truncated" in str(error).lower() else "corrupt"
    return header.bad(f"{word}: {_brief(error)}")


def _brief(error: Exception) -> str:
    # Without the addresses of objects: the ledger is the same in every run.
    text = re.sub(r" ?<[^<>]* at 0x[0-9a-f]+>", "", f"{type(error).__name__}: {error}")
    return text[:200].replace("\n", " ")
