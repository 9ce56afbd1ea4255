"""Encoded images with all the oddities that are found in the wild, made from scratch."""

import io
import struct
import zlib
from collections.abc import Iterable

import numpy as np
from PIL import Image

CORNERS = ((200, 40, 40), (40, 170, 60), (50, 60, 190), (215, 215, 200))


def four_corners(width: int = 96, height: int = 64) -> np.ndarray:
    """A picture that tells its orientation: red and green above, blue and white below."""
    pixels = np.empty((height, width, 3), np.uint8)
    for index, colour in enumerate(CORNERS):
        rows = slice(None, height // 2) if index < 2 else slice(height // 2, None)
        columns = slice(width // 2, None) if index % 2 else slice(None, width // 2)
        pixels[rows, columns] = colour
    return pixels


def corners_of(data: bytes) -> list[tuple[int, ...]]:
    """Decode with nothing but Pillow's defaults and give the four colours."""
    with Image.open(io.BytesIO(data)) as image:
        pixels = np.asarray(image.convert("RGB"))
    height, width = pixels.shape[:2]
    rows, columns = (height // 8, height - 1 - height // 8), (width // 8, width - 1 - width // 8)
    return [tuple(int(value) for value in pixels[row, col]) for row in rows for col in columns]


def is_like(data: bytes, colours: Iterable[tuple[int, ...]] = CORNERS, tolerance: int = 10) -> bool:
    """Whether the four colours are these."""
    return bool(np.abs(np.subtract(corners_of(data), list(colours))).max() <= tolerance)


def saved(image: Image.Image | np.ndarray, image_format: str = "JPEG", **options) -> bytes:
    """Encode; JPEG without loss of colour resolution."""
    if image_format in ("JPEG", "MPO"):
        options = {"quality": 95, "subsampling": 0, **options}
    out = io.BytesIO()
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.save(out, image_format, **options)
    return out.getvalue()


def exif(*entries: tuple[int, int, int, bytes], order: str = "<") -> bytes:
    """EXIF data of entries (tag, type, count, four bytes), "<" little or ">" big endian."""
    block = b"II*\0" if order == "<" else b"MM\0*"
    block += struct.pack(f"{order}IH", 8, len(entries))
    for tag, kind, count, value in entries:
        block += struct.pack(f"{order}HHI", tag, kind, count) + value
    return b"Exif\0\0" + block + bytes(4)


def oriented(orientation: int, order: str = "<") -> tuple[int, int, int, bytes]:
    """The entry of an orientation."""
    return 0x0112, 3, 1, struct.pack(f"{order}HH", orientation, 0)


def with_segment(jpeg: bytes, marker: int, body: bytes) -> bytes:
    """Put a segment right behind the start of a JPEG."""
    return jpeg[:2] + struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body + jpeg[2:]


def frame_at(jpeg: bytes) -> int:
    """Position of the marker of a JPEG's frame header."""
    position = 2
    while jpeg[position + 1] not in (0xC0, 0xC1, 0xC2):
        position += 2 + int.from_bytes(jpeg[position + 2 : position + 4], "big")
    return position


def patched(data: bytes, position: int, new: bytes) -> bytes:
    """Overwrite some bytes."""
    return data[:position] + new + data[position + len(new) :]


def arithmetic_jpeg(width: int = 32, height: int = 16) -> bytes:
    """A grey arithmetic-coded JPEG; the coder makes a picture of any bytes."""
    table = b"\xff\xdb" + struct.pack(">HB", 67, 0) + bytes([8] * 64)
    frame = b"\xff\xc9" + struct.pack(">HBHHBBBB", 11, 8, height, width, 1, 1, 0x11, 0)
    scan = b"\xff\xda" + struct.pack(">HBBBBBB", 8, 1, 1, 0, 0, 63, 0)
    noise = np.random.default_rng(0).integers(0, 255, 400, np.uint8).tobytes()
    return b"\xff\xd8" + table + frame + scan + noise + b"\xff\xd9"


def chunk(kind: bytes, body: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def with_chunk(png: bytes, kind: bytes, body: bytes) -> bytes:
    """Put a chunk right behind the header of a PNG."""
    return png[:33] + chunk(kind, body) + png[33:]


def made_png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    """A PNG of rows that each start with their filter byte."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def icc_profile(space: bytes = b"RGB ", gamma: float = 2.2, wide: bool = True) -> bytes:
    """An ICC profile of a pure power curve: RGB with Adobe's or sRGB's primaries, or GRAY."""
    curve = b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256)) + bytes(2)
    primaries = {  # in the D50 space of profiles
        b"rXYZ": (0.6097, 0.3111, 0.0195) if wide else (0.4361, 0.2225, 0.0139),
        b"gXYZ": (0.2053, 0.6257, 0.0609) if wide else (0.3851, 0.7169, 0.0971),
        b"bXYZ": (0.1492, 0.0632, 0.7446) if wide else (0.1431, 0.0606, 0.7139),
    }
    tags = {b"wtpt": _xyz(0.9642, 1.0, 0.8249)}
    if space == b"GRAY":
        tags[b"kTRC"] = curve
    else:
        tags |= {name: _xyz(*values) for name, values in primaries.items()}
        tags |= {name: curve for name in (b"rTRC", b"gTRC", b"bTRC")}
    return _profile(space, b"mntr", b"XYZ ", tags)


def cmyk_profile() -> bytes:
    """An ICC profile of strange inks: cyan is green, magenta and yellow are pink."""
    ramp = bytes(range(256))
    # Lab in 8 bits for each corner of the space of inks; cyan varies slowest.
    cells = [(0 if ink & 1 else 200, 60 if ink & 8 else 200, 128) for ink in range(16)]
    cells[0] = (255, 128, 128)
    identity = struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 65536)
    table = b"mft1" + bytes(4) + bytes([4, 3, 2, 0]) + identity
    table += ramp * 4 + bytes(value for cell in cells for value in cell) + ramp * 3
    return _profile(b"CMYK", b"prtr", b"Lab ", {b"A2B0": table})


def _xyz(*values: float) -> bytes:
    return b"XYZ " + bytes(4) + struct.pack(">3i", *(round(value * 65536) for value in values))


def _profile(space: bytes, kind: bytes, between: bytes, tags: dict[bytes, bytes]) -> bytes:
    text = b"desc" + bytes(4) + struct.pack(">I", 5) + b"made\0" + bytes(78)
    tags = {b"desc": text, b"cprt": b"text" + bytes(4) + b"none\0", **tags}
    table, body = struct.pack(">I", len(tags)), b""
    start = 128 + 4 + 12 * len(tags)
    for name, value in tags.items():
        value += bytes(-len(value) % 4)
        table += name + struct.pack(">II", start + len(body), len(value))
        body += value
    header = bytearray(128)
    header[8:12] = bytes([2, 0x20, 0, 0])
    header[12:24] = kind + space + between
    header[36:40] = b"acsp"
    header[68:80] = struct.pack(">3i", 63190, 65536, 54061)  # D50
    header[:4] = struct.pack(">I", 128 + len(table) + len(body))
    return bytes(header) + table + body
