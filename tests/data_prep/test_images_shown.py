"""Images that decoders do not show alike are stored as a viewer shows them."""

import io
import itertools
import struct
import threading

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from data_prep.images import ImagePolicy, prepare_image
from data_prep.verdict import BadInputError
from tests.helpers.odd_images import (
    CORNERS,
    arithmetic_jpeg,
    cmyk_profile,
    exif,
    four_corners,
    frame_at,
    icc_profile,
    is_like,
    made_png,
    oriented,
    saved,
    with_chunk,
    with_segment,
)
from vitscale.data.decode import decode_rgb

KEEP = ImagePolicy("keep")
PICTURE = four_corners()
IMAGE = Image.fromarray(PICTURE)
PNG = saved(PICTURE, "PNG")
GREY = np.asarray(IMAGE.convert("L"))
GREY_CORNERS = [(int(v),) * 3 for v in GREY[[0, 0, -1, -1], [0, -1, 0, -1]]]
# EXIF orientation -> how a picture is laid down to be seen upright with it
LAID_DOWN = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def with_hole(mode: str) -> Image.Image:
    """The picture in RGBA or LA; its transparent middle hides magenta, or black."""
    image = IMAGE.convert(mode)
    pixels = np.array(image)
    pixels[24:40, 32:64] = (255, 0, 255, 0) if mode == "RGBA" else (0, 0)
    return Image.fromarray(pixels)


def middle_of(data: bytes) -> tuple[int, ...]:
    with Image.open(io.BytesIO(data)) as image:
        pixels = np.asarray(image.convert("RGB"))
    return tuple(int(value) for value in pixels[pixels.shape[0] // 2, pixels.shape[1] // 2])


def deep(pixels: np.ndarray) -> np.ndarray:
    """The same picture in 16 bits."""
    return pixels.astype(np.uint16) * 257


def deep_png(pixels: np.ndarray) -> bytes:
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in deep(pixels))
    return made_png(pixels.shape[1], pixels.shape[0], 16, 2 if pixels.ndim == 3 else 0, rows)


def grey_png(depth: int) -> bytes:
    """Stripes of all greys of 1, 2 or 4 bits."""
    values = np.repeat(np.arange(1 << depth, dtype=np.uint8), 8)
    bits = np.unpackbits(values[:, None], axis=1)[:, 8 - depth :]
    row = b"\0" + np.packbits(bits).tobytes()
    return made_png(len(values), 4, depth, 0, row * 4)


def inverted_cmyk(subsampling: str) -> bytes:
    """A YCCK JPEG as Adobe's programs write it: inks stored inverted."""
    inks = 255 - np.asarray(IMAGE.convert("CMYK"))
    return simplejpeg.encode_jpeg(np.ascontiguousarray(inks), 95, "CMYK", subsampling)


ODD = {
    "cmyk_jpeg": (saved(IMAGE.convert("CMYK")), "cmyk", "jpg"),
    "ycck_jpeg": (inverted_cmyk("444"), "cmyk", "jpg"),
    "ycck_420_jpeg": (inverted_cmyk("420"), "cmyk", "jpg"),
    "cmyk_tiff": (saved(IMAGE.convert("CMYK"), "TIFF"), "format,cmyk", "png"),
    "rgb16_png": (deep_png(PICTURE), "16bit", "png"),
    "gif": (saved(IMAGE, "GIF"), "format", "png"),
    "bmp": (saved(IMAGE, "BMP"), "format", "png"),
    "bmp_os2": (
        b"BM"
        + struct.pack("<IHHI", 26 + 96 * 64 * 3, 0, 0, 26)
        + struct.pack("<IHHHH", 12, 96, 64, 1, 24)
        + PICTURE[::-1, :, ::-1].tobytes(),
        "format",
        "png",
    ),
    "tiff": (saved(IMAGE, "TIFF", compression="tiff_lzw"), "format", "png"),
    "jpeg_in_tiff": (saved(IMAGE, "TIFF", compression="jpeg", quality=95), "format", "jpg"),
    "tiff_pages": (
        saved(IMAGE, "TIFF", save_all=True, append_images=[Image.new("RGB", (9, 9))]),
        "format,first_frame",
        "png",
    ),
    "animated_gif": (
        saved(IMAGE, "GIF", save_all=True, append_images=[Image.new("RGB", (96, 64))]),
        "format,first_frame",
        "png",
    ),
    "animated_webp": (
        saved(
            IMAGE, "WEBP", save_all=True, append_images=[Image.new("RGB", (96, 64))], lossless=True
        ),
        "first_frame",
        "png",
    ),
    "animated_lossy_webp": (
        saved(IMAGE, "WEBP", save_all=True, append_images=[Image.new("RGB", (96, 64))], quality=99),
        "first_frame",
        "jpg",
    ),
    "animated_png": (
        saved(IMAGE, "PNG", save_all=True, append_images=[Image.new("RGB", (96, 64))]),
        "first_frame",
        "png",
    ),
    "opaque_webp_with_exif": (
        saved(IMAGE.convert("RGBA"), "WEBP", lossless=True, exact=True, exif=exif(oriented(1))),
        "",
        "webp",
    ),
}


@pytest.mark.parametrize("check", ["none", "header", "full"])
@pytest.mark.parametrize("kind", ODD)
def test_odd_images_are_stored_as_they_are_shown(kind, check):
    data, changes, stored_as = ODD[kind]

    image = prepare_image(data, KEEP, check)

    assert (image.changes, image.image_format) == (changes, stored_as)
    assert (image.width, image.height) == (image.input_width, image.input_height) == (96, 64)
    # Chroma of lossy inputs and the 5-bit palette of GIF were that far off before.
    assert is_like(image.data, tolerance=12)
    if changes:
        again = prepare_image(image.data, KEEP, "full")
        assert (again.data, again.changes) == (image.data, "")


@pytest.mark.parametrize("kind", ODD)
def test_training_sees_the_same_picture_whether_it_was_packed_or_indexed(kind):
    data = ODD[kind][0]

    indexed, packed = decode_rgb(data, 3), decode_rgb(prepare_image(data, KEEP, "none").data, 3)

    assert np.abs(indexed.astype(int) - packed).mean() < 1


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", LAID_DOWN)
def test_turned_images_are_stored_upright(orientation, image_format):
    options = {"lossless": True} if image_format == "WEBP" else {}
    laid = IMAGE.transpose(LAID_DOWN[orientation])
    tag = Image.Exif()
    tag[0x0112] = orientation

    data = saved(laid, image_format, exif=tag, **options)
    image = prepare_image(data, KEEP, "header")

    assert "turned" in image.changes.split(",")
    assert (image.input_width, image.input_height) == laid.size
    assert (image.width, image.height) == (96, 64)
    assert is_like(image.data)
    assert prepare_image(image.data, KEEP, "header").changes == ""
    assert np.abs(decode_rgb(data, 3).astype(int) - decode_rgb(image.data, 3)).mean() < 1


NONSENSE = {
    "rationals_over_zero": [(0x011A, 5, 1, struct.pack("<I", 8)), (0x829A, 5, 1, bytes(4))],
    "signed_rational_over_zero": [(0x9201, 10, 1, struct.pack("<I", 8))],
    "resolution_as_text": [(0x011A, 2, 4, b"abc\0")],
    "offset_beyond_the_end": [(0x010F, 2, 999_999, struct.pack("<I", 0xFFFFFF00))],
    "unknown_type": [(0x0100, 99, 1, bytes(4))],
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_beside_an_orientation_does_not_hide_it(kind):
    laid = saved(IMAGE.transpose(LAID_DOWN[6]))

    image = prepare_image(
        with_segment(laid, 0xE1, exif(*NONSENSE[kind], oriented(6))), KEEP, "header"
    )

    assert image.changes == "turned"
    assert is_like(image.data)


@pytest.mark.parametrize("order", ["<", ">"])
def test_an_orientation_is_found_in_both_byte_orders_behind_a_broken_xmp(order):
    laid = saved(IMAGE.transpose(LAID_DOWN[8]))
    data = with_segment(laid, 0xE1, exif(oriented(8, order), order=order))
    data = with_segment(data, 0xE1, b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta>\xff\xfe\x80")

    assert is_like(prepare_image(data, KEEP, "header").data)
    assert np.abs(decode_rgb(data, 3)[4, 4].astype(int) - CORNERS[0]).max() < 10


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"Exif\0\0",
        b"Exif\0\0II*\0",
        b"Exif\0\0XX*\0\x08\0\0\0",
        exif(oriented(6))[:20],
        exif(oriented(0)),
        exif(oriented(9)),
        exif((0x0112, 2, 1, b"6\0\0\0")),
        exif()[:10] + b"\xff\xff\xff\xff",
    ],
)
def test_an_orientation_that_cannot_be_read_is_upright(block):
    data = with_segment(saved(PICTURE), 0xE1, block)

    assert prepare_image(data, KEEP, "header").changes == ""


@pytest.mark.parametrize(
    ("background", "rgb"),
    [
        ("white", (255, 255, 255)),
        ("black", (0, 0, 0)),
        ("gray", (128, 128, 128)),
        ("#102030", (16, 32, 48)),
    ],
)
@pytest.mark.parametrize(
    ("mode", "image_format"), [("RGBA", "PNG"), ("LA", "PNG"), ("RGBA", "WEBP"), ("RGBA", "TIFF")]
)
def test_the_background_shows_through(mode, image_format, background, rgb):
    options = {"lossless": True, "exact": True} if image_format == "WEBP" else {}
    data = saved(with_hole(mode), image_format, **options)

    image = prepare_image(data, ImagePolicy("keep", background=background), "header")

    assert "alpha" in image.changes
    assert image.image_format == "png"
    assert is_like(image.data, CORNERS if mode == "RGBA" else GREY_CORNERS, tolerance=1)
    assert middle_of(image.data) == rgb


def test_a_transparent_palette_entry_shows_the_background():
    indices = np.zeros((64, 96), np.uint8)
    indices[:, 48:] += 1
    indices[32:] += 2
    indices[24:40, 32:64] = 4
    image = Image.fromarray(indices)
    image.putpalette([value for colour in (*CORNERS, (255, 0, 255)) for value in colour])
    data = saved(image, "PNG", transparency=bytes([255, 255, 255, 255, 0]))

    stored = prepare_image(data, KEEP, "header")

    assert stored.changes == "alpha"
    assert middle_of(stored.data) == (255, 255, 255)
    assert is_like(stored.data, tolerance=0)


@pytest.mark.parametrize("depth", [8, 16])
def test_a_transparent_grey_shows_the_background(depth):
    values = np.full((64, 96), 30, np.uint8)
    values[24:40, 32:64] = 200
    data = deep_png(values) if depth == 16 else saved(values, "PNG")
    hidden = struct.pack(">H", 200 * 257 if depth == 16 else 200)

    stored = prepare_image(with_chunk(data, b"tRNS", hidden), KEEP, "header")

    assert "alpha" in stored.changes
    assert middle_of(stored.data) == (255, 255, 255)
    assert is_like(stored.data, [(30, 30, 30)] * 4, tolerance=0)


@pytest.mark.parametrize(("depth", "changes"), [(1, "1bit"), (2, "2bit"), (4, "4bit")])
def test_greys_of_few_bits_fill_the_range(depth, changes):
    image = prepare_image(grey_png(depth), KEEP, "header")

    assert image.changes == changes
    with Image.open(io.BytesIO(image.data)) as opened:
        values = np.asarray(opened)[0, ::8]
    assert values.tolist() == np.linspace(0, 255, 1 << depth).round().astype(int).tolist()


@pytest.mark.parametrize("image_format", ["PNG", "TIFF"])
def test_sixteen_bits_keep_the_upper_byte(image_format):
    values = np.arange(65_536, dtype=np.uint16).reshape(256, 256)

    image = prepare_image(saved(Image.fromarray(values), image_format), KEEP, "header")

    assert "16bit" in image.changes
    with Image.open(io.BytesIO(image.data)) as opened:
        assert (np.asarray(opened) == values >> 8).all()


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_wide_gamut_is_brought_to_srgb(image_format):
    options = {"lossless": True} if image_format == "WEBP" else {}
    data = saved(IMAGE, image_format, icc_profile=icc_profile(), **options)

    image = prepare_image(data, KEEP, "header")

    # Worked out by hand from the primaries; red is outside sRGB.
    assert is_like(image.data, [(233, 35, 35), (0, 172, 57), (38, 59, 194), (216, 215, 200)], 14)
    assert not is_like(image.data)
    with Image.open(io.BytesIO(image.data)) as opened:
        assert "icc_profile" not in opened.info
    assert np.abs(decode_rgb(data, 3).astype(int) - decode_rgb(image.data, 3)).mean() < 1


def test_a_grey_curve_is_brought_to_srgb():
    data = saved(GREY, "PNG", icc_profile=icc_profile(b"GRAY", gamma=1.0))

    image = prepare_image(data, KEEP, "header")

    assert image.changes == "icc"
    with Image.open(io.BytesIO(image.data)) as opened:
        assert opened.mode == "L"
        shown = np.asarray(opened).astype(int)
    linear = GREY / 255
    srgb = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    assert np.abs(shown - srgb * 255).max() < 2


def test_transparency_and_profile_go_together():
    data = saved(with_hole("RGBA"), "PNG", icc_profile=icc_profile())

    image = prepare_image(data, KEEP, "header")

    assert image.changes == "alpha,icc"
    assert middle_of(image.data) == (255, 255, 255)
    assert not is_like(image.data)


def test_a_profile_of_inks_decides_what_cmyk_looks_like():
    yellow = Image.new("CMYK", (32, 32), (0, 0, 255, 0))

    image = prepare_image(saved(yellow, icc_profile=cmyk_profile()), KEEP, "header")

    assert image.changes == "cmyk,icc"
    red, green, blue = middle_of(image.data)
    assert min(red, blue) > green + 50  # pink, by this profile
    assert middle_of(prepare_image(saved(yellow), KEEP, "header").data) == (255, 255, 0)


def test_an_arithmetic_coded_jpeg_becomes_one_that_all_read():
    data = arithmetic_jpeg()

    image = prepare_image(data, KEEP, "header")

    assert image.changes == "arithmetic"
    with Image.open(io.BytesIO(data)) as before, Image.open(io.BytesIO(image.data)) as after:
        assert np.abs(np.asarray(before, int) - np.asarray(after, int)).max() <= 3
    assert simplejpeg.decode_jpeg_header(image.data)[:3] == (16, 32, "Gray")


def test_a_jpeg_without_its_code_tables_gets_them():
    # The tables of T.81, annex K, which film formats leave out.
    data = saved(PICTURE, optimize=False)
    while (start := data.find(b"\xff\xc4")) >= 0:
        data = data[:start] + data[start + 2 + int.from_bytes(data[start + 2 : start + 4], "big") :]

    image = prepare_image(data, KEEP, "header")

    assert image.changes == "tables"
    assert b"\xff\xc4" in image.data
    assert is_like(image.data)


@pytest.mark.parametrize("kind", ["animated_gif", "animated_webp", "animated_png", "tiff_pages"])
def test_animations_can_be_refused(kind):
    with pytest.raises(BadInputError, match=r"^unsupported: more than one frame"):
        prepare_image(ODD[kind][0], ImagePolicy("keep", animated="refuse"), "header")


@pytest.mark.parametrize("kind", ["gif", "tiff"])
def test_single_frames_are_no_animation(kind):
    policy = ImagePolicy("keep", animated="refuse")

    assert is_like(prepare_image(ODD[kind][0], policy, "header").data, tolerance=12)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (
            saved(Image.fromarray(np.ones((9, 9), np.float32)), "TIFF"),
            "unsupported: grey values of mode F",
        ),
        (
            saved(Image.fromarray(np.full((9, 9), 1 << 20, np.int32)), "TIFF"),
            "unsupported: grey values of mode I",
        ),
        (
            saved(IMAGE, "TIFF", tiffinfo={254: 1}),
            "unsupported: TIFF that begins with a preview",
        ),
    ],
)
def test_pixels_without_a_rule_are_refused(data, reason):
    with pytest.raises(BadInputError, match=f"^{reason}"):
        prepare_image(data, KEEP, "none")


def test_a_lossy_picture_too_long_for_a_jpeg_is_refused():
    data = saved(Image.new("RGB", (8, 65_600)), "TIFF", compression="tiff_lzw")
    assert prepare_image(data, KEEP, "none").image_format == "png"

    with pytest.raises(BadInputError, match=r"^bad_shape: 32800 px is too long for webp"):
        prepare_image(data, ImagePolicy("resize", side=4, encoding="webp"), "none")


def test_threads_neither_warn_nor_disturb_each_other():
    # Pillow warns of palettes with several transparent entries, which pytest makes an error.
    data = saved(Image.fromarray(PICTURE).quantize(8), "PNG", transparency=bytes([0, 9, 255]))
    alone = prepare_image(data, KEEP, "header")
    problems, stored = [], set()

    def work() -> None:
        try:
            for _ in itertools.repeat(None, 40):
                stored.add(prepare_image(data, KEEP, "header").data)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not problems
    assert stored == {alone.data}


def test_the_frame_header_of_a_picture_from_a_camera_is_found_behind_its_segments():
    data = saved(PICTURE, "MPO", save_all=True, append_images=[Image.new("RGB", (9, 9))])
    data = with_segment(data, 0xE1, exif(oriented(1)) + bytes(60_000))

    image = prepare_image(data, KEEP, "full")

    assert (image.data, image.image_format, image.width) == (data, "jpg", 96)
    assert frame_at(data) > 60_000
