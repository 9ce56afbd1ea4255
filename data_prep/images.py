"""One image on its way into a shard: is it sound, and what is stored of it.

Nothing is decoded before its header has shown a sane size. Whatever is wrong with an image is a
`BadInputError` with a reason for the ledger.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from data_prep.image_headers import Header, format_of, read_bmp, read_gif
from data_prep.image_pixels import (
    Pixels,
    check_pixels,
    decode_any,
    decode_jpeg,
    eighths_for,
    encode_jpeg,
    encode_png,
    encode_webp,
    read_tiff,
    recoloured,
    resized,
)
from data_prep.jpeg_header import read_jpeg
from data_prep.png_header import read_png, with_end
from data_prep.verdict import BadInputError
from data_prep.webp_header import read_webp
from vitscale.config.errors import UserError
from vitscale.data.pixels import turned

Check = Literal["none", "header", "full"]

# Ours: what Pillow itself starts to warn at (Image.MAX_IMAGE_PIXELS), 256 MiB of RGB.
MAX_PIXELS = 89_478_485
MAX_BYTES = 256 << 20

_BACKGROUNDS = {"white": "#ffffff", "black": "#000000", "gray": "#808080"}
# A picture that is brought into another form at its own size shall not show it.
_CAREFUL_QUALITY = 95
# px a side: libjpeg-turbo's JPEG_MAX_DIMENSION and WebP's 14 bits
_MAX_SIDES = {"jpeg": 65_500, "webp": 16_383}


@dataclass(frozen=True)
class ImagePolicy:
    """How images are stored, and which ones are taken.

    Args:
        policy: "keep" stores the input's bytes wherever every decoder shows them alike, else the
            picture as a viewer shows it; "resize" also makes it smaller.
        side: px, the most that `edge` may have after "resize"; nothing is enlarged.
        edge: "short" or "long".
        quality: 1 to 100, of what is encoded smaller.
        encoding: "jpeg" or "webp", likewise.
        background: Behind what is transparent: white, black, gray or #rrggbb.
        animated: "first" takes the first frame or page, "refuse" none.
        max_pixels: As stated in the header.
        max_bytes: Of the input.
        min_side: px, of the shorter side.
        max_aspect: Longer side / shorter side; 0 sets no limit.

    Raises:
        UserError: A value is out of range.
    """

    policy: Literal["keep", "resize"]
    side: int = 512
    edge: Literal["short", "long"] = "short"
    quality: int = 90
    encoding: Literal["jpeg", "webp"] = "jpeg"
    background: str = "white"
    animated: Literal["first", "refuse"] = "first"
    max_pixels: int = MAX_PIXELS
    max_bytes: int = MAX_BYTES
    min_side: int = 1
    max_aspect: float = 0

    def __post_init__(self) -> None:
        if not re.fullmatch("#[0-9a-fA-F]{6}", _BACKGROUNDS.get(self.background, self.background)):
            raise UserError(f"background {self.background!r}: write white, black, gray or #rrggbb")
        if not 1 <= self.quality <= 100:
            raise UserError(f"image quality {self.quality}: write 1 to 100")
        if min(self.side, self.max_pixels, self.max_bytes, self.min_side) < 1:
            raise UserError("image side and limits of pixels, bytes and sides must be at least 1")
        if self.max_aspect and self.max_aspect < 1:
            raise UserError(f"max_aspect {self.max_aspect}: write at least 1, or 0 for no limit")

    @property
    def background_rgb(self) -> tuple[int, int, int]:
        """The background as numbers."""
        text = _BACKGROUNDS.get(self.background, self.background)
        red, green, blue = bytes.fromhex(text[1:])
        return red, green, blue

    def describe(self) -> dict[str, Any]:
        """Give the fields that affect bytes, for plan and manifest."""
        fields: dict[str, Any] = {"policy": self.policy}
        names = ["background", "animated", "max_pixels", "max_bytes", "min_side", "max_aspect"]
        if self.policy == "resize":
            names = ["side", "edge", "quality", "encoding", *names]
        return fields | {name: getattr(self, name) for name in names}

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Give the size that a picture is stored at."""
        edge = min(width, height) if self.edge == "short" else max(width, height)
        if self.policy == "keep" or edge <= self.side:
            return width, height
        scale = self.side / edge
        return max(1, round(width * scale)), max(1, round(height * scale))


@dataclass(frozen=True, slots=True)
class Prepared:
    """An image as it goes into the shard."""

    data: bytes
    # "jpg", "png" or "webp"
    image_format: str
    # px, as stored and as shown
    width: int
    height: int
    # "jpg", "png", "webp", "gif", "bmp" or "tiff"
    input_format: str
    # px, as stored in the input
    input_width: int
    input_height: int
    # "" where the bytes are the input's; else why not, of: resized, turned, icc, cmyk, alpha,
    # 1bit, 2bit, 4bit, 16bit, first_frame, arithmetic, tables, format, end; with commas
    changes: str


def prepare_image(data: bytes, policy: ImagePolicy, check: Check) -> Prepared:
    """Check an image and bring it to its stored form.

    Args:
        data: The input's bytes.
        policy: keep or resize, and limits.
        check: "none" reads the header; "header" also looks for the end of the data and compares
            PNG's checksums, and decodes only where the end is missing; "full" decodes. What is
            stored in another form is decoded, whatever is said here.

    Raises:
        BadInputError: It cannot be packed.
    """
    header = read_header(data, policy, check)
    changes = header.changes
    width, height = header.width, header.height
    if header.orientation >= 5:
        width, height = height, width
    size = policy.size_of(width, height)
    if size != (width, height):
        changes = ("resized", *changes)
    if not changes:
        return _kept(data, header, check)
    pixels, header = _shown(data, header, size, policy)
    extra = tuple(fault for fault in header.faults if fault not in changes)
    changes = (*changes, *extra)
    if "first_frame" in changes and policy.animated == "refuse":
        raise header.bad("unsupported: more than one frame")
    stored, image_format = _encoded(pixels, header, policy, "resized" in changes)
    return Prepared(
        stored,
        image_format,
        *size,
        header.image_format,
        header.width,
        header.height,
        ",".join(changes),
    )


def decode_fully(data: bytes) -> tuple[str, int, int]:
    """Decode an image to the last pixel; give its format ("jpg", ...), width and height.

    Raises:
        BadInputError: It cannot be decoded.
    """
    header = read_header(data, ImagePolicy("keep", max_pixels=2 * MAX_PIXELS), "full")
    check_pixels(data, header)
    return header.image_format, header.width, header.height


def read_header(data: bytes, policy: ImagePolicy, check: Check) -> Header:
    """Find out what an image is, and whether it is within the limits.

    Args:
        data: The input's bytes.
        policy: Limits.
        check: As for `prepare_image`; nothing is decoded.

    Raises:
        BadInputError: It cannot be packed.
    """
    if len(data) > policy.max_bytes:
        raise BadInputError(f"too_large: {len(data)} bytes, the limit is {policy.max_bytes}")
    image_format = format_of(data)
    if image_format == "jpg":
        header = read_jpeg(data)
    elif image_format == "png":
        header = read_png(data, check)
    elif image_format == "webp":
        header = read_webp(data)
    elif image_format == "gif":
        header = read_gif(data)
    else:
        header = read_bmp(data) if image_format == "bmp" else read_tiff(data)
    width, height = header.width, header.height
    if width * height > policy.max_pixels:
        raise header.bad(f"too_large: {width} x {height} px, the limit is {policy.max_pixels} px")
    short = min(width, height)
    if short < policy.min_side:
        raise header.bad(f"bad_shape: {width} x {height} px, a side has {policy.min_side} at least")
    if policy.max_aspect and max(width, height) > policy.max_aspect * short:
        raise header.bad(
            f"bad_shape: {width} x {height} px, the sides are {policy.max_aspect:g} : 1 at most"
        )
    return header


def _kept(data: bytes, header: Header, check: Check) -> Prepared:
    stored = data
    if check == "full" or (check == "header" and not header.whole):
        is_open_png = header.image_format == "png" and not header.whole
        stored = check_pixels(with_end(data) if is_open_png else data, header)
    width, height = header.width, header.height
    changes = "" if stored is data else "end"
    kind = header.image_format
    return Prepared(stored, kind, width, height, kind, width, height, changes)


def _shown(
    data: bytes, header: Header, size: tuple[int, int], policy: ImagePolicy
) -> tuple[Pixels, Header]:
    """Give the picture as a viewer shows it, and the header with what was found on the way."""
    # While it still lies as it was stored.
    width, height = size if header.orientation < 5 else size[::-1]
    pixels, eighths = None, 8
    if header.image_format == "jpg" and header.mode != "CMYK":
        eighths = eighths_for(header, width, height)
        pixels, _ = decode_jpeg(data, header, eighths)
    if pixels is not None:
        extent = (header.width * eighths / 8, header.height * eighths / 8)
        pixels = resized(pixels, width, height, extent if eighths < 8 else None)
        if "icc" in header.changes:
            pixels = recoloured(pixels, header.profile)
        return turned(pixels, header.orientation), header
    if header.image_format == "png" and not header.whole:
        data = with_end(data)
    pixels, header = decode_any(data, header, policy.background_rgb)
    if header.image_format != "tiff":
        pixels = turned(pixels, header.orientation)
    return resized(pixels, *size), header


def _encoded(
    pixels: Pixels, header: Header, policy: ImagePolicy, is_smaller: bool
) -> tuple[bytes, str]:
    if header.lossless and not is_smaller:
        return encode_png(pixels), "png"
    encoding = policy.encoding if is_smaller else "jpeg"
    longest = max(pixels.shape[:2])
    if longest > _MAX_SIDES[encoding]:
        raise header.bad(
            f"bad_shape: {longest} px is too long for {encoding}, {_MAX_SIDES[encoding]} at most"
        )
    if encoding == "webp":
        return encode_webp(pixels, policy.quality), "webp"
    if is_smaller:
        return encode_jpeg(pixels, policy.quality, "420"), "jpg"
    return encode_jpeg(pixels, _CAREFUL_QUALITY, "444"), "jpg"
