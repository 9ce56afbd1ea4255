"""What is kept as it is, what is refused and with which words."""

import struct
import zlib

import numpy as np
import pytest

from data_prep.images import ImagePolicy, decode_fully, encode_png, prepare_image
from data_prep.verdict import BadInputError
from tests.helpers.odd_images import (
    arithmetic_jpeg,
    chunk,
    corners_of,
    exif,
    four_corners,
    frame_at,
    icc_profile,
    is_like,
    made_png,
    oriented,
    patched,
    saved,
    with_chunk,
    with_segment,
)
from vitscale.config.errors import UserError

KEEP = ImagePolicy("keep")
CHECKS = ("none", "header", "full")
PICTURE = four_corners()
NOISE = np.random.default_rng(0).integers(0, 255, (128, 160, 3), np.uint8)
JPEG, PNG, WEBP = saved(PICTURE), saved(PICTURE, "PNG"), saved(PICTURE, "WEBP", lossless=True)
NOISY = saved(NOISE)
GREY = saved(PICTURE[..., 0])
PNG_START = b"\x89PNG\r\n\x1a\n" + PNG[8:33]
SRGB_LIKE = icc_profile(wide=False)


def end_of_pixels(jpeg: bytes) -> int:
    return jpeg.rindex(b"\xff\xd9")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (JPEG, "jpg"),
        (GREY, "jpg"),
        (saved(PICTURE, progressive=True, subsampling=2), "jpg"),
        (saved(PICTURE, restart_marker_blocks=1), "jpg"),
        (saved(PICTURE, keep_rgb=True), "jpg"),
        (saved(PICTURE, exif=exif(oriented(1))), "jpg"),
        (saved(PICTURE, icc_profile=SRGB_LIKE), "jpg"),
        (saved(PICTURE[..., 0], icc_profile=icc_profile(b"GRAY")), "jpg"),
        (saved(PICTURE[..., 0], icc_profile=icc_profile(b"RGB ")), "jpg"),
        (saved(PICTURE, icc_profile=icc_profile()[:200]), "jpg"),
        (JPEG + bytes(4096), "jpg"),
        (JPEG + b"Something else. " * 64, "jpg"),
        (saved(PICTURE, "MPO", save_all=True, append_images=[]), "jpg"),
        (JPEG + saved(NOISE), "jpg"),
        (PNG, "png"),
        (saved(PICTURE[..., 0], "PNG"), "png"),
        (saved(PICTURE, "PNG", icc_profile=SRGB_LIKE), "png"),
        (WEBP, "webp"),
        (saved(PICTURE, "WEBP"), "webp"),
    ],
    ids=[
        *("jpeg", "grey", "progressive", "restarts", "rgb_jpeg", "exif_1", "srgb", "grey_gamma"),
        *("profile_of_other_pixels", "cut_profile", "zeros_behind", "text_behind", "mpo", "two"),
        *("png", "grey_png", "srgb_png", "webp_lossless", "webp"),
    ],
)
def test_sound_images_keep_their_bytes(data, kind, check):
    image = prepare_image(data, KEEP, check)

    assert image.data is data
    assert (image.image_format, image.input_format, image.changes) == (kind, kind, "")
    width, height = (image.width, image.height)
    assert (width, height) == (image.input_width, image.input_height) == (96, 64)


@pytest.mark.parametrize("colours", [5, 200])
def test_an_opaque_palette_is_sound(colours):
    from PIL import Image

    data = saved(Image.fromarray(PICTURE).quantize(colours), "PNG")
    opaque = with_chunk(data, b"tRNS", b"\xff" * 3)

    assert prepare_image(data, KEEP, "full").data == data
    # Behind the palette is where the chunk belongs, but it is found anywhere.
    assert prepare_image(opaque, KEEP, "header").data == opaque
    assert is_like(data)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty: zero bytes"),
        (bytes(100), "not_an_image: 100 zero bytes"),
        (b"<!DOCTYPE html>\n<html><title>404</title>", "not_an_image: HTML"),
        (b"  \n<HTML lang=en>", "not_an_image: HTML"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "not_an_image: XML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "not_an_image: text"),
        (b"\x1f\x8b\x08" + bytes(20), "not_an_image: gzip"),
        (b"PK\3\4" + bytes(20), "not_an_image: a ZIP archive"),
        (b"RIFF\0\0\0\0WAVEfmt ", "not_an_image: a RIFF file"),
        (b"\0\0\0\x20ftypisom\0\0\0\0", "not_an_image: a film"),
        (b"junk" + JPEG, "not_an_image: starts with"),
        (b"\xff\xd8", "not_an_image"),
        (b"\0\0\0\x20ftypavif\0\0\0\0", "unsupported: AVIF"),
        (b"\0\0\0\x20ftypmif1\0\0\0\0mif1avif", "unsupported: AVIF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "unsupported: HEIF"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "unsupported: JPEG 2000"),
        (b"\xff\x0a\xfa\x7f", "unsupported: JPEG XL"),
        (b"8BPS\0\1", "unsupported: Photoshop"),
        (b"%PDF-1.7", "unsupported: PDF"),
        (b"<?xml version='1.0'?>\n<svg width='10'/>", "unsupported: SVG"),
        (b"\0\0\1\0\1\0", "unsupported: icon"),
        (b"P6\n1 1\n255\n...", "unsupported: PNM"),
        (b"II*\0\x10\0\0\0CR\2\0", "unsupported: Canon raw"),
        (patched(JPEG, frame_at(JPEG) + 4, b"\x0c"), "unsupported: 12-bit JPEG"),
        (patched(JPEG, frame_at(JPEG) + 1, b"\xc3"), "unsupported: lossless or hierarchical"),
        (patched(JPEG, frame_at(JPEG) + 5, b"\0\0"), "unsupported: JPEG that states its height"),
        (patched(JPEG, frame_at(JPEG) + 9, b"\2"), "unsupported: JPEG of 2 components"),
        (patched(JPEG, frame_at(JPEG) + 7, b"\0\0"), "corrupt: the picture is 0 px wide"),
        (patched(JPEG, frame_at(JPEG) + 1, b"\xee"), "corrupt: no frame header"),
        (with_segment(JPEG, 0xC0, JPEG[frame_at(JPEG) + 4 :][:15]), "corrupt: two frame headers"),
        (JPEG[:150], "truncated: the file ends before its first scan"),
        (PNG[:30], "truncated"),
        (PNG_START + PNG[:20], "truncated: the PNG has no whole chunk of pixels"),
        (WEBP[:14], "truncated: the WebP ends before its picture"),
        (b"GIF89a\1", "truncated"),
        (b"BM" + bytes(10), "truncated"),
    ],
)
def test_what_cannot_be_packed_is_named_before_anything_is_decoded(data, reason, check):
    with pytest.raises(BadInputError) as caught:
        prepare_image(data, KEEP, check)

    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (made_png(60_000, 60_000, 1, 0, b""), "too_large: 60000 x 60000 px, the limit is 89478485"),
        (patched(JPEG, frame_at(JPEG) + 5, b"\xff\xdc\xff\xdc"), "truncated: .* at the very least"),
        (with_chunk(PNG, b"zTXt", b"a\0\0" + zlib.compress(bytes(2 << 20))), "too_large: .* zTXt"),
        (
            with_chunk(PNG, b"iTXt", b"a\0\1\0\0\0" + zlib.compress(bytes(2 << 20))),
            "too_large: .* iTXt",
        ),
        (with_chunk(PNG, b"iCCP", b"a\0\0" + zlib.compress(bytes(2 << 20))), "too_large: .* iCCP"),
        (b"GIF89a" + struct.pack("<HH", 60_000, 60_000) + bytes(20), "too_large: 60000 x 60000"),
        (b"BM" + bytes(12) + struct.pack("<Iii", 40, 40_000, -40_000), "too_large: 40000 x 40000"),
    ],
)
def test_bombs_are_found_before_memory_is_taken(data, reason, check):
    with pytest.raises(BadInputError, match=f"^{reason}"):
        prepare_image(data, KEEP, check)


@pytest.mark.parametrize("check", ["header", "full"])
@pytest.mark.parametrize("policy", [KEEP, ImagePolicy("resize", side=32)], ids=["keep", "resize"])
@pytest.mark.parametrize(
    ("data", "word"),
    [
        (NOISY[: len(NOISY) // 2], "truncated"),
        (NOISY[:-200], "truncated"),
        (saved(NOISE, progressive=True)[:-300], "truncated"),
        (saved(NOISE, "PNG")[:-3000], "truncated"),
        (patched(PNG, 60, bytes([PNG[60] ^ 1])), "corrupt: wrong checksum of PNG chunk b'IDAT'"),
        (saved(NOISE, "WEBP")[:-300], "corrupt"),
        (saved(NOISE, "GIF")[:-3000], "truncated"),
        (saved(NOISE, "BMP")[:-3000], "truncated"),
        (saved(NOISE, "TIFF")[:-3000], "corrupt|truncated"),
    ],
)
def test_truncated_and_damaged_files_are_refused(data, word, policy, check):
    with pytest.raises(BadInputError, match=f"^({word})"):
        prepare_image(data, policy, check)


CLOSED = {
    "baseline": saved(NOISE)[:-4000] + b"\xff\xd9",
    "grey": saved(NOISE[..., 0])[:-2000] + b"\xff\xd9",
    "progressive": saved(NOISE, progressive=True)[:-300] + b"\xff\xd9",
    "restarts": saved(NOISE, restart_marker_blocks=40)[:-4000] + b"\xff\xd9",
}


@pytest.mark.parametrize("kind", CLOSED)
@pytest.mark.parametrize(
    ("policy", "check"), [(KEEP, "full"), (ImagePolicy("resize", side=32), "none")]
)
def test_a_jpeg_that_was_cut_and_closed_is_found_by_decoding(kind, policy, check):
    assert prepare_image(CLOSED[kind], KEEP, "header").data == CLOSED[kind]

    with pytest.raises(BadInputError, match=r"^(truncated|corrupt): Corrupt JPEG data"):
        prepare_image(CLOSED[kind], policy, check)


def test_a_cmyk_jpeg_that_was_cut_and_closed_is_found():
    from PIL import Image

    data = saved(Image.fromarray(NOISE).convert("CMYK"))

    with pytest.raises(BadInputError, match=r"^truncated: Corrupt JPEG data: premature end"):
        prepare_image(data[:-4000] + b"\xff\xd9", KEEP, "none")


@pytest.mark.parametrize("check", CHECKS)
def test_stray_bytes_before_the_end_marker_are_no_damage(check):
    data = NOISY[:-2] + b"\x11\x22\x33" * 81 + NOISY[-2:]

    assert prepare_image(data, KEEP, check).data == data
    assert prepare_image(data, ImagePolicy("resize", side=32), check).height == 32


@pytest.mark.parametrize("check", ["header", "full"])
@pytest.mark.parametrize(
    ("whole", "cut"),
    [(NOISY, 2), (NOISY, 1), (PNG, 12), (PNG, 5)],
    ids=["jpg", "jpg", "png", "png"],
)
def test_a_missing_end_is_put_there_if_every_pixel_is(whole, cut, check):
    image = prepare_image(whole[:-cut], KEEP, check)

    assert image.data in (whole, whole[:-1] + b"\xff\xd9")
    assert image.changes == "end"
    assert decode_fully(image.data) == (image.image_format, image.width, image.height)


def test_no_check_does_not_look_for_the_end():
    assert prepare_image(NOISY[:-300], KEEP, "none").data == NOISY[:-300]


def test_the_end_marker_of_a_thumbnail_is_not_the_end():
    with_thumbnail = with_segment(NOISY, 0xE1, b"Exif\0\0" + saved(PICTURE))

    assert prepare_image(with_thumbnail, KEEP, "header").width == 160
    with pytest.raises(BadInputError, match=r"^truncated"):
        prepare_image(with_thumbnail[:-200], KEEP, "header")


def test_stray_bytes_between_segments_are_damage():
    spoilt = NOISY[:20] + b"\1\2\3" + NOISY[20:]  # behind the first segment

    assert prepare_image(spoilt, KEEP, "none").data == spoilt
    with pytest.raises(BadInputError, match=r"^corrupt: Corrupt JPEG data: 3 extraneous bytes"):
        prepare_image(spoilt, KEEP, "header")


@pytest.mark.parametrize(
    ("limits", "size", "reason"),
    [
        ({"min_side": 65}, (96, 64), "bad_shape: 96 x 64 px, a side has 65 at least"),
        ({"max_aspect": 1.4}, (96, 64), "bad_shape: 96 x 64 px, the sides are 1.4 : 1 at most"),
        ({"max_aspect": 1.4}, (64, 96), "bad_shape"),
        ({"max_pixels": 96 * 64 - 1}, (96, 64), "too_large: 96 x 64 px, the limit is 6143 px"),
        ({"max_bytes": 500}, (96, 64), r"too_large: \d+ bytes, the limit is 500"),
    ],
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_limits_refuse_what_lies_outside(limits, size, reason, kind):
    data = saved(four_corners(*size), kind)
    if "max_bytes" in limits:
        data += bytes(500)

    with pytest.raises(BadInputError, match=f"^{reason}"):
        prepare_image(data, ImagePolicy("keep", **limits), "header")


def test_limits_take_what_lies_on_them():
    policy = ImagePolicy("keep", min_side=64, max_aspect=1.5, max_pixels=6144, max_bytes=len(JPEG))

    assert prepare_image(JPEG, policy, "full").data == JPEG


def test_an_error_says_what_was_seen_of_the_image():
    with pytest.raises(BadInputError) as caught:
        prepare_image(NOISY[:-200], KEEP, "header")

    error = caught.value
    assert (error.image_format, error.width, error.height) == ("jpg", 160, 128)


@pytest.mark.parametrize("data", [b"II*\0" + bytes(40), b"GIF89a" + bytes([9, 0, 9, 0] * 9)])
def test_a_reason_is_the_same_in_every_run(data):
    reasons = set()
    for _ in range(3):
        with pytest.raises(BadInputError) as caught:
            prepare_image(data, KEEP, "header")
        reasons.add(str(caught.value))

    assert len(reasons) == 1
    assert " at 0x" not in reasons.pop()


@pytest.mark.parametrize(
    "wrong",
    [
        {"background": "pink"},
        {"background": "#12345"},
        {"quality": 0},
        {"side": 0},
        {"min_side": 0},
        {"max_aspect": 0.5},
    ],
)
def test_a_policy_refuses_values_out_of_range(wrong):
    with pytest.raises(UserError):
        ImagePolicy("resize", **wrong)


def test_a_policy_describes_what_affects_bytes():
    keep, resize = ImagePolicy("keep", side=9).describe(), ImagePolicy("resize", side=9).describe()

    assert "side" not in keep
    assert resize["side"] == 9
    assert keep["background"] == "white"
    for name, value in [("background", "black"), ("animated", "refuse"), ("min_side", 4)]:
        assert ImagePolicy("keep", **{name: value}).describe() != keep
    for name, value in [("edge", "long"), ("quality", 80), ("encoding", "webp")]:
        assert ImagePolicy("resize", side=9, **{name: value}).describe() != resize


@pytest.mark.parametrize("data", [JPEG, PNG, WEBP, arithmetic_jpeg()])
def test_decode_fully_says_what_an_image_is(data):
    kind, width, height = decode_fully(data)

    assert kind in ("jpg", "png", "webp")
    assert (width, height) in ((96, 64), (32, 16))


@pytest.mark.parametrize("data", [CLOSED["baseline"], NOISY[:-300], PNG[:-40], WEBP[:-40]])
def test_decode_fully_refuses_damage(data):
    with pytest.raises(BadInputError):
        decode_fully(data)


def test_encode_png_gives_the_pixels_back():
    data = encode_png(PICTURE)

    assert corners_of(data) == [tuple(map(int, c)) for c in PICTURE[[0, 0, -1, -1], [0, -1, 0, -1]]]
    assert data[:8] == PNG_START[:8]
    assert chunk(b"IEND", b"") == data[-12:]
