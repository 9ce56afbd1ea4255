"""The augmentation table of a recipe: from the stored picture to the model's input."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from vitscale.config.section import Section

Fraction = Annotated[float, Field(ge=0, le=1)]
Rgb = tuple[float, float, float]


class AugmentConfig(Section):
    """From the stored picture to the model's input."""

    # "inception": random area and aspect (arXiv:1409.4842); "resize": the whole picture, squared;
    # "resize_crop": a square from anywhere of that, of resize_crop_ratio of its side (BiT);
    # "simple": the shorter side to img_size, mirrored by 4 px beyond the border, then a square of
    # img_size from anywhere (arXiv:2204.07118).
    train_crop: Literal["inception", "resize", "resize_crop", "simple"] = "inception"
    # 384 of 448 px, as in arXiv:1912.11370.
    resize_crop_ratio: Annotated[float, Field(gt=0, le=1)] = 384 / 448
    # Area of the crop as a fraction of the picture: least, most.
    crop_scale: tuple[Fraction, Fraction] = (0.05, 1.0)
    # Width over height of the crop: least, most.
    crop_ratio: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (0.75, 4 / 3)
    # Average all pixels where a picture shrinks to a square. The paper's code does not
    # (tf.image.resize): it interpolates between the nearest pixels and skips the others.
    antialias: bool = False
    # Probability of a horizontal flip.
    hflip: Fraction = 0.5
    # RandAugment: operations an example, 0 for none, and how strong, in tenths (arXiv:1909.13719).
    # Form "augreg" is that of arXiv:2106.10270, where enhancements are neutral at magnitude 5;
    # "deit" is timm's rand-mM-nN-mstd0.5-inc1, all stronger with it and half of them skipped.
    randaug_ops: Annotated[int, Field(ge=0, le=16)] = 0
    randaug_magnitude: Annotated[float, Field(ge=0, le=30)] = 0.0
    randaug_form: Literal["augreg", "deit"] = "augreg"
    # 3-Augment: grey, solarized or blurred, one of the three (arXiv:2204.07118).
    three_augment: bool = False
    # Brightness, contrast and saturation each times 1 - color_jitter to 1 + color_jitter.
    color_jitter: Fraction = 0.0
    # Probability that a rectangle is replaced by noise (arXiv:1708.04896).
    random_erasing: Fraction = 0.0
    # MixUp and CutMix of pairs of examples: both parameters of the Beta distribution of their
    # shares, 0 for none; with both, mix_switch_prob is the probability of CutMix.
    mixup: Annotated[float, Field(ge=0, le=2)] = 0.0
    cutmix: Annotated[float, Field(ge=0, le=2)] = 0.0
    mix_switch_prob: Fraction = 0.5
    # "center": shorter side to img_size / eval_crop_ratio, then the middle; "resize": squared.
    eval_crop: Literal["center", "resize"] = "center"
    # 224 of 256 px, as in the paper's code base.
    eval_crop_ratio: Annotated[float, Field(gt=0, le=1)] = 0.875
    # Normalisation of values in 0..1; one half each gives the paper's -1..1.
    mean: Rgb = (0.5, 0.5, 0.5)
    std: Rgb = (0.5, 0.5, 0.5)

    def problems(self) -> Iterator[str]:
        """Yield what is wrong between fields that are each right."""
        for name in ("crop_scale", "crop_ratio"):
            least, most = getattr(self, name)
            if least > most:
                yield f"augment.{name} = [{least}, {most}]: the first value must not be the larger"
        if min(self.std) <= 0:
            yield f"augment.std = {list(self.std)}: every value must be above 0"
        if self.randaug_magnitude and not self.randaug_ops:
            yield (
                f"augment.randaug_magnitude = {self.randaug_magnitude} has no meaning without "
                "augment.randaug_ops; set that, such as 2"
            )
        if self.randaug_form == "deit" and self.randaug_magnitude > 10:
            yield (
                f'augment.randaug_magnitude = {self.randaug_magnitude}: randaug_form = "deit" '
                "takes 0 to 10"
            )
