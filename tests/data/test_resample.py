import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.corpus import photos
from vitscale.data import resample
from vitscale.data.picture import fast_path
from vitscale.data.resample import Box, taps

if fast_path:
    from vitscale.data import _pixels

needs_extension = pytest.mark.skipif(not fast_path, reason="the C extension is not built here")
PHOTO = photos()[0]


def resized(pixels, box, size, antialias=True, flip=False, compiled=False):
    out = np.full((pixels.shape[2], size, size), 77, np.uint8)
    if compiled:
        _pixels.resize(np.ascontiguousarray(pixels), *box, out, flip, antialias)
    else:
        resample.resize(pixels, box, out, flip, antialias)
    return out


def random_case(rng):
    """A picture of noise, and a rectangle in it: whole pixels or fractions of them."""
    height, width = rng.integers(1, 200, 2)
    pixels = rng.integers(0, 256, (height, width, rng.choice([1, 3])), dtype=np.uint8)
    rows, columns = rng.uniform(0.01, 1, 2) * [height, width]
    top, left = rng.uniform(0, 1, 2) * [height - rows, width - columns]
    if rng.random() < 0.5:
        rows, columns = max(int(rows), 1), max(int(columns), 1)
        top, left = int(top), int(left)
    return pixels, Box(top, left, rows, columns), int(rng.choice([1, 2, 7, 16, 33, 64]))


@needs_extension
@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("flip", [False, True])
def test_extension_and_numpy_give_the_same_bits(antialias, flip):
    rng = np.random.default_rng([antialias, flip])
    for _ in range(150):
        pixels, box, size = random_case(rng)

        expected = resized(pixels, box, size, antialias, flip)

        assert (resized(pixels, box, size, antialias, flip, compiled=True) == expected).all(), box


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("size", [1, 7, 32, 75, 224, 500])
@pytest.mark.parametrize("channels", [1, 3])
def test_resize_is_the_rule_of_torch_in_double_precision(antialias, size, channels):
    box = Box(31, 17, 300, 411)
    crop = PHOTO[31:331, 17:428, :channels]
    image = torch.from_numpy(crop.copy()).permute(2, 0, 1)[None].double()

    exact = torch.nn.functional.interpolate(image, (size, size), mode="bilinear",
                                            antialias=antialias)[0].numpy()  # fmt: skip

    difference = resized(PHOTO[:, :, :channels], box, size, antialias) - exact
    assert np.abs(difference).max() < 0.5 + 1e-3


@pytest.mark.parametrize("size", [10, 64, 224, 500])
def test_antialiased_resize_is_pillows_within_a_level(size):
    ours = resized(PHOTO, Box(0, 0, *PHOTO.shape[:2]), size)

    pillows = np.asarray(Image.fromarray(PHOTO).resize((size, size), Image.Resampling.BILINEAR))

    difference = np.abs(ours.transpose(1, 2, 0).astype(int) - pillows)
    assert difference.max() <= 1
    assert difference.mean() < 0.25  # Pillow rounds its rows before its columns


@pytest.mark.parametrize("antialias", [False, True])
def test_flip_is_the_mirror_image(antialias):
    box = Box(10.5, 3.25, 200, 301.5)

    plain = resized(PHOTO, box, 50, antialias)

    assert (resized(PHOTO, box, 50, antialias, flip=True) == plain[:, :, ::-1]).all()


@pytest.mark.parametrize("antialias", [False, True])
def test_an_even_picture_stays_even(antialias):
    for value in (0, 1, 127, 254, 255):
        pixels = np.full((97, 61, 3), value, np.uint8)

        assert (resized(pixels, Box(0.3, 0.6, 96.1, 60.2), 40, antialias) == value).all()


@pytest.mark.parametrize("antialias", [False, True])
def test_a_square_of_the_same_size_is_a_copy(antialias):
    crop = PHOTO[20:84, 30:94]

    assert (resized(PHOTO, Box(20, 30, 64, 64), 64, antialias) == crop.transpose(2, 0, 1)).all()


def test_nothing_outside_the_rectangle_has_a_say():
    pixels = np.full((80, 90, 3), 255, np.uint8)
    pixels[20:50, 30:70] = 9

    assert (resized(pixels, Box(20, 30, 30, 40), 12) == 9).all()
    assert (resized(pixels, Box(20, 30, 30, 40), 112) == 9).all()


def test_fractions_of_a_pixel_move_the_picture():
    # Eight levels a column, so two levels a quarter of a pixel.
    ramp = np.broadcast_to(np.arange(0, 256, 8, dtype=np.uint8)[None, :, None], (40, 32, 1))

    places = (8, 8.25, 8.5, 8.75, 9)
    values = [int(resized(ramp, Box(0, left, 16, 16), 8)[0, 4, 4]) for left in places]

    assert np.abs(np.diff(values) - 2).max() <= 1
    assert values[-1] - values[0] == 8


@pytest.mark.parametrize("antialias", [False, True])
def test_weights_sum_to_one_and_stay_inside(antialias):
    for start, length, size, places in [(0, 500, 224, 500), (3.5, 12.25, 224, 16), (0, 1, 5, 1)]:
        made = taps(start, length, size, places, antialias)

        used = made.start[:, None] + np.arange(made.weight.shape[1])
        assert np.allclose(made.weight.sum(axis=1), 1, atol=1e-6)
        assert made.weight.min() >= 0
        assert used[made.weight > 0].min() >= int(start)
        assert used[made.weight > 0].max() < min(np.ceil(start + length), places)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_extension)])
@pytest.mark.parametrize(
    "box",
    [
        Box(-1, 0, 5, 5),
        Box(0, -0.5, 5, 5),
        Box(0, 0, 0, 5),
        Box(0, 0, 11, 5),
        Box(0, 16, 5, 5),
        Box(float("nan"), 0, 5, 5),
        Box(0, 0, float("inf"), 5),
    ],
)
def test_a_rectangle_outside_the_picture_is_refused(box, compiled):
    with pytest.raises(ValueError, match="not inside"):
        resized(np.zeros((10, 20, 3), np.uint8), box, 4, compiled=compiled)


@needs_extension
@pytest.mark.parametrize(
    "out",
    [
        np.zeros((3, 4, 5), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((3, 4, 4), np.int8),
        np.zeros((3, 4, 4), np.float32),
        np.zeros((4, 4), np.uint8),
        np.zeros((3, 0, 0), np.uint8),
    ],
    ids=["not-square", "channels", "signed", "float", "two-axes", "empty"],
)
def test_extension_refuses_other_arrays(out):
    with pytest.raises(ValueError, match="out must be uint8"):
        _pixels.resize(np.zeros((9, 9, 3), np.uint8), 0, 0, 9, 9, out, False, True)


@needs_extension
def test_extension_refuses_what_it_cannot_write_or_walk():
    pixels, out = np.zeros((9, 9, 3), np.uint8), np.zeros((3, 4, 4), np.uint8)
    locked = out.copy()
    locked.flags.writeable = False

    for one, other in [(pixels, locked), (pixels, out[:, :, ::-1]), (pixels[:, ::2], out)]:
        with pytest.raises((ValueError, BufferError)):
            _pixels.resize(one, 0, 0, 9, 5, other, False, True)
    with pytest.raises(ValueError, match="different channels"):
        _pixels.resize(pixels[:, :, :1].copy(), 0, 0, 9, 9, out, False, True)
