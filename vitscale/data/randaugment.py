"""RandAugment: a few operations an example, drawn from a list, all of one strength.

There are two forms, which share the operations. "augreg" is what AugReg and big_vision train with:
every drawn operation is applied. "deit" is that of DeiT, from timm: half of them are, the strength
varies a little, and every operation is the stronger the higher its level.
"""

import math
from typing import Literal

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from vitscale.config.augment import AugmentConfig, Rgb

Form = Literal["augreg", "deit"]
Picture = Image.Image

_ENHANCERS = {
    "Color": ImageEnhance.Color,
    "Contrast": ImageEnhance.Contrast,
    "Brightness": ImageEnhance.Brightness,
    "Sharpness": ImageEnhance.Sharpness,
}
_SHARED = (
    "AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd",
    *_ENHANCERS, "ShearX", "ShearY", "TranslateX", "TranslateY",
)  # fmt: skip
OPS: dict[Form, tuple[str, ...]] = {"augreg": (*_SHARED, "Cutout"), "deit": _SHARED}
_PROBABILITY = {"augreg": 1.0, "deit": 0.5}
# Standard deviation of the magnitude.
_SPREAD = {"augreg": 0.0, "deit": 0.5}
# The largest shift as a part of the side; augreg: 100 px of 224.
_SHIFT = {"augreg": 100 / 224, "deit": 0.45}
# Half a side of the square that Cutout takes: 40 px of 224.
_CUTOUT = 40 / 224
_GREY = 128


def rand_augment(image: Picture, config: AugmentConfig, rng: np.random.Generator) -> Picture:
    """Apply the operations of one example.

    Args:
        image: Mode L or RGB.
        config: randaug_ops, randaug_magnitude and randaug_form; mean fills what comes from outside
            the picture in the form "deit".
        rng: Source of randomness; only `random()` is called, whose stream NumPy keeps.

    Returns:
        An image of the same mode and size.

    Source:
        arXiv:1909.13719. "augreg": google-research/big_vision, pp/autoaugment.py,
        distort_image_with_randaugment. "deit": timm, rand_augment_transform.
    """
    form = config.randaug_form
    names = OPS[form]
    for _ in range(config.randaug_ops):
        name = names[int(rng.random() * len(names))]
        is_applied = rng.random() < _PROBABILITY[form]
        magnitude = config.randaug_magnitude + _SPREAD[form] * _normal(rng)
        sign = -1.0 if rng.random() < 0.5 else 1.0
        if form == "deit":
            magnitude = min(max(magnitude, 0.0), 10.0)
        if is_applied:
            strength = strength_of(name, magnitude / 10, sign, form)
            image = operate(name, image, strength, form, config.mean, rng)
    return image


def strength_of(name: str, level: float, sign: float, form: Form) -> float:
    """Translate a level into what an operation takes.

    Args:
        name: Of OPS.
        level: A tenth of the magnitude.
        sign: 1 or -1, for operations that have two directions.
        form: "augreg" or "deit".

    Returns:
        Degrees (Rotate), slope (Shear), part of the side (Translate, Cutout), bits (Posterize),
        threshold (Solarize), brightness (SolarizeAdd), factor (enhancements), or 0 (the others).
    """
    rising = form == "deit"
    if name in _ENHANCERS:
        return max(0.1, 1.0 + sign * 0.9 * level) if rising else 0.1 + 1.8 * level
    bits, threshold, added = int(4 * level), min(256, int(256 * level)), int(110 * level)
    strengths = {
        "Rotate": sign * 30 * level,
        "ShearX": sign * 0.3 * level,
        "ShearY": sign * 0.3 * level,
        "TranslateX": sign * _SHIFT[form] * level,
        "TranslateY": sign * _SHIFT[form] * level,
        "Posterize": 4 - bits if rising else bits,
        "Solarize": 256 - threshold if rising else threshold,
        "SolarizeAdd": min(128, added) if rising else added,
        "Cutout": _CUTOUT * level,
    }
    return strengths.get(name, 0.0)


def operate(
    name: str,
    image: Picture,
    strength: float,
    form: Form,
    mean: Rgb,
    rng: np.random.Generator,
) -> Picture:
    """Apply one operation.

    Args:
        name: Of OPS.
        image: Mode L or RGB.
        strength: As strength_of gives it.
        form: "augreg" or "deit".
        mean: The data's mean colour, 0 to 1.
        rng: Where the square of Cutout lies.
    """
    if name == "Contrast" and form == "augreg":
        return _contrast_by_count(image, strength)
    if name in _ENHANCERS:
        return _ENHANCERS[name](image).enhance(strength)
    if name == "Posterize":
        # Pillow's own refuses 0 bits, which leave black.
        lost = 8 - min(int(strength), 8)
        return _looked_up(image, [i >> lost << lost for i in range(256)])
    if name == "Solarize":
        return ImageOps.solarize(image, int(strength))
    if name == "SolarizeAdd":
        added = int(strength)
        return _looked_up(image, [min(255, i + added) if i < 128 else i for i in range(256)])
    if name == "Cutout":
        return _cutout(image, strength, rng)
    if name == "AutoContrast":
        return ImageOps.autocontrast(image)
    if name == "Equalize":
        return ImageOps.equalize(image)
    if name == "Invert":
        return ImageOps.invert(image)
    return _moved(name, image, strength, form, mean)


def _looked_up(image: Picture, table: list[int]) -> Picture:
    return image.point(table * len(image.getbands()))


def _moved(name: str, image: Picture, strength: float, form: Form, mean: Rgb) -> Picture:
    """Rotate, shear or shift, and fill what comes from outside."""
    colour = [min(255, round(255 * part)) for part in mean] if form == "deit" else [_GREY] * 3
    fill = tuple(colour) if image.mode == "RGB" else round(sum(colour) / len(colour))
    cubic = form == "deit"
    resample = Image.Resampling.BICUBIC if cubic else Image.Resampling.NEAREST
    if name == "Rotate":
        return image.rotate(strength, resample, fillcolor=fill)
    matrix = {
        "ShearX": (1, strength, 0, 0, 1, 0),
        "ShearY": (1, 0, 0, strength, 1, 0),
        "TranslateX": (1, 0, strength * image.width, 0, 1, 0),
        "TranslateY": (1, 0, 0, 0, 1, strength * image.height),
    }[name]
    kind = Image.Transform.AFFINE
    return image.transform(image.size, kind, matrix, resample=resample, fillcolor=fill)


def _contrast_by_count(image: Picture, factor: float) -> Picture:
    """Move from a grey that follows from the number of pixels, not from their mean.

    The original adds up the bins of a histogram, but not what they stand for; at 224 px its grey is
    196. AugReg's published models were trained with that.
    """
    grey = int(min(image.width * image.height / 256, 255))
    flat = Image.new(image.mode, image.size, (grey,) * 3 if image.mode == "RGB" else grey)
    return Image.blend(flat, image, factor)


def _cutout(image: Picture, half: float, rng: np.random.Generator) -> Picture:
    x, y = int(rng.random() * image.width), int(rng.random() * image.height)
    reach = int(half * image.width)
    box = (max(0, x - reach), max(0, y - reach), x + reach, y + reach)
    holed = image.copy()
    holed.paste((_GREY,) * 3 if image.mode == "RGB" else _GREY, box)
    return holed


def _normal(rng: np.random.Generator) -> float:
    """Draw from the normal distribution (Box-Muller)."""
    radius = math.sqrt(-2.0 * math.log(1.0 - rng.random()))
    return radius * math.cos(2.0 * math.pi * rng.random())
