import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.small_dataset import picture
from vitscale.config.recipe import AugmentConfig
from vitscale.data.augment import Box, eval_image, inception_box, resize_bilinear, train_image

PIXELS = np.asarray(picture(0, 100, 75))
RATIO = (0.75, 4 / 3)


def boxes(height, width, scale, ratio=RATIO, count=2000, seed=0):
    rng = np.random.default_rng(seed)
    return [inception_box(height, width, scale, ratio, rng) for _ in range(count)]


@pytest.mark.parametrize("size", [(375, 500), (500, 375), (64, 64), (8, 8), (300, 900)])
def test_inception_box_keeps_its_limits(size):
    height, width = size

    for box in boxes(height, width, (0.05, 1.0)):
        assert box.top >= 0
        assert box.left >= 0
        assert box.top + box.height <= height
        assert box.left + box.width <= width
        whole = (box.height, box.width) == size
        assert whole or 0.05 * height * width <= box.height * box.width <= height * width
        # Width is rounded after the aspect was drawn.
        assert whole or (box.height * 0.75 - 0.5 <= box.width <= box.height * 4 / 3 + 0.5)


def test_inception_box_height_is_uniform():
    # Square crops of 5 % to 100 % of a square: heights 22.4 .. 100, uniform, mean 61.2 (a uniform
    # area would give a mean height of 70).
    heights = [box.height for box in boxes(100, 100, (0.05, 1.0), (1.0, 1.0), 4000)]

    assert abs(np.mean(heights) - 61.0) < 1.5
    assert min(heights) == 23
    assert max(heights) == 100


def test_inception_box_reaches_every_edge():
    found = boxes(8, 8, (0.05, 0.5))

    assert min(box.top for box in found) == 0
    assert max(box.top + box.height for box in found) == 8
    assert max(box.left + box.width for box in found) == 8


def test_inception_box_that_cannot_be_met_is_the_whole_image():
    # Near the whole area of a strip cannot have an aspect near one.
    assert boxes(10, 1000, (0.9, 1.0), count=5) == [Box(0, 0, 10, 1000)] * 5


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("img_size", [7, 32, 75, 224])
def test_resize_bilinear_is_the_interpolation_between_nearest_pixels(channels, img_size):
    pixels = PIXELS[:, :, :channels]

    resized = resize_bilinear(pixels, img_size)

    exact = torch.nn.functional.interpolate(
        torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].double(),
        (img_size, img_size),
        mode="bilinear",
        antialias=False,
    )[0]
    assert resized.dtype == torch.uint8
    assert resized.shape == (channels, img_size, img_size)
    # Rounding of fixed-point weights in the uint8 kernel.
    assert (resized.double() - exact).abs().max() <= 1.01


def test_train_image_is_a_function_of_its_generator():
    config = AugmentConfig()

    one = train_image(PIXELS, 32, config, np.random.default_rng(1))
    same = train_image(PIXELS, 32, config, np.random.default_rng(1))
    other = train_image(PIXELS, 32, config, np.random.default_rng(2))

    assert one.shape == (3, 32, 32)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_train_image_flip_mirrors_the_picture():
    plain = AugmentConfig(train_crop="resize", hflip=0.0)
    flipped = AugmentConfig(train_crop="resize", hflip=1.0)

    one = train_image(PIXELS, 50, plain, np.random.default_rng(0))
    other = train_image(PIXELS, 50, flipped, np.random.default_rng(0))

    assert torch.equal(one, resize_bilinear(PIXELS, 50))
    # The mirrored weights are rounded on their own.
    assert (one.flip(2).int() - other.int()).abs().max() <= 1
    assert not torch.equal(one, other)


def test_train_image_flips_with_the_given_probability():
    config = AugmentConfig(train_crop="resize", hflip=0.25)
    plain = resize_bilinear(PIXELS, 16)

    flips = sum(
        not torch.equal(train_image(PIXELS, 16, config, np.random.default_rng(i)), plain)
        for i in range(1000)
    )

    assert 200 < flips < 300


def test_train_image_crop_is_part_of_the_picture():
    # Every pixel holds its place: rows in channel 0, columns in channel 1.
    rows, columns = np.meshgrid(np.arange(200), np.arange(250), indexing="ij")
    places = np.stack([rows, columns, 0 * rows], axis=2).astype(np.uint8)
    config = AugmentConfig(hflip=0.0, crop_scale=(0.2, 0.3))
    rng = np.random.default_rng(5)
    rng.random()  # the flip
    box = inception_box(200, 250, (0.2, 0.3), RATIO, rng)

    image = train_image(places, 40, config, np.random.default_rng(5)).int()

    assert abs(int(image[0].min()) - box.top) <= 2
    assert abs(int(image[0].max()) - (box.top + box.height - 1)) <= 2
    assert abs(int(image[1].min()) - box.left) <= 2
    assert abs(int(image[1].max()) - (box.left + box.width - 1)) <= 2


@pytest.mark.parametrize("size", [(100, 75), (75, 100), (500, 400), (10, 300), (8, 8)])
@pytest.mark.parametrize("channels", [1, 3])
def test_eval_image_centre_crop_has_the_right_shape_and_middle(size, channels):
    height, width = size
    rows, columns = np.meshgrid(
        np.linspace(0, 255, height), np.linspace(0, 255, width), indexing="ij"
    )
    pixels = np.stack([rows, columns, rows], axis=2).astype(np.uint8)[:, :, :channels]

    image = eval_image(pixels, 56, AugmentConfig())

    assert image.shape == (channels, 56, 56)
    # A crop of the middle has a symmetric gradient around the middle of the values.
    assert abs(float(image[0].float().mean()) - 127.5) < 4
    if channels == 3:
        assert abs(float(image[1].float().mean()) - 127.5) < 4


def test_eval_image_centre_crop_follows_resize_then_crop():
    pixels = np.asarray(picture(3, 512, 384))

    image = eval_image(pixels, 224, AugmentConfig())

    small = Image.fromarray(pixels).resize((341, 256), Image.Resampling.BOX)
    assert (image.permute(1, 2, 0).numpy() == np.asarray(small)[16:240, 58:282]).all()


def test_eval_image_resize_uses_the_whole_picture():
    image = eval_image(PIXELS, 32, AugmentConfig(eval_crop="resize"))

    assert torch.equal(image, resize_bilinear(PIXELS, 32))
