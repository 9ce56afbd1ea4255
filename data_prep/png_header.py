"""The chunks of a PNG, read without a decoder (PNG specification, third edition)."""

import struct
import zlib
from typing import Literal

from data_prep.image_headers import Header
from vitscale.data.pixels import orientation_in

END = b"\0\0\0\0IEND\xaeB`\x82"

# Pillow reads no more of one text or profile, and refuses the whole picture.
MAX_TEXT = 1 << 20
MAX_TEXTS = 64 << 20

_GREY, _PALETTE = (0, 4), 3
_TRANSPARENT = (4, 6)


def read_png(data: bytes, check: Literal["none", "header", "full"]) -> Header:
    """Read a PNG's chunks.

    Args:
        data: The whole file.
        check: Unless "none", checksums of the chunks that make up the pixels are compared;
            decoders skip those of the others too.

    Raises:
        BadInputError: It is damaged, or has texts or a profile of too many bytes.
    """
    header = Header("png", 0, 0, (), lossless=True)
    if data[12:16] != b"IHDR" or len(data) < 33:
        word = "truncated" if len(data) < 33 else "corrupt"
        raise header.bad(f"{word}: no header chunk at the start of the PNG")
    width, height, depth, colour = struct.unpack_from(">IIBB", data, 16)
    mode = "L" if colour in _GREY else "RGB"
    header = header._replace(width=width, height=height, mode=mode, whole=False)
    faults = [f"{depth}bit"] if depth == 16 or (colour == 0 and depth < 8) else []
    if colour in _TRANSPARENT:
        faults.append("alpha")
    num_text_bytes, position, view = 0, 8, memoryview(data)
    has_pixels = False
    while position + 12 <= len(data):
        length = int.from_bytes(view[position : position + 4], "big")
        kind, end = data[position + 4 : position + 8], position + 12 + length
        if end > len(data):
            break
        # A capital letter first: needed for the pixels.
        if check != "none" and kind[:1].isupper():
            checksum = int.from_bytes(view[end - 4 : end], "big")
            if zlib.crc32(view[position + 4 : end - 4]) != checksum:
                raise header.bad(f"corrupt: wrong checksum of PNG chunk {kind!r} at {position}")
        if kind == b"IEND":
            header = header._replace(whole=True)
            break
        if kind == b"IDAT":
            has_pixels = True
        else:
            body = data[position + 8 : end - 4]
            num_text_bytes += _text_bytes(header, kind, body)
            header = _with_chunk(header, kind, body)
            faults += _faults_of(kind, body, colour)
        position = end
    if num_text_bytes > MAX_TEXTS:
        raise header.bad(f"too_large: {num_text_bytes} bytes of text, the limit is {MAX_TEXTS}")
    if not has_pixels:
        raise header.bad("truncated: the PNG has no whole chunk of pixels")
    return header._replace(faults=tuple(dict.fromkeys(faults)))


def with_end(data: bytes) -> bytes:
    """Put the end chunk behind the last whole chunk."""
    position = 8
    while position + 12 <= len(data):
        end = position + 12 + int.from_bytes(data[position : position + 4], "big")
        if end > len(data):
            break
        position = end
    return data[:position] + END


def _faults_of(kind: bytes, body: bytes, colour: int) -> list[str]:
    if kind == b"tRNS":
        is_opaque = colour == _PALETTE and body.count(b"\xff") == len(body)
        return [] if is_opaque else ["alpha"]
    if kind == b"acTL" and int.from_bytes(body[:4], "big") > 1:
        return ["first_frame"]
    return []


def _with_chunk(header: Header, kind: bytes, body: bytes) -> Header:
    if kind == b"eXIf":
        return header._replace(orientation=orientation_in(body))
    if kind == b"iCCP":
        packed = body.partition(b"\0")[2][1:]
        return header._replace(profile=_inflated(header, kind, packed))
    return header


def _text_bytes(header: Header, kind: bytes, body: bytes) -> int:
    """Count the bytes that a text takes in memory."""
    if kind == b"tEXt":
        return len(body)
    rest = body.partition(b"\0")[2]
    if kind == b"zTXt":
        return len(_inflated(header, kind, rest[1:]))
    if kind == b"iTXt":
        # Two flags, the language and the translated name come first.
        text = rest[2:].partition(b"\0")[2].partition(b"\0")[2]
        return len(_inflated(header, kind, text)) if rest[:1] == b"\1" else len(text)
    return 0


def _inflated(header: Header, kind: bytes, packed: bytes) -> bytes:
    try:
        inflated = zlib.decompressobj().decompress(packed, MAX_TEXT + 1)
    except zlib.error:  # decoders go on without it
        return b""
    if len(inflated) > MAX_TEXT:
        raise header.bad(
            f"too_large: PNG chunk {kind.decode('latin-1')} unpacks to more than {MAX_TEXT} bytes"
        )
    return inflated
