import math

import numpy as np
import pytest
from PIL import Image, ImageFilter
from timm.data import auto_augment as timm_ops
from torchvision.transforms.v2 import functional as tv

from tests.helpers.corpus import photos
from tests.helpers.odd_images import saved
from tests.helpers.small_dataset import encoded
from vitscale.config.recipe import AugmentConfig
from vitscale.data.augment import part_box, simple_box
from vitscale.data.image_ops import augment_example, color_jitter, random_erasing, three_augment
from vitscale.data.picture import fast_path, train_example
from vitscale.data.randaugment import OPS, operate, rand_augment, strength_of

PHOTO = Image.fromarray(photos()[0]).resize((96, 96))
GREY = PHOTO.convert("L")
MEAN = (0.485, 0.456, 0.406)
ENHANCE = ("Color", "Contrast", "Brightness", "Sharpness")
MOVES = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")


def rng(seed=0):
    return np.random.default_rng(seed)


def same(first, second):
    return first.mode == second.mode and first.tobytes() == second.tobytes()


def example(data, size=32, seed=0, channels=3, compiled=fast_path, **config):
    out = np.full((channels, size, size), 77, np.uint8)
    train_example(data, out, AugmentConfig(**config), "exact", rng(seed), compiled)
    return out


def timm_name(name, form):
    if name.startswith("Translate"):
        return f"{name}Rel"
    rising = (*ENHANCE, "Posterize", "Solarize")
    return f"{name}Increasing" if form == "deit" and name in rising else name


@pytest.mark.parametrize("name", OPS["deit"])
@pytest.mark.parametrize("level", [0.0, 2.0, 5.0, 9.0, 10.0])
def test_deit_s_strengths_are_timm_s(name, level):
    to_strength = timm_ops.LEVEL_TO_ARG[timm_name(name, "deit")]
    strengths = [strength_of(name, level / 10, sign, "deit") for sign in (1.0, -1.0)]

    if to_strength is None:
        assert strengths == [0, 0]
    else:
        wanted = {to_strength(level, {})[0] for _ in range(40)}  # both signs, by chance
        assert {round(one, 9) for one in strengths} == {round(one, 9) for one in wanted}


@pytest.mark.parametrize("name", ["Rotate", "Posterize", "Solarize", "ShearX", "ShearY", *ENHANCE])
@pytest.mark.parametrize("level", [0.0, 5.0, 10.0, 15.0, 20.0])
def test_augreg_s_strengths_are_those_of_timm_s_form_that_does_not_rise(name, level):
    strengths = [strength_of(name, level / 10, sign, "augreg") for sign in (1.0, -1.0)]

    wanted = {round(timm_ops.LEVEL_TO_ARG[name](level, {})[0], 9) for _ in range(40)}

    assert {round(one, 9) for one in strengths} == wanted


def test_augreg_s_other_strengths_are_big_vision_s_at_224_px():
    assert strength_of("TranslateX", 1.0, 1.0, "augreg") * 224 == pytest.approx(100)
    assert strength_of("TranslateY", 1.5, -1.0, "augreg") * 224 == pytest.approx(-150)
    assert strength_of("Cutout", 1.0, 1.0, "augreg") * 224 == pytest.approx(40)
    assert strength_of("SolarizeAdd", 1.5, 1.0, "augreg") == 165


@pytest.mark.parametrize("image", [PHOTO, GREY], ids=["rgb", "grey"])
@pytest.mark.parametrize("name", OPS["deit"])
def test_an_operation_makes_timm_s_pixels(name, image):
    fill = tuple(round(255 * part) for part in MEAN)
    fill = fill if image.mode == "RGB" else round(sum(fill) / 3)
    keys = {"fillcolor": fill, "resample": Image.Resampling.BICUBIC} if name in MOVES else {}
    for level in (0.2, 0.5, 0.9):
        strength = strength_of(name, level, -1.0, "deit")
        if name in ("Posterize", "Solarize", "SolarizeAdd"):
            strength = int(strength)
        arguments = () if name in ("AutoContrast", "Equalize", "Invert") else (strength,)
        wanted = timm_ops.NAME_TO_OP[timm_name(name, "deit")](image, *arguments, **keys)

        assert same(operate(name, image, strength, "deit", MEAN, rng()), wanted)


def test_posterizing_to_no_bits_leaves_black_and_to_eight_the_picture():
    assert not np.asarray(operate("Posterize", PHOTO, 0, "augreg", MEAN, rng())).any()
    assert same(operate("Posterize", PHOTO, 8, "augreg", MEAN, rng()), PHOTO)


def test_augreg_s_contrast_moves_from_the_grey_of_the_pixel_count():
    image = PHOTO.resize((224, 224))
    values = np.asarray(image, dtype=np.float64)
    for factor in (0.1, 1.9, 3.7):
        made = np.asarray(operate("Contrast", image, factor, "augreg", MEAN, rng()), dtype=int)

        wanted = np.clip(196 + factor * (values - 196), 0, 255)
        assert abs(made - wanted).max() <= 1


def test_augreg_fills_with_grey_what_comes_from_outside():
    shifted = np.asarray(operate("TranslateX", PHOTO, 0.25, "augreg", MEAN, rng()))

    assert (shifted[:, -24:] == 128).all()
    assert (shifted[:, :-24] == np.asarray(PHOTO)[:, 24:]).all()


@pytest.mark.parametrize("image", [PHOTO, GREY], ids=["rgb", "grey"])
def test_cutout_greys_a_square_around_a_random_place(image):
    for seed in range(50):
        draws = rng(seed)
        x, y = int(draws.random() * 96), int(draws.random() * 96)
        made = np.asarray(operate("Cutout", image, 0.125, "augreg", MEAN, rng(seed)))

        wanted = np.asarray(image).copy()
        wanted[max(0, y - 12) : y + 12, max(0, x - 12) : x + 12] = 128
        assert (made == wanted).all()


def test_randaugment_applies_every_operation_in_one_form_and_half_in_the_other():
    whole = AugmentConfig(randaug_ops=1, randaug_magnitude=9)
    half = AugmentConfig(randaug_ops=1, randaug_magnitude=9, randaug_form="deit")
    unchanged = [
        sum(same(rand_augment(PHOTO, config, rng(seed)), PHOTO) for seed in range(400))
        for config in (whole, half)
    ]

    # Solarizing from 230 on, and stretching the contrast of a photo that has all of it, can be
    # nothing.
    assert unchanged[0] < 60
    assert 170 < unchanged[1] < 260


def test_deit_s_magnitudes_are_spread_around_the_recipe_s():
    config = AugmentConfig(randaug_ops=2, randaug_magnitude=9, randaug_form="deit")
    magnitudes = []
    for seed in range(300):
        draws, wanted = rng(seed), PHOTO
        for _ in range(2):
            name = OPS["deit"][int(draws.random() * len(OPS["deit"]))]
            is_applied = draws.random() < 0.5
            radius, angle = math.sqrt(-2 * math.log(1 - draws.random())), math.tau * draws.random()
            magnitudes.append(min(10, 9 + 0.5 * radius * math.cos(angle)))
            sign = -1.0 if draws.random() < 0.5 else 1.0
            if is_applied:
                strength = strength_of(name, magnitudes[-1] / 10, sign, "deit")
                wanted = operate(name, wanted, strength, "deit", config.mean, draws)

        assert same(rand_augment(PHOTO, config, rng(seed)), wanted)
    assert np.std(magnitudes) == pytest.approx(0.48, abs=0.03)  # a few are cut at 10


@pytest.mark.parametrize("magnitude", [0.0, 10.0, 15.0, 20.0])
@pytest.mark.parametrize("channels", [1, 3])
def test_augreg_s_levels_run_on_grey_and_colour(channels, magnitude):
    config = AugmentConfig(randaug_ops=2, randaug_magnitude=magnitude)
    base = np.asarray(PHOTO).transpose(2, 0, 1)[:channels]
    made = []
    for seed in range(60):
        made.append(base.copy())
        augment_example(made[-1], config, rng(seed))

    assert len({one.tobytes() for one in made}) > 10


def test_three_augment_is_grey_solarized_or_blurred():
    wanted = [tv.rgb_to_grayscale(PHOTO, num_output_channels=3), tv.solarize(PHOTO, 128)]
    counts = [0, 0, 0]
    for seed in range(300):
        draws = rng(seed)
        kind, radius = int(3 * draws.random()), 0.1 + 1.9 * draws.random()
        blurred = PHOTO.filter(ImageFilter.GaussianBlur(radius))

        assert same(three_augment(PHOTO, rng(seed)), [*wanted, blurred][kind])
        counts[kind] += 1
    assert min(counts) > 75


def test_color_jitter_is_torchvision_s_in_random_order():
    orders = set()
    for seed in range(60):
        draws = rng(seed)
        factors = [0.7 + 0.6 * draws.random() for _ in range(3)]
        order = tuple(np.argsort([draws.random() for _ in range(3)]))
        wanted = PHOTO
        for index in order:
            adjust = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation)[index]
            wanted = adjust(wanted, factors[index])

        assert same(color_jitter(PHOTO, 0.3, rng(seed)), wanted)
        orders.add(order)
    assert len(orders) == 6


@pytest.mark.parametrize("channels", [1, 3])
def test_random_erasing_puts_noise_into_a_rectangle_of_the_right_size(channels):
    config = AugmentConfig(random_erasing=0.5, mean=(0.45,) * 3, std=(0.05,) * 3)
    erased, areas, values = 0, [], []
    for seed in range(400):
        out = np.full((channels, 64, 64), 255, np.uint8)
        random_erasing(out, config, rng(seed))
        hole = (out != 255).any(axis=0)
        if not hole.any():
            continue
        rows, columns = np.flatnonzero(hole.any(axis=1)), np.flatnonzero(hole.any(axis=0))
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert hole.sum() == height * width
        assert 0.25 < height / width < 4
        erased += 1
        areas.append(hole.mean())
        values.append(out[:, hole].ravel())

    assert 160 < erased < 240
    assert 0.015 < min(areas) < 0.05 < 0.25 < max(areas) < 0.345
    noise = np.concatenate(values) / 255
    assert noise.mean() == pytest.approx(0.45, abs=2e-3)
    assert noise.std() == pytest.approx(0.05, rel=0.02)


@pytest.mark.parametrize("shape", [(150, 225), (225, 150), (160, 160), (160, 40), (36, 24)])
@pytest.mark.parametrize("compiled", [False, True] if fast_path else [False])
def test_simple_crop_is_torchvision_s_resize_pad_crop(shape, compiled):
    height, width = shape
    image = Image.fromarray(photos()[1]).resize((width, height))
    data = encoded(image, "PNG")
    size = 32
    for seed in range(20):
        draws = rng(seed)
        flip = draws.random() < 0.5
        scaled = tv.resize(image, [size], antialias=True)
        padded = np.pad(np.asarray(scaled), ((4, 4), (4, 4), (0, 0)), "reflect")
        top = int(draws.random() * (scaled.height + 8 - size + 1))
        left = int(draws.random() * (scaled.width + 8 - size + 1))
        wanted = padded[top : top + size, left : left + size].transpose(2, 0, 1)
        wanted = wanted[:, :, ::-1] if flip else wanted

        made = example(
            data, size, seed, compiled=compiled, train_crop="simple", antialias=True, hflip=0.5
        )

        # At its sides a part does not look beyond itself, as the whole picture does.
        difference = abs(made.astype(int) - wanted.astype(int))
        assert difference.mean() < 0.5, (seed, difference.mean())
        assert height != width or difference.max() <= 1


def test_simple_crop_reaches_every_place():
    found = {simple_box(100, 180, 50, rng(seed)) for seed in range(3000)}

    assert {shift[0] for _, shift in found} == set(range(-4, 5))
    assert {shift[1] for _, shift in found} == set(range(-4, 5))
    lefts = {box.left for box, _ in found}
    assert {min(lefts), max(lefts)} == {0, 80}
    assert {box[2:] for box, _ in found} == {(100, 100)}


def test_part_box_has_the_picture_s_shape_and_reaches_every_place():
    boxes = [part_box(70, 140, 384 / 448, rng(seed)) for seed in range(2000)]

    assert {box[2:] for box in boxes} == {(60, 120)}
    assert {box.top for box in boxes} == set(range(11))
    assert {box.left for box in boxes} == set(range(21))


def test_resize_crop_is_a_crop_of_the_squared_picture():
    image = Image.fromarray(photos()[0]).resize((112, 56))
    squared = np.asarray(image.resize((56, 56), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    data, compared = encoded(image, "PNG"), 0
    options = {"train_crop": "resize_crop", "resize_crop_ratio": 48 / 56, "antialias": True}
    for seed in range(40):
        draws = rng(seed)
        draws.random()  # the flip
        box = part_box(56, 112, 48 / 56, draws)
        if box.left % 2:
            continue  # half a pixel of the squared picture
        top, left = box.top, box.left // 2

        made = example(data, 48, seed, hflip=0, **options)

        # At its sides a part does not look beyond itself, as the whole picture does.
        wanted = squared[:, top : top + 48, left : left + 48].astype(int)
        assert abs(made - wanted)[:, :, 1:-1].max() <= 1
        compared += 1
    assert compared > 10


@pytest.mark.parametrize(
    "config",
    [
        {"randaug_ops": 2, "randaug_magnitude": 10},
        {"randaug_ops": 2, "randaug_magnitude": 9, "randaug_form": "deit"},
        {"three_augment": True, "color_jitter": 0.3},
        {"random_erasing": 1.0},
    ],
    ids=lambda config: "-".join(config),
)
@pytest.mark.parametrize("channels", [1, 3])
def test_an_augmented_example_is_the_plain_one_and_then_the_operations(config, channels):
    data = saved(Image.fromarray(photos()[0]).resize((120, 90)), quality=90)
    for seed in range(20):
        # The plain example leaves the generator where the operations go on from.
        draws, wanted = rng(seed), np.empty((channels, 40, 40), np.uint8)
        train_example(data, wanted, AugmentConfig(), "exact", draws)
        augment_example(wanted, AugmentConfig(**config), draws)

        for compiled in (False, fast_path):
            made = example(data, 40, seed, channels, compiled, **config)
            assert (made == wanted).all()


def test_a_recipe_without_operations_draws_nothing_more():
    data, draws, reference = encoded(PHOTO, "PNG"), rng(3), rng(3)
    out = np.empty((3, 32, 32), np.uint8)
    train_example(data, out, AugmentConfig(train_crop="resize"), "exact", draws)
    reference.random()  # the flip

    assert draws.random() == reference.random()
