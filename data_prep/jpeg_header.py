"""The header of a JPEG, read without a decoder: size, colours, EXIF orientation, ICC profile.

Marker codes and segments follow ITU-T T.81, annex B.
"""

from data_prep.image_headers import Header
from data_prep.verdict import BadInputError
from vitscale.data.pixels import orientation_in

EOI = b"\xff\xd9"

_SOS, _DHT, _EXIF, _ICC, _ADOBE = 0xDA, 0xC4, 0xE1, 0xE2, 0xEE
# Baseline, extended and progressive Huffman; the same with arithmetic coding.
_HUFFMAN, _ARITHMETIC = (0xC0, 0xC1, 0xC2), (0xC9, 0xCA)
_FRAMES = frozenset(range(0xC0, 0xD0)) - {_DHT, 0xC8, 0xCC}
_MODES = {1: "L", 3: "RGB", 4: "CMYK"}
# Markers without a length: TEM, RST0 to RST7, SOI
_BARE = frozenset((0x01, *range(0xD0, 0xD9)))


def read_jpeg(data: bytes) -> Header:
    """Read everything before the first scan, and look for the end marker behind it.

    Further pictures and other bytes behind the end marker are allowed.

    Raises:
        BadInputError: It ends before its first scan, is damaged, or of a kind that is not read.
    """
    frame = exif = b""
    frame_marker, has_tables, is_odd = 0, False, False
    profile_parts: list[bytes] = []
    position, size = 2, len(data)
    while True:
        if position + 4 > size:
            raise BadInputError("truncated: the file ends before its first scan", "jpg")
        if data[position] != 0xFF:  # decoders skip to the next marker, some with a warning
            is_odd = True
            position = data.find(b"\xff", position)
            position = size if position < 0 else position
            continue
        marker = data[position + 1]
        if marker == 0xFF:  # padding
            position += 1
            continue
        if marker in _BARE or marker == 0:
            is_odd, position = True, position + 2
            continue
        body = position + 4
        position += 2 + (data[position + 2] << 8 | data[position + 3])
        if marker == _SOS:
            break
        if position < body:
            raise BadInputError(f"corrupt: no length in the segment at byte {body - 4}", "jpg")
        if marker == _DHT:
            has_tables = True
        elif marker in _FRAMES:
            if frame:
                raise BadInputError("corrupt: two frame headers", "jpg")
            frame_marker, frame = marker, data[body:position]
        elif marker == _EXIF and not exif and data[body : body + 6] == b"Exif\0\0":
            exif = data[body + 6 : position]
        elif marker == _ICC and data[body : body + 12] == b"ICC_PROFILE\0":
            profile_parts.append(data[body + 12 : position])
    header = _header_of(frame_marker, frame)
    if frame_marker in _HUFFMAN and not has_tables:
        header = header._replace(faults=(*header.faults, "tables"))
    _check_amount(header, frame_marker, size - position)
    is_whole = not is_odd and data.rfind(EOI, position) >= 0
    orientation = orientation_in(exif) if exif else 1
    profile = _joined(profile_parts) if profile_parts else b""
    return header._replace(orientation=orientation, profile=profile, whole=is_whole)


def _header_of(marker: int, frame: bytes) -> Header:
    if len(frame) < 6:
        raise BadInputError("corrupt: no frame header before the first scan", "jpg")
    height, width = frame[1] << 8 | frame[2], frame[3] << 8 | frame[4]
    precision, components = frame[0], frame[5]
    mode = _MODES.get(components, "")
    faults = ("cmyk",) if components == 4 else ()
    if marker in _ARITHMETIC:
        faults = (*faults, "arithmetic")
    header = Header("jpg", width, height, faults, lossless=False, mode=mode)
    if marker not in _HUFFMAN and marker not in _ARITHMETIC:
        raise header.bad(f"unsupported: lossless or hierarchical JPEG (frame {marker:#04x})")
    if precision != 8:
        raise header.bad(f"unsupported: {precision}-bit JPEG")
    if not mode:
        raise header.bad(f"unsupported: JPEG of {components} components")
    if height == 0:
        raise header.bad("unsupported: JPEG that states its height behind its first scan")
    if width == 0:
        raise header.bad("corrupt: the picture is 0 px wide")
    return header


def _check_amount(header: Header, marker: int, num_bytes: int) -> None:
    # A block of 8 x 8 values takes two Huffman codes, of at least one bit each; only progressive
    # files share codes. This finds the big empty ones before memory is taken for them.
    blocks = ((header.width + 7) // 8) * ((header.height + 7) // 8)
    if marker in (0xC0, 0xC1) and num_bytes * 4 < blocks:
        raise header.bad(
            f"truncated: {num_bytes} bytes of pixels, {header.width} x {header.height} px take "
            f"{(blocks + 3) // 4} at the very least"
        )


def _joined(parts: list[bytes]) -> bytes:
    # Each part begins with its number, from 1, and the number of all (ICC.1:2022, B.4). Viewers
    # ignore a profile that is not complete.
    numbered = {part[0]: part[2:] for part in parts if len(part) > 2}
    if sorted(numbered) != list(range(1, parts[0][1] + 1 if len(parts[0]) > 1 else 1)):
        return b""
    return b"".join(numbered[number] for number in sorted(numbered))
