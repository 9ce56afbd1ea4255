"""Sizes, forms and likeness of what "resize" stores."""

import io

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image

from data_prep.images import ImagePolicy, prepare_image
from data_prep.verdict import BadInputError
from tests.helpers.corpus import photos
from tests.helpers.odd_images import (
    CORNERS,
    four_corners,
    icc_profile,
    is_like,
    oriented,
    saved,
    with_segment,
)
from tests.helpers.odd_images import exif as exif_of

FLOWER = photos()[1]
PHOTO = cv2.resize(FLOWER, (1601, 1067), interpolation=cv2.INTER_CUBIC)
JPEG = saved(PHOTO, quality=92, subsampling="4:2:0")


def pixels_of(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image).astype(int)


def averaged(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BOX)
    return np.asarray(image).astype(int)


@pytest.mark.parametrize(
    ("size", "edge", "wanted"),
    [
        ((200, 100), "short", (100, 50)),
        ((100, 200), "short", (50, 100)),
        ((200, 100), "long", (50, 25)),
        ((100, 200), "long", (25, 50)),
        ((51, 50), "short", (51, 50)),
        ((51, 51), "short", (50, 50)),
        ((2000, 1), "short", (2000, 1)),
        ((2000, 1), "long", (50, 1)),
        ((1, 2000), "long", (1, 50)),
        ((3, 4000), "long", (1, 50)),
    ],
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
def test_the_edge_gets_the_side_and_nothing_is_enlarged(size, edge, wanted, kind):
    data = saved(
        four_corners(*size) if min(size) > 1 else np.zeros((*size[::-1], 3), np.uint8), kind
    )

    image = prepare_image(data, ImagePolicy("resize", side=50, edge=edge), "header")

    assert (image.width, image.height) == wanted
    assert (image.input_width, image.input_height) == size
    with Image.open(io.BytesIO(image.data)) as opened:
        assert opened.size == wanted
    assert ("resized" in image.changes) == (wanted != size)


def distance(data: bytes, reference: np.ndarray) -> float:
    return float(np.abs(pixels_of(data) - reference).mean())


@pytest.mark.parametrize("side", [100, 130, 200, 266, 400, 512, 534, 700, 1000])
def test_a_resized_jpeg_is_like_a_full_decode(side):
    image = prepare_image(JPEG, ImagePolicy("resize", side=side, quality=95), "header")

    reference = averaged(pixels_of(JPEG).astype(np.uint8), image.width, image.height)
    assert distance(image.data, reference) < 3


@pytest.mark.parametrize("side", [500, 260, 130])
def test_a_resized_jpeg_does_not_shift(side):
    # Sides that are no multiples of 8: decoded at a fraction, the last pixels are partly empty.
    wave = 127 + 120 * np.sin(np.arange(1067) / 1067 * 2 * np.pi * side / 8)
    rows = np.repeat(wave[:, None], 1061, axis=1).astype(np.uint8)
    data = saved(rows, quality=95)

    image = prepare_image(data, ImagePolicy("resize", side=side, quality=95), "header")

    last = pixels_of(image.data)[-side // 8 :, : side // 2].mean(axis=1)
    reference = averaged(rows, image.width, image.height)[-side // 8 :, : side // 2].mean(axis=1)
    assert np.abs(last - reference).mean() < 10


def test_all_formats_are_averaged_alike():
    policy = ImagePolicy("resize", side=100, quality=98)

    images = [
        prepare_image(saved(FLOWER, kind, **options), policy, "header")
        for kind, options in [("PNG", {}), ("WEBP", {"lossless": True}), ("BMP", {}), ("TIFF", {})]
    ]

    assert len({image.data for image in images}) == 1
    assert images[0].image_format == "jpg"
    assert distance(images[0].data, averaged(FLOWER, 150, 100)) < 3


def test_small_sound_images_keep_their_bytes():
    data = saved(four_corners())

    assert prepare_image(data, ImagePolicy("resize", side=64), "full").data is data


def test_small_images_that_are_not_sound_lose_nothing():
    alpha = saved(Image.fromarray(four_corners()).convert("RGBA"), "PNG")

    image = prepare_image(alpha, ImagePolicy("resize", side=64), "header")

    assert (image.image_format, image.changes) == ("png", "alpha")
    assert is_like(image.data, tolerance=0)


def test_what_is_resized_has_half_the_colours_and_no_metadata():
    data = saved(PHOTO, exif=exif_of(oriented(1)), icc_profile=icc_profile(wide=False))

    image = prepare_image(data, ImagePolicy("resize", side=100), "header")

    assert simplejpeg.decode_jpeg_header(image.data)[2:] == ("YCbCr", "420")
    with Image.open(io.BytesIO(image.data)) as opened:
        assert not {"exif", "icc_profile"} & set(opened.info)


def test_grey_stays_grey():
    image = prepare_image(saved(PHOTO[..., 1]), ImagePolicy("resize", side=100), "header")

    assert simplejpeg.decode_jpeg_header(image.data)[2:] == ("Gray", "Gray")


def test_quality_and_encoding_are_obeyed():
    sizes = {
        (encoding, quality): len(
            prepare_image(
                JPEG, ImagePolicy("resize", side=100, encoding=encoding, quality=quality), "none"
            ).data
        )
        for encoding in ("jpeg", "webp")
        for quality in (60, 95)
    }
    assert sizes["jpeg", 60] < 0.6 * sizes["jpeg", 95]
    assert sizes["webp", 60] < 0.6 * sizes["webp", 95]

    image = prepare_image(JPEG, ImagePolicy("resize", side=100, encoding="webp"), "none")

    assert image.image_format == "webp"
    assert image.data[8:12] == b"WEBP"


@pytest.mark.parametrize("orientation", [3, 6])
@pytest.mark.parametrize("colours", ["JPEG", "CMYK", "wide"])
def test_turning_and_colours_come_with_the_size(orientation, colours):
    back = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90}[orientation]
    laid = Image.fromarray(four_corners(401, 251)).transpose(back)
    options = {"icc_profile": icc_profile()} if colours == "wide" else {}
    data = saved(laid.convert("CMYK") if colours == "CMYK" else laid, **options)
    data = with_segment(data, 0xE1, exif_of(oriented(orientation)))

    image = prepare_image(data, ImagePolicy("resize", side=60), "header")

    assert (image.width, image.height) == (96, 60)
    wanted = [(233, 35, 35), (0, 172, 57), (38, 59, 194), (216, 215, 200)]
    assert is_like(image.data, wanted if colours == "wide" else CORNERS, tolerance=16)
    words = {"JPEG": [], "CMYK": ["cmyk"], "wide": ["icc"]}[colours]
    assert sorted(image.changes.split(",")) == sorted(["resized", "turned", *words])


def test_a_sampling_that_the_fast_decoder_does_not_know_is_read_all_the_same():
    # 4:1:0, two rows of luma and four columns for one value of colour
    pixels = np.full((64, 96, 3), (200, 40, 40), np.uint8)
    data = bytearray(saved(pixels, subsampling="4:2:0"))
    frame = data.index(b"\xff\xc0")
    data[frame + 11] = 0x42
    with pytest.raises(ValueError, match="subsampling"):
        simplejpeg.decode_jpeg_header(bytes(data))

    try:
        image = prepare_image(bytes(data), ImagePolicy("resize", side=16), "header")
    except BadInputError as error:
        pytest.fail(f"{error}")

    assert (image.width, image.height) == (24, 16)


def test_the_same_input_gives_the_same_bytes():
    policy = ImagePolicy("resize", side=300)

    assert len({prepare_image(JPEG, policy, "header").data for _ in range(3)}) == 1
