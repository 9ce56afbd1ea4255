"""What an input is, told from its first bytes; names and extensions are not looked at."""

import struct
from typing import NamedTuple

from data_prep.verdict import BadInputError
from vitscale.data.pixels import to_srgb


class Header(NamedTuple):
    """What a JPEG, PNG, WebP, GIF, BMP or TIFF says about itself before its pixels."""

    # "jpg", "png", "webp", "gif", "bmp" or "tiff"
    image_format: str
    # px, as stored; 0 where only Pillow can tell
    width: int
    height: int
    # why decoders would not all show it alike, in the words of Prepared.changes
    faults: tuple[str, ...]
    # a new encoding of the picture must not lose anything either
    lossless: bool
    # EXIF, 1 is upright
    orientation: int = 1
    # Pillow's word for the pixels before transparency: L, RGB or CMYK
    mode: str = "RGB"
    # ICC profile
    profile: bytes = b""
    # the end of the data is there; False asks for a decode to find out
    whole: bool = True

    @property
    def changes(self) -> tuple[str, ...]:
        """All that must change before any decoder shows the picture as it is meant."""
        changes = self.faults if self.orientation == 1 else (*self.faults, "turned")
        if self.profile and to_srgb(self.profile, self.mode):
            changes = (*changes, "icc")
        return changes

    def bad(self, reason: str) -> BadInputError:
        """Make the error for this input."""
        return BadInputError(reason, self.image_format, self.width, self.height)


# Formats that are read; two of them go on in read_webp and Pillow.
_MAGIC = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG\r\n\x1a\n": "png",
    b"GIF87a": "gif",
    b"GIF89a": "gif",
    b"BM": "bmp",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
    b"II+\0": "tiff",
    b"MM\0+": "tiff",
}
# Real formats that are not: some for lack of a decoder that is always there, some because they
# are no pictures of fixed size.
_UNSUPPORTED = {
    b"\0\0\0\x0cjP  ": "JPEG 2000",
    b"\xffO\xffQ": "JPEG 2000",
    b"\0\0\0\x0cJXL ": "JPEG XL",
    b"\xff\x0a": "JPEG XL",
    b"8BPS": "Photoshop",
    b"%PDF": "PDF",
    b"%!PS": "PostScript",
    b"\0\0\1\0": "icon",
    b"\0\0\2\0": "cursor",
    b"\x76\x2f\x31\x01": "OpenEXR",
    b"#?RADIANCE": "Radiance HDR",
    b"DDS ": "DDS",
    b"qoif": "QOI",
    b"FLIF": "FLIF",
    b"BPG\xfb": "BPG",
    b"SIMPLE  =": "FITS",
    b"gimp xcf": "XCF",
    b"\x8aMNG": "MNG",
    b"AT&TFORM": "DjVu",
    b"P1": "PNM",
    b"P2": "PNM",
    b"P3": "PNM",
    b"P4": "PNM",
    b"P5": "PNM",
    b"P6": "PNM",
}
_CONTAINERS = {
    b"\x1f\x8b": "gzip data",
    b"PK\3\4": "a ZIP archive",
    b"BZh": "bzip2 data",
    b"\xfd7zXZ": "xz data",
    b"\x28\xb5\x2f\xfd": "Zstandard data",
    b"Rar!": "a RAR archive",
    b"7z\xbc\xaf": "a 7-Zip archive",
    b"RIFF": "a RIFF file",
    b"\x80\x02": "a Python pickle",
    b"\x7fELF": "a program",
}
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"crx ": "Canon raw"}
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")


def format_of(data: bytes) -> str:
    """Tell the format by content: "jpg", "png", "webp", "gif", "bmp" or "tiff".

    Raises:
        BadInputError: It is none of these; the reason names what it is.
    """
    if data[:3] == b"\xff\xd8\xff":
        return "jpg"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    for magic, image_format in _MAGIC.items():
        if data.startswith(magic):
            if image_format == "tiff" and data[8:10] == b"CR":
                raise BadInputError("unsupported: Canon raw")
            return image_format
    raise BadInputError(_refusal(data))


def _refusal(data: bytes) -> str:
    if not data:
        return "empty: zero bytes"
    if data[4:8] == b"ftyp":
        brand = data[8:12]
        name = _BRANDS.get(brand, "HEIF" if brand in _HEIF_BRANDS else "")
        # The main brand may be a general one; those in the list behind it say more.
        if brand in (b"mif1", b"msf1") and b"avif" in data[16:64]:
            name = "AVIF"
        return f"unsupported: {name}" if name else f"not_an_image: a film or sound file ({brand!r})"
    for magic, name in _UNSUPPORTED.items():
        if data.startswith(magic):
            return f"unsupported: {name}"
    for magic, name in _CONTAINERS.items():
        if data.startswith(magic):
            return f"not_an_image: {name}"
    if not data.strip(b"\0"):
        return f"not_an_image: {len(data)} zero bytes"
    if data[257:262] == b"ustar":
        return "not_an_image: a tar archive"
    return _refusal_of_text(data[:512]) or f"not_an_image: starts with {data[:16]!r}"


def _refusal_of_text(start: bytes) -> str:
    text = start.decode("utf-8", "ignore").lstrip("\ufeff \t\r\n")
    low = text.lower()
    if "<svg" in low:
        return "unsupported: SVG"
    if low.startswith(("<!doctype html", "<html", "<head", "<body")) or "<html" in low:
        return f"not_an_image: HTML, {text[:40]!r}"
    if low.startswith("<?xml"):
        return f"not_an_image: XML, {text[:40]!r}"
    letters = sum(byte >= 32 or byte in b"\t\r\n" for byte in start)
    is_text = letters == len(start) and len(text.encode()) >= 0.9 * len(start.strip())
    return f"not_an_image: text, {text[:40]!r}" if is_text and text else ""


def read_gif(data: bytes) -> Header:
    """Read a GIF's screen size; it is never stored as it is.

    Raises:
        BadInputError: It ends too early.
    """
    if len(data) < 13:
        raise BadInputError("truncated: the file ends in its header", "gif")
    width, height = struct.unpack_from("<HH", data, 6)
    return Header("gif", width, height, ("format",), lossless=True)


def read_bmp(data: bytes) -> Header:
    """Read a BMP's size; it is never stored as it is.

    Raises:
        BadInputError: It ends too early.
    """
    if len(data) < 26:
        raise BadInputError("truncated: the file ends in its header", "bmp")
    if int.from_bytes(data[14:18], "little") == 12:  # OS/2's header has 16-bit sizes
        width, height = struct.unpack_from("<HH", data, 18)
    else:
        width, height = struct.unpack_from("<ii", data, 18)
    # A negative height says that the first row is the top one.
    return Header("bmp", abs(width), abs(height), ("format",), lossless=True)
