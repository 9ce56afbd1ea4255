"""Position tables: the fixed sine-cosine one, and moving a learned one to another patch grid.

Axes: B batch, N tokens, D embed_dim. Both run at build or load time, never inside a step.
"""

import math
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitscale.config.errors import UserError

ResizeMode = Literal["google", "timm", "hf"]

_INTERPOLATION: dict[ResizeMode, dict[str, Any]] = {
    "google": {"mode": "bilinear", "align_corners": True},
    "timm": {"mode": "bicubic", "align_corners": False, "antialias": True},
    "hf": {"mode": "bicubic", "align_corners": False},
}


def sincos2d_pos_embed(
    grid_size: tuple[int, int], embed_dim: int, num_prefix_tokens: int
) -> Float[Tensor, "1 n d"]:
    """Make the fixed two-dimensional sine-cosine table.

    Args:
        grid_size: Patches in (rows, columns).
        embed_dim: Token width; a multiple of 4, at least 8.
        num_prefix_tokens: Leading rows of zeros: these tokens get no position.

    Source:
        Order sin x, cos x, sin y, cos y as in MoCo v3 (arXiv:2104.02057); temperature 10000 and the
        frequency exponents index / (embed_dim / 4 - 1): big_vision, models/vit.py,
        posemb_sincos_2d.
    """
    rows, columns = grid_size
    num_freqs = embed_dim // 4
    exponents = torch.arange(num_freqs, dtype=torch.float64, device="cpu") / (num_freqs - 1)
    omega = 10000.0**-exponents
    y, x = torch.meshgrid(
        torch.arange(rows, dtype=torch.float64, device="cpu"),
        torch.arange(columns, dtype=torch.float64, device="cpu"),
        indexing="ij",
    )
    x_angles = x.reshape(-1, 1) * omega  # [N, D/4]
    y_angles = y.reshape(-1, 1) * omega
    parts = [x_angles.sin(), x_angles.cos(), y_angles.sin(), y_angles.cos()]
    table = torch.cat(parts, dim=1).float()  # [N, D]
    prefix = torch.zeros(num_prefix_tokens, embed_dim, device="cpu")
    return torch.cat([prefix, table]).unsqueeze(0)


def resize_pos_embed(
    pos_embed: Float[Tensor, "1 n_old d"],
    grid_size: tuple[int, int],
    num_prefix_tokens: int,
    mode: ResizeMode = "google",
) -> Float[Tensor, "1 n_new d"]:
    """Resample a position table to another patch grid.

    Args:
        pos_embed: Table of the old grid, prefix tokens first. The old grid must be square.
        grid_size: New patches in (rows, columns).
        num_prefix_tokens: Leading rows that are copied unchanged.
        mode: Whose arithmetic: "google" bilinear with aligned corners, "timm" bicubic with
            antialias, "hf" bicubic without; neither of these aligns corners.

    Returns:
        Table of the new grid in the dtype of the input; the arithmetic is float32.

    Raises:
        UserError: The old table without its prefix is not a square grid.

    Source:
        google: vision_transformer, checkpoint.py (scipy.ndimage.zoom, order 1; arXiv:2010.11929
        section 3.2). timm: layers/pos_embed.py, resample_abs_pos_embed. hf: transformers,
        ViTEmbeddings.interpolate_pos_encoding.
    """
    num_old = pos_embed.shape[1] - num_prefix_tokens
    side = math.isqrt(max(num_old, 0))
    if num_old <= 0 or side * side != num_old:
        raise UserError(
            f"pos_embed has {pos_embed.shape[1]} rows, {num_prefix_tokens} of them for prefix "
            f"tokens: the other {num_old} are not a square grid of patches; "
            "is model.class_token the same as where the table comes from?"
        )
    if grid_size == (side, side):
        return pos_embed.clone()
    prefix, patches = pos_embed.split([num_prefix_tokens, num_old], dim=1)
    image = patches.float().reshape(1, side, side, -1).permute(0, 3, 1, 2)  # [1, D, rows, columns]
    image = F.interpolate(image, size=grid_size, **_INTERPOLATION[mode])
    resized = image.permute(0, 2, 3, 1).flatten(1, 2).to(pos_embed.dtype)  # [1, N_new, D]
    return torch.cat([prefix, resized], dim=1)
