import math

import numpy as np
import pytest
import torch
from scipy.ndimage import zoom
from timm.layers import resample_abs_pos_embed

from vitscale.config.errors import UserError
from vitscale.models.pos_embed import resize_pos_embed, sincos2d_pos_embed

# 224/16 to 384/16, 224/14 to 518/14, 224/32 to 384/32, downwards, and not square.
GRIDS = [(14, (24, 24)), (16, (37, 37)), (7, (12, 12)), (24, (14, 14)), (5, (8, 3)), (14, (1, 1))]


def random_table(side, num_prefix_tokens, dim=6):
    generator = torch.Generator().manual_seed(side)
    return torch.randn(1, side * side + num_prefix_tokens, dim, generator=generator)


@pytest.mark.parametrize(("side", "grid_size"), GRIDS)
def test_resize_google_equals_scipy_zoom(side, grid_size):
    table = random_table(side, 1)

    resized = resize_pos_embed(table, grid_size, 1)

    image = table[0, 1:].reshape(side, side, -1).numpy()
    expected = zoom(image, (grid_size[0] / side, grid_size[1] / side, 1), order=1)
    assert expected.shape[:2] == grid_size
    np.testing.assert_allclose(resized[0, 1:].numpy(), expected.reshape(-1, 6), atol=1e-5)
    assert torch.equal(resized[:, :1], table[:, :1])


@pytest.mark.parametrize(("side", "grid_size"), GRIDS)
@pytest.mark.parametrize("num_prefix_tokens", [0, 1])
def test_resize_timm_equals_timm(side, grid_size, num_prefix_tokens):
    table = random_table(side, num_prefix_tokens)

    resized = resize_pos_embed(table, grid_size, num_prefix_tokens, "timm")

    expected = resample_abs_pos_embed(
        table, list(grid_size), [side, side], num_prefix_tokens=num_prefix_tokens
    )
    torch.testing.assert_close(resized, expected, atol=1e-6, rtol=0)


def cubic_weights(size_in, size_out):
    """Dense matrix of 1-D cubic convolution, a = -0.75, half-pixel centres, edges repeated."""
    matrix = np.zeros((size_out, size_in))
    for row in range(size_out):
        centre = (row + 0.5) * size_in / size_out - 0.5
        first = math.floor(centre) - 1
        for column in range(first, first + 4):
            x = abs(centre - column)
            if x <= 1:
                weight = 1.25 * x**3 - 2.25 * x**2 + 1
            else:
                weight = -0.75 * (x**3 - 5 * x**2 + 8 * x - 4)
            matrix[row, min(max(column, 0), size_in - 1)] += weight
    return matrix


@pytest.mark.parametrize(("side", "grid_size"), GRIDS)
def test_resize_hf_is_cubic_convolution_without_antialias(side, grid_size):
    table = random_table(side, 1)

    resized = resize_pos_embed(table, grid_size, 1, "hf")

    image = table[0, 1:].reshape(side, side, -1).double().numpy()
    down, across = (cubic_weights(side, size) for size in grid_size)
    expected = np.einsum("ri,cj,ijd->rcd", down, across, image).reshape(-1, 6)
    np.testing.assert_allclose(resized[0, 1:].numpy(), expected, atol=1e-5)


def test_resize_hf_equals_transformers():
    modeling_vit = pytest.importorskip(
        "transformers.models.vit.modeling_vit", reason="transformers is not installed"
    )
    config = modeling_vit.ViTConfig(image_size=16, patch_size=2, hidden_size=8)
    embeddings = modeling_vit.ViTEmbeddings(config)
    table = random_table(8, 1, dim=8)
    embeddings.position_embeddings.data.copy_(table)

    expected = embeddings.interpolate_pos_encoding(torch.zeros(1, 12 * 5 + 1, 8), 24, 10)

    resized = resize_pos_embed(table, (12, 5), 1, "hf")
    torch.testing.assert_close(resized, expected.detach(), atol=1e-6, rtol=0)


def test_resize_modes_differ():
    table = random_table(7, 1)

    results = [resize_pos_embed(table, (4, 4), 1, mode) for mode in ("google", "timm", "hf")]

    assert (results[0] - results[1]).abs().max() > 0.01
    assert (results[0] - results[2]).abs().max() > 0.01
    assert (results[1] - results[2]).abs().max() > 0.01


def test_resize_computes_in_float32_and_keeps_the_dtype():
    table = random_table(7, 1).bfloat16()

    resized = resize_pos_embed(table, (12, 12), 1)

    assert resized.dtype == torch.bfloat16
    assert torch.equal(resized, resize_pos_embed(table.float(), (12, 12), 1).bfloat16())


def test_resize_to_the_same_grid_copies():
    table = random_table(7, 1)

    resized = resize_pos_embed(table, (7, 7), 1)

    assert torch.equal(resized, table)
    assert resized.data_ptr() != table.data_ptr()


@pytest.mark.parametrize(("rows", "num_prefix_tokens"), [(50, 0), (49, 1), (1, 1)])
def test_resize_refuses_a_table_that_is_not_square(rows, num_prefix_tokens):
    with pytest.raises(UserError, match=f"{rows} rows"):
        resize_pos_embed(torch.zeros(1, rows, 4), (3, 3), num_prefix_tokens)


def test_sincos2d_has_the_published_order():
    table = sincos2d_pos_embed((2, 3), 8, 1)

    assert table.shape == (1, 7, 8)
    assert not table[0, 0].any()
    # Last patch: y = 1, x = 2; frequencies 1 and 1/10000.
    expected = [
        math.sin(2), math.sin(2e-4), math.cos(2), math.cos(2e-4),
        math.sin(1), math.sin(1e-4), math.cos(1), math.cos(1e-4),
    ]  # fmt: skip
    np.testing.assert_allclose(table[0, -1].numpy(), expected, atol=1e-7)
