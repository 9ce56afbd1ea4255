"""What is done to an example after crop, resize and flip: RandAugment, 3-Augment, jitter, erasing.

All work on uint8 values and draw from the example's own generator, after its crop: a recipe without
them keeps its pixels.
"""

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vitscale.config.augment import AugmentConfig, Rgb
from vitscale.data.randaugment import rand_augment

Pixels = NDArray[np.uint8]
Picture = Image.Image

# Least and most radius of 3-Augment's blur, px.
_BLUR_PX = (0.1, 2.0)
# Random erasing: tries, area as a part of the example's, and height over width, least and most.
_ERASE_TRIES, _ERASE_AREA, _ERASE_RATIO = 10, (0.02, 1 / 3), (0.3, 1 / 0.3)


def augment_example(out: Pixels, augment: AugmentConfig, rng: np.random.Generator) -> None:
    """Change an example in place, as the recipe says.

    Args:
        out: The example by [C, S, S], of 1 or 3 channels.
        augment: The recipe's table.
        rng: The randomness of this example alone; only `random()` is called, whose stream NumPy
            keeps.
    """
    if augment.randaug_ops or augment.three_augment or augment.color_jitter:
        image = Image.fromarray(out[0] if len(out) == 1 else out.transpose(1, 2, 0))
        if augment.randaug_ops:
            image = rand_augment(image, augment, rng)
        if augment.three_augment:
            image = three_augment(image, rng)
        if augment.color_jitter:
            image = color_jitter(image, augment.color_jitter, rng)
        out[:] = np.asarray(image).reshape(*out.shape[1:], -1).transpose(2, 0, 1)
    if augment.random_erasing:
        random_erasing(out, augment, rng)


def three_augment(image: Picture, rng: np.random.Generator) -> Picture:
    """Make the image grey, solarize it from 128 on, or blur it: one of the three.

    Source:
        arXiv:2204.07118 section 3; facebookresearch/deit, augment.py.
    """
    kind = int(3 * rng.random())
    radius = _between(_BLUR_PX, rng)
    if kind == 0:
        return image.convert("L").convert(image.mode)
    if kind == 1:
        return ImageOps.solarize(image, 128)
    return image.filter(ImageFilter.GaussianBlur(radius))


def color_jitter(image: Picture, spread: float, rng: np.random.Generator) -> Picture:
    """Multiply brightness, contrast and saturation by random factors, in random order.

    Args:
        image: Mode L or RGB.
        spread: Largest distance of a factor from 1, 0 to 1.
        rng: Source of randomness.

    Source:
        torchvision, ColorJitter, without hue.
    """
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    factors = [_between((1.0 - spread, 1.0 + spread), rng) for _ in enhancers]
    keys = [rng.random() for _ in enhancers]
    for index in sorted(range(len(keys)), key=keys.__getitem__):
        image = enhancers[index](image).enhance(factors[index])
    return image


def random_erasing(out: Pixels, augment: AugmentConfig, rng: np.random.Generator) -> None:
    """Replace a rectangle by noise, with the probability augment.random_erasing.

    The noise of a number is normal, of the recipe's mean and standard deviation. The original draws
    it after normalisation and so has tails, where here 0 and 255 are the ends.

    Args:
        out: The example by [C, S, S]; changed in place.
        augment: random_erasing, mean and std.
        rng: Source of randomness.

    Source:
        arXiv:1708.04896; areas, ratios and noise: timm, RandomErasing (mode "pixel").
    """
    if rng.random() >= augment.random_erasing:
        return
    channels, rows, columns = out.shape
    for _ in range(_ERASE_TRIES):
        area = _between(_ERASE_AREA, rng) * rows * columns
        low, high = (math.log(ratio) for ratio in _ERASE_RATIO)
        ratio = math.exp(_between((low, high), rng))
        height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < height < rows and 0 < width < columns:
            break
    else:
        return
    top = int(rng.random() * (rows - height + 1))
    left = int(rng.random() * (columns - width + 1))
    part = out[:, top : top + height, left : left + width]
    mean, std = (_by_channel(values, channels) for values in (augment.mean, augment.std))
    values = mean[:, None, None] + std[:, None, None] * _normals(part.shape, rng)
    part[:] = np.clip(np.rint(255.0 * values), 0, 255).astype(np.uint8)


def _by_channel(values: Rgb, channels: int) -> NDArray[np.float64]:
    """Give a value for each channel: the average for one alone, as normalisation does."""
    return np.array(values if channels == len(values) else [sum(values) / len(values)])


def _between(ends: tuple[float, float], rng: np.random.Generator) -> float:
    return ends[0] + (ends[1] - ends[0]) * float(rng.random())


def _normals(shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw from the normal distribution (Box-Muller)."""
    radius = np.sqrt(-2.0 * np.log1p(-rng.random(shape)))
    return np.asarray(radius * np.cos(2.0 * np.pi * rng.random(shape)))
