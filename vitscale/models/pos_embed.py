"""Positions: learned and fixed tables, relative scores, and moving a table to another patch grid.

Axes: B batch, N tokens, D embed_dim, h heads, d head_dim.
"""

import math
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitscale.config.errors import UserError

ResizeMode = Literal["google", "timm", "hf"]

_INTERPOLATION: dict[ResizeMode, dict[str, Any]] = {
    "google": {"mode": "bilinear", "align_corners": True},
    "timm": {"mode": "bicubic", "align_corners": False, "antialias": True},
    "hf": {"mode": "bicubic", "align_corners": False},
}

# Deviation of a learned table at the start. Source: vision_transformer, models_vit.py.
TABLE_STD = 0.02


class TablePositions(nn.Module):
    """A learned row for every token, added to what comes in.

    Args:
        num_rows: Tokens, or the patches alone.
        embed_dim: Token width.
    """

    def __init__(self, num_rows: int, embed_dim: int) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.empty(1, num_rows, embed_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the table."""
        nn.init.normal_(self.pos_embed, std=TABLE_STD)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Add the rows; prefix tokens without a row stay as they are."""
        return add_rows(x, self.pos_embed)


class Positions2d(nn.Module):
    """A learned vector for every column and one for every row, side by side.

    The prefix tokens, which have no place in the picture, get none.

    Args:
        grid_size: Patches in (rows, columns).
        embed_dim: Token width; even.

    Source:
        arXiv:2010.11929 appendix D.4.
    """

    def __init__(self, grid_size: tuple[int, int], embed_dim: int) -> None:
        super().__init__()
        rows, columns = grid_size
        self.pos_embed_x = nn.Parameter(torch.empty(columns, embed_dim // 2))
        self.pos_embed_y = nn.Parameter(torch.empty(rows, embed_dim // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill both tables."""
        nn.init.normal_(self.pos_embed_x, std=TABLE_STD)
        nn.init.normal_(self.pos_embed_y, std=TABLE_STD)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Add them to the patch tokens."""
        rows, columns = self.pos_embed_y.shape[0], self.pos_embed_x.shape[0]
        across = self.pos_embed_x.expand(rows, -1, -1)
        down = self.pos_embed_y.unsqueeze(1).expand(-1, columns, -1)
        return add_rows(x, torch.cat([across, down], dim=-1).view(1, rows * columns, -1))


class RelativePositions(nn.Module):
    """Attention scores by distance: the query times a learned key for every distance of patches.

    Distances count in the row-by-row order of the patches. The heads of a layer share the keys, and
    pairs with a prefix token score 0: the paper leaves both open.

    Args:
        num_patches: Patch tokens.
        num_prefix_tokens: Leading tokens without a place.
        head_dim: Width of a query.

    Source:
        arXiv:2010.11929 appendix D.4, "1-dimensional relative attention".
    """

    def __init__(self, num_patches: int, num_prefix_tokens: int, head_dim: int) -> None:
        super().__init__()
        self.num_patches = num_patches
        self.num_prefix_tokens = num_prefix_tokens
        self.pos_embed_rel = nn.Parameter(torch.empty(2 * num_patches - 1, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the keys."""
        nn.init.normal_(self.pos_embed_rel, std=TABLE_STD)

    def forward(self, q: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n n"]:
        """Return what is added to the scaled scores of the attention."""
        b, h, _, d = q.shape
        n, prefix = self.num_patches, self.num_prefix_tokens
        by_distance = q[:, :, prefix:] @ self.pos_embed_rel.T / math.sqrt(d)  # [B, h, N, 2N - 1]
        place = torch.arange(n, device=q.device)
        distance = place.unsqueeze(1) - place + n - 1  # 0 where the key is last, the query first
        scores = by_distance.gather(-1, distance.expand(b, h, -1, -1))  # [B, h, N, N]
        return F.pad(scores, (prefix, 0, prefix, 0))


def add_rows(
    x: Float[Tensor, "b n d"], table: Float[Tensor, "1 n_rows d"]
) -> Float[Tensor, "b n d"]:
    """Add a table to the last tokens; those before have no row."""
    prefix = x.shape[1] - table.shape[1]
    if prefix == 0:
        return x + table
    return torch.cat([x[:, :prefix], x[:, prefix:] + table], dim=1)


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
