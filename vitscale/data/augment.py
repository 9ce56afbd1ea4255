"""From decoded pixels to the square uint8 picture the model is trained or evaluated on.

Legend: H W rows and columns of the decoded image, C channels, S img_size. Normalisation is not
done here; it happens on the training device.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import resize

from vitscale.config.recipe import AugmentConfig

# Tries before the whole image is taken: default of TensorFlow's sample_distorted_bounding_box,
# which the paper's code calls without naming a number.
CROP_TRIES = 100

Pixels = UInt8[np.ndarray, "h w c"]


@dataclass(frozen=True)
class Box:
    """A rectangle of whole pixels."""

    top: int
    left: int
    height: int
    width: int


def inception_box(
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    rng: np.random.Generator,
) -> Box:
    """Draw the rectangle of an Inception crop.

    Aspect and height are uniform, so small areas are more likely than in torchvision's
    RandomResizedCrop, where the area is. After CROP_TRIES misses the whole image is taken. Unlike
    the original, the last row and column can be reached by a crop that is smaller than the image.

    Args:
        height: Rows of the image, px.
        width: Columns of the image, px.
        scale: Least and largest area as a fraction of the image's.
        ratio: Least and largest width / height of the crop.
        rng: Source of randomness; only `random()` is called, whose stream NumPy keeps.

    Returns:
        The rectangle.

    Source:
        TensorFlow, op sample_distorted_bounding_box with min_object_covered = 0, as called by
        google-research/vision_transformer and big_vision (inception_crop).
    """
    least, most = scale[0] * height * width, scale[1] * height * width
    for _ in range(CROP_TRIES):
        aspect = ratio[0] + rng.random() * (ratio[1] - ratio[0])
        crop = _crop_size(height, width, (least, most), aspect, rng)
        if crop is not None:
            top = int(rng.random() * (height - crop[0] + 1))
            left = int(rng.random() * (width - crop[1] + 1))
            return Box(top, left, *crop)
    return Box(0, 0, height, width)


def _crop_size(
    height: int, width: int, area: tuple[float, float], aspect: float, rng: np.random.Generator
) -> tuple[int, int] | None:
    low = round(math.sqrt(area[0] / aspect))
    high = round(math.sqrt(area[1] / aspect))
    if round(high * aspect) > width:
        high = int((width + 0.5) / aspect)
        high -= round(high * aspect) > width
    high = min(high, height)
    low = min(low, high)
    rows = low + int(rng.random() * (high - low + 1))
    # Rounding can put the area just outside its limits; the neighbouring height may be inside.
    if rows * round(rows * aspect) < area[0]:
        rows += 1
    if rows * round(rows * aspect) > area[1]:
        rows -= 1
    columns = round(rows * aspect)
    fits = 0 < rows <= height and 0 < columns <= width
    return (rows, columns) if fits and area[0] <= rows * columns <= area[1] else None


def resize_bilinear(pixels: Pixels, img_size: int) -> UInt8[Tensor, "c s s"]:
    """Resize to a square, bilinear between the nearest pixels, also where the image shrinks.

    Args:
        pixels: The image or crop.
        img_size: New side, px.

    Returns:
        The resized image.

    Source:
        Bilinear without antialiasing is what tf.image.resize does in the paper's input pipeline.
    """
    image = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)  # [C, H, W], a channels-last view
    return resize(image, [img_size, img_size], InterpolationMode.BILINEAR, antialias=False)


def train_image(
    pixels: Pixels, img_size: int, config: AugmentConfig, rng: np.random.Generator
) -> UInt8[Tensor, "c s s"]:
    """Make the training example of one image.

    Args:
        pixels: The decoded image.
        img_size: Side of the example, px.
        config: Which crop, and how often to flip.
        rng: The randomness of this example alone.

    Returns:
        The example.
    """
    # Drawn first, so that the flip does not depend on how many crops were tried.
    flip = rng.random() < config.hflip
    if config.train_crop == "inception":
        height, width = pixels.shape[:2]
        box = inception_box(height, width, config.crop_scale, config.crop_ratio, rng)
        pixels = pixels[box.top : box.top + box.height, box.left : box.left + box.width]
    if flip:
        pixels = pixels[:, ::-1]
    return resize_bilinear(pixels, img_size)


def eval_image(pixels: Pixels, img_size: int, config: AugmentConfig) -> UInt8[Tensor, "c s s"]:
    """Make the evaluation example of one image; nothing is random.

    Args:
        pixels: The decoded image.
        img_size: Side of the example, px.
        config: "resize": the whole image, squared. "center": the shorter side is brought to
            img_size / eval_crop_ratio, averaging areas where that shrinks and bilinear where it
            enlarges, then the middle is cut out.

    Returns:
        The example.

    Source:
        Square resize: google-research/vision_transformer. Shorter side to 256 by area, centre crop
        224: big_vision, resize_small and central_crop.
    """
    if config.eval_crop == "resize":
        return resize_bilinear(pixels, img_size)
    height, width = pixels.shape[:2]
    factor = round(img_size / config.eval_crop_ratio) / min(height, width)
    new_height, new_width = max(round(height * factor), 1), max(round(width * factor), 1)
    kind = Image.Resampling.BOX if factor < 1 else Image.Resampling.BILINEAR
    mode_pixels: Any = pixels if pixels.shape[2] == 3 else pixels[:, :, 0]
    image = Image.fromarray(mode_pixels).resize((new_width, new_height), kind)
    top, left = (new_height - img_size) // 2, (new_width - img_size) // 2
    crop = np.array(image.crop((left, top, left + img_size, top + img_size)))
    return torch.from_numpy(crop.reshape(img_size, img_size, -1)).permute(2, 0, 1)
