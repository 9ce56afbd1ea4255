import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from data_prep.images import BadImageError, ImagePolicy, encode_png, prepare_image
from tests.helpers.corpus import crop, encoded

KEEP = ImagePolicy("keep")
JPEG = encoded(crop(1, 64))
PNG = encoded(crop(2, 40), "PNG")
WEBP = encoded(crop(3, 48), "WEBP")


def png_of_size(width: int, height: int) -> bytes:
    """A PNG that is all header: what matters is found before any pixel is decoded."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize("check", ["none", "header", "full"])
@pytest.mark.parametrize(
    ("data", "kind", "side"),
    [(JPEG, "jpg", 64), (PNG, "png", 40), (WEBP, "webp", 48)],
    ids=["jpg", "png", "webp"],
)
def test_prepare_image_keeps_good_bytes(data, kind, side, check):
    image = prepare_image(data, KEEP, check)

    assert image.data == data
    assert (image.image_format, image.width, image.height) == (kind, side, side)


def test_prepare_image_takes_trailing_bytes_after_jpeg():
    assert prepare_image(JPEG + b"\0" * 700, KEEP, "header").width == 64


def test_prepare_image_decides_missing_end_by_decoding():
    # Only the PNG's last chunk is missing, which carries nothing: every pixel is there.
    assert prepare_image(PNG[:-12], KEEP, "header").width == 40


def test_prepare_image_finds_end_marker_behind_thumbnail():
    thumbnail = encoded(crop(4, 16))
    segment = b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 2) + thumbnail
    with_thumbnail = JPEG[:2] + segment + JPEG[2:]

    assert prepare_image(with_thumbnail, KEEP, "header").width == 64
    with pytest.raises(BadImageError, match="truncated"):
        prepare_image(with_thumbnail[:-200], KEEP, "header")


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "empty"),
        (b"<html></html>", "not_an_image"),
        (b"GIF89a" + b"\0" * 20, "unsupported: GIF"),
        (b"II*\x00" + b"\0" * 20, "unsupported: TIFF"),
        (b"\0\0\0\x20ftypavif", "unsupported: HEIF or AVIF"),
        (JPEG[:-300], "truncated"),
        (JPEG[:150], "truncated: the header"),
        (PNG[:-300], "truncated"),
        (WEBP[: len(WEBP) // 2], "corrupt"),
        (PNG[:200] + bytes([PNG[200] ^ 1]) + PNG[201:], "corrupt: wrong checksum"),
        (png_of_size(60_000, 60_000), "too_large"),
        (png_of_size(10_000, 9_000), "too_large"),
    ],
)
def test_prepare_image_names_what_is_wrong(data, word):
    with pytest.raises(BadImageError, match=rf"^{word}"):
        prepare_image(data, KEEP, "header")


def test_prepare_image_none_skips_the_end_check():
    assert prepare_image(JPEG[:-300], KEEP, "none").width == 64


def test_prepare_image_resizes_shorter_side():
    pixels = crop(0, 200)[:100]

    image = prepare_image(encoded(pixels), ImagePolicy("resize", side=50), "header")

    assert (image.width, image.height, image.image_format) == (100, 50, "jpg")
    with Image.open(io.BytesIO(image.data)) as opened:
        reference = Image.fromarray(pixels).resize((100, 50), Image.Resampling.BICUBIC)
        difference = np.abs(np.asarray(opened, int) - np.asarray(reference, int))
    assert difference.mean() < 6  # two JPEG encodings apart


def test_prepare_image_resize_keeps_small_images():
    assert prepare_image(JPEG, ImagePolicy("resize", side=64), "header").data == JPEG


def test_prepare_image_resize_finds_a_broken_png():
    data = PNG[:200] + bytes([PNG[200] ^ 1]) + PNG[201:]

    with pytest.raises(BadImageError, match=r"^corrupt"):
        prepare_image(data, ImagePolicy("resize", side=100), "header")


def test_prepare_image_resize_applies_orientation():
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.zeros((40, 20, 3), np.uint8)
    pixels[:10] = 255  # the top, which orientation 6 turns to the right
    data = encoded(pixels, exif=exif)

    image = prepare_image(data, ImagePolicy("resize", side=100), "header")

    assert (image.width, image.height) == (40, 20)
    with Image.open(io.BytesIO(image.data)) as opened:
        turned = np.asarray(opened)
    assert turned[:, -5:].mean() > 240
    assert turned[:, :25].mean() < 15


def test_prepare_image_resize_puts_transparency_on_white():
    pixels = np.zeros((30, 30, 4), np.uint8)

    image = prepare_image(encoded(pixels, "PNG"), ImagePolicy("resize", side=10), "header")

    with Image.open(io.BytesIO(image.data)) as opened:
        assert np.asarray(opened).min() > 250


def test_prepare_image_resize_refuses_sixteen_bits():
    data = encoded(np.zeros((30, 30), np.uint16), "PNG")

    with pytest.raises(BadImageError, match=r"^unsupported: pixels of kind I;16"):
        prepare_image(data, ImagePolicy("resize", side=10), "header")


def test_prepare_image_takes_the_first_picture_of_a_camera_file():
    first, second = crop(8, 60), crop(9, 30)
    out = io.BytesIO()
    Image.fromarray(first).save(
        out, "MPO", save_all=True, append_images=[Image.fromarray(second)], quality=95
    )

    kept = prepare_image(out.getvalue(), KEEP, "header")
    resized = prepare_image(out.getvalue(), ImagePolicy("resize", side=20), "header")

    assert (kept.data, kept.image_format, kept.width) == (out.getvalue(), "jpg", 60)
    assert (resized.image_format, resized.width) == ("jpg", 20)


def test_encode_png_gives_the_pixels_back():
    pixels = crop(7, 20)[..., 0]

    with Image.open(io.BytesIO(encode_png(pixels))) as opened:
        assert (np.asarray(opened) == pixels).all()
