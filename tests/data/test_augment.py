import numpy as np
import pytest

from vitscale.data.augment import inception_box
from vitscale.data.resample import Box

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
