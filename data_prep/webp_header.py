"""The chunks of a WebP, read without a decoder (RFC 9649)."""

from data_prep.image_headers import Header
from vitscale.data.pixels import orientation_in

_ANIMATED, _ALPHA = 0x02, 0x10


def read_webp(data: bytes) -> Header:
    """Read a WebP's chunks.

    Raises:
        BadInputError: It has no picture, or ends before its header does.
    """
    header = Header("webp", 0, 0, (), lossless=False)
    # The size after the four letters counts everything behind itself.
    end = int.from_bytes(data[4:8], "little") + 8
    header = header._replace(whole=end <= len(data))
    position, has_pixels = 12, False
    while position + 8 <= min(end, len(data)):
        kind = data[position : position + 4]
        length = int.from_bytes(data[position + 4 : position + 8], "little")
        body = position + 8
        if body + length > len(data):
            header = header._replace(whole=False)
        if kind in (b"VP8 ", b"VP8L", b"ANMF"):
            if not has_pixels:
                header = _with_picture(header, kind, data[body : body + 40])
            has_pixels = True
        elif kind == b"VP8X":
            header = _with_canvas(header, data[body : body + 10])
        elif kind == b"ICCP":
            header = header._replace(profile=data[body : body + length])
        elif kind == b"EXIF":
            header = header._replace(orientation=orientation_in(data[body : body + length]))
        position = body + length + (length & 1)
    if not has_pixels or not header.width:
        raise header.bad("truncated: the WebP ends before its picture")
    return header


def _with_canvas(header: Header, body: bytes) -> Header:
    if len(body) < 10:
        raise header.bad("truncated: the WebP ends in its header")
    flags = body[0]
    faults = ("alpha",) if flags & _ALPHA else ()
    if flags & _ANIMATED:
        faults = (*faults, "first_frame")
    width = int.from_bytes(body[4:7], "little") + 1
    height = int.from_bytes(body[7:10], "little") + 1
    return header._replace(width=width, height=height, faults=faults)


def _with_picture(header: Header, kind: bytes, body: bytes) -> Header:
    if kind == b"ANMF":  # a chunk of chunks behind 16 bytes of its own; ALPH goes with VP8
        return header._replace(lossless=body[16:20] == b"VP8L")
    if len(body) < 10:
        raise header.bad("truncated: the WebP ends in its header")
    if kind == b"VP8L":
        # 14 bits a side, less one, then whether transparency is used
        bits = int.from_bytes(body[1:5], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        if bits >> 28 & 1 and "alpha" not in header.faults:
            header = header._replace(faults=("alpha", *header.faults))
        header = header._replace(lossless=True)
    else:
        width = int.from_bytes(body[6:8], "little") & 0x3FFF
        height = int.from_bytes(body[8:10], "little") & 0x3FFF
    return header if header.width else header._replace(width=width, height=height)
