import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile

from tests.helpers.odd_images import exif as exif_of
from tests.helpers.odd_images import four_corners, icc_profile, oriented, saved, with_segment
from tests.helpers.small_dataset import encoded, picture
from vitscale.config.errors import DataError
from vitscale.data.decode import MAX_PIXELS, decode_rgb, jpeg_header

GREY = np.arange(256, dtype=np.uint8).reshape(16, 16)


def png_header(width, height):
    """A PNG of a few bytes that claims to be huge."""

    def chunk(kind, body):
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(bytes(100)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {"quality": 90}),
        ("JPEG", {"quality": 90, "progressive": True}),
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
    ],
    ids=["jpeg", "progressive", "png", "webp"],
)
def test_decode_equals_pillow(kind, options):
    data = encoded(picture(0), kind, **options)

    pixels = decode_rgb(data, 3)

    assert pixels.shape == (40, 48, 3)
    assert pixels.dtype == np.uint8
    assert (pixels == np.asarray(Image.open(io.BytesIO(data)))).all()
    if kind != "JPEG":
        assert (pixels == np.asarray(picture(0))).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
@pytest.mark.parametrize("in_chans", [1, 3])
def test_decode_modes_of_png(mode, in_chans):
    image = picture(1).convert("RGB").convert(mode)

    pixels = decode_rgb(encoded(image, "PNG"), in_chans)

    expected = np.asarray(image.convert("RGB" if in_chans == 3 else "L"))
    assert (pixels.squeeze() == expected).all()
    assert pixels.shape == (40, 48, in_chans)


def test_decode_palette_with_transparency():
    image = picture(1).convert("P")
    alpha = np.arange(0, 256, 2)
    data = encoded(image, "PNG", transparency=bytes(alpha.tolist()))

    shown = decode_rgb(data, 3)

    # Palette entries past the list are opaque.
    weights = np.concatenate([alpha, np.full(128, 255)])[np.asarray(image)][:, :, None] / 255
    wanted = weights * np.asarray(image.convert("RGB")) + (1 - weights) * 255
    assert np.abs(shown - wanted).max() <= 1


def test_decode_cmyk_jpeg_keeps_its_colours():
    data = encoded(picture(2).convert("CMYK"), "JPEG", quality=100, subsampling=0)

    difference = decode_rgb(data, 3).astype(int) - np.asarray(picture(2)).astype(int)

    assert abs(difference).mean() < 3


def test_decode_16_bit_grey_keeps_the_upper_byte():
    values = GREY.astype(np.uint16) * 256 + 77

    for in_chans in (1, 3):
        pixels = decode_rgb(encoded(Image.fromarray(values), "PNG"), in_chans)

        assert pixels.shape == (16, 16, in_chans)
        assert (pixels == GREY[:, :, None]).all()


def test_decode_grey_to_rgb_repeats_the_channel():
    pixels = decode_rgb(encoded(Image.fromarray(GREY), "PNG"), 3)

    assert (pixels == GREY[:, :, None]).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("part", [0.3, 0.6, 0.95])
def test_decode_truncated_is_refused(kind, part):
    data = encoded(picture(3, 200, 150), kind)

    with pytest.raises(DataError):
        decode_rgb(data[: int(len(data) * part)], 3)


@pytest.mark.parametrize("data", [b"", b"<html>not found</html>", bytes(1000)])
def test_decode_other_content_is_refused(data):
    with pytest.raises(DataError, match=f"cannot decode {len(data)} bytes"):
        decode_rgb(data, 3)


@pytest.mark.parametrize("size", [(20_000, 10_000), (13_378, 13_378)])
def test_decode_too_many_pixels_are_refused_before_decoding(size):
    assert size[0] * size[1] > MAX_PIXELS

    with pytest.raises(DataError, match="too big"):
        decode_rgb(png_header(*size), 3)


def test_decode_own_limit_holds_when_pillow_has_none(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)

    with pytest.raises(DataError, match="13378 x 13378 px are 178970884 pixels"):
        decode_rgb(png_header(13_378, 13_378), 3)


def test_decode_big_image_below_the_limit_warns_nobody(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # Pillow warns from here, errors at 2x

    assert decode_rgb(encoded(picture(0), "PNG"), 3).shape == (40, 48, 3)


def test_decode_refuses_to_run_where_truncation_is_hidden(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)

    with pytest.raises(RuntimeError, match="LOAD_TRUNCATED_IMAGES"):
        decode_rgb(encoded(picture(0)), 3)


def test_decode_other_channel_counts_are_refused():
    with pytest.raises(ValueError, match="in_chans = 4"):
        decode_rgb(encoded(picture(0)), 4)


def test_decode_rgb_turns_the_picture_upright():
    pixels = np.zeros((10, 20, 3), np.uint8)
    pixels[:5] = 255  # the top, which orientation 6 turns to the right
    exif = Image.Exif()
    exif[0x0112] = 6
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", exif=exif)

    shown = decode_rgb(out.getvalue(), 3)

    assert shown.shape == (20, 10, 3)
    assert shown[:, 5:].min() == 255
    assert shown[:, :5].max() == 0


@pytest.mark.parametrize("in_chans", [1, 3])
def test_decode_rgb_puts_white_behind_what_is_transparent(in_chans):
    layers = np.zeros((4, 6, 4), np.uint8)
    layers[:2, :, 3] = 255  # black above, nothing below

    shown = decode_rgb(encoded(Image.fromarray(layers), "PNG"), in_chans)

    assert shown[:2].max() == 0
    assert shown[2:].min() == 255


@pytest.mark.parametrize("in_chans", [1, 3])
def test_decode_rgb_brings_a_wide_gamut_to_srgb(in_chans):
    plain = decode_rgb(saved(four_corners()), in_chans).astype(int)

    wide = decode_rgb(saved(four_corners(), icc_profile=icc_profile()), in_chans)

    # Red is the first corner; the last, nearly white, is the same in all colour spaces.
    assert np.abs(wide[8, 8] - plain[8, 8]).max() >= 5
    assert np.abs(wide[-8, -8] - plain[-8, -8]).max() <= 2


@pytest.mark.parametrize("profile", [icc_profile(wide=False), icc_profile()[:150], b"no profile"])
def test_decode_rgb_leaves_pixels_alone_if_their_profile_says_nothing_new(profile):
    data = saved(four_corners(), icc_profile=profile)

    assert (decode_rgb(data, 3) == np.asarray(Image.open(io.BytesIO(data)))).all()


def test_decode_rgb_turns_a_picture_whose_other_metadata_is_nonsense():
    # Pillow's own reader of EXIF raises at a signed rational over zero and gives up the rest.
    entries = [(0x011A, 10, 1, struct.pack("<i", 8)), oriented(6)]
    laid = Image.fromarray(four_corners()).transpose(Image.Transpose.ROTATE_90)

    shown = decode_rgb(with_segment(saved(laid), 0xE1, exif_of(*entries)), 3)

    assert np.abs(shown.astype(int) - four_corners()).mean() < 2


@pytest.mark.parametrize("value", [np.float32(0.5), np.int32(1 << 20), np.int32(-1)])
def test_decode_rgb_refuses_values_of_unknown_range(value):
    data = saved(Image.fromarray(np.full((9, 9), value)), "TIFF")

    with pytest.raises(DataError, match="not of 8 or 16 bits"):
        decode_rgb(data, 3)


@pytest.mark.parametrize("eighths", [1, 2, 4])
@pytest.mark.parametrize("size", [(203, 149), (8, 8), (15, 999)])
def test_decode_at_eighths_is_the_picture_at_that_size(eighths, size):
    data = saved(picture(0, *size))

    pixels = decode_rgb(data, 3, eighths)

    height, width = pixels.shape[:2]
    assert (width, height) == tuple(-(-side * eighths // 8) for side in size)
    # A block's average is what the transform gives; sides that are no multiple of 8 are cut.
    whole = decode_rgb(data, 3).astype(int)
    side = 8 // eighths
    rows, columns = size[1] // side, size[0] // side
    blocks = whole[: rows * side, : columns * side].reshape(rows, side, columns, side, 3)
    assert np.abs(pixels[:rows, :columns] - blocks.mean(axis=(1, 3))).mean() < 3


def test_decode_at_eighths_leaves_other_formats_alone():
    assert decode_rgb(encoded(picture(0), "PNG"), 3, 4).shape == (40, 48, 3)


@pytest.mark.parametrize("eighths", [0, 3, 6, 16])
def test_decode_at_other_scales_is_refused(eighths):
    with pytest.raises(ValueError, match=f"eighths = {eighths}"):
        decode_rgb(encoded(picture(0)), 3, eighths)


def test_jpeg_header_gives_sizes_and_segments():
    data = with_segment(encoded(picture(0)), 0xE1, exif_of(oriented(6)))

    width, height, components, precision, segments = jpeg_header(data)

    assert (width, height, components, precision) == (48, 40, 3, 8)
    assert (0xE1, exif_of(oriented(6))) in segments


@pytest.mark.parametrize("data", [b"", b"<html>", encoded(picture(0), "PNG")])
def test_jpeg_header_refuses_other_files(data):
    with pytest.raises(ValueError, match=r"not a JPEG|cannot identify"):
        jpeg_header(data)
