"""Pictures to the model's input."""

import pytest
import torch

from vitscale.data.normalise import Normalise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalise_into_given_memory_gives_the_same(dtype):
    normalise = Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 3, "cpu", dtype)
    images = torch.arange(2 * 3 * 8 * 8).reshape(2, 3, 8, 8).to(torch.uint8)
    memory = torch.full((2, 3, 8, 8), torch.nan)

    given = normalise(images, out=memory)

    assert torch.equal(given, normalise(images))
    assert given.dtype == dtype
    if dtype == torch.float32:
        assert given.data_ptr() == memory.data_ptr()


def test_normalise_is_value_less_mean_over_deviation():
    normalise = Normalise((0.5, 0.25, 0.0), (0.5, 1.0, 2.0), 3, "cpu", torch.float32)
    images = torch.tensor([0, 255, 51], dtype=torch.uint8).view(1, 3, 1, 1)

    assert normalise(images).flatten().tolist() == pytest.approx([-1.0, 0.75, 0.1])
