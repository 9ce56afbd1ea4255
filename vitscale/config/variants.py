"""The published sizes of the Vision Transformer, and the shape that a model config resolves to.

Names only become numbers here; nothing is allocated and torch is not needed.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from vitscale.config.errors import UserError


@dataclass(frozen=True, slots=True)
class Size:
    """One row of the size table."""

    # Token width.
    embed_dim: int
    # Number of blocks.
    depth: int
    num_heads: int
    # Width of the hidden layer of a block's MLP.
    mlp_dim: int


# Source: B, L, H: arXiv:2010.11929 table 1; Ti, S: its published code; g, G: arXiv:2106.04560
# table 2; mu, M, So400m, g-opt, G-opt, e: big_vision, models/vit.py, decode_variant.
SIZES = {
    "mu": Size(32, 1, 2, 128),
    "Ti": Size(192, 12, 3, 768),
    "S": Size(384, 12, 6, 1536),
    "M": Size(512, 12, 8, 2048),
    "B": Size(768, 12, 12, 3072),
    "L": Size(1024, 24, 16, 4096),
    "H": Size(1280, 32, 16, 5120),
    "So400m": Size(1152, 27, 16, 4304),
    "g": Size(1408, 40, 16, 6144),
    "g-opt": Size(1536, 40, 16, 6144),
    "G": Size(1664, 48, 16, 8192),
    "G-opt": Size(1536, 48, 16, 8192),
    "e": Size(1792, 56, 16, 15360),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """All lengths of a model, derived from its config."""

    embed_dim: int
    depth: int
    num_heads: int
    mlp_dim: int
    # Side of a patch, px.
    patch_size: int
    # Patches in (rows, columns).
    grid_size: tuple[int, int]
    num_patches: int
    # Tokens before the patches: the class token, or none.
    num_prefix_tokens: int


@runtime_checkable
class ShapeFields(Protocol):
    """The fields of ModelConfig that decide the shape; recipe.py imports this module."""

    @property
    def variant(self) -> str: ...  # noqa: D102
    @property
    def img_size(self) -> int: ...  # noqa: D102
    @property
    def embed_dim(self) -> int | None: ...  # noqa: D102
    @property
    def depth(self) -> int | None: ...  # noqa: D102
    @property
    def num_heads(self) -> int | None: ...  # noqa: D102
    @property
    def mlp_dim(self) -> int | None: ...  # noqa: D102
    @property
    def class_token(self) -> bool: ...  # noqa: D102
    @property
    def global_pool(self) -> str: ...  # noqa: D102
    @property
    def pos_embed(self) -> str: ...  # noqa: D102


def parse_variant(variant: str) -> tuple[str, int]:
    """Split a variant such as "H/14" into its size name and its patch side in px.

    Raises:
        UserError: No such size, or the patch is not a positive whole number.
    """
    name, slash, patch = variant.partition("/")
    patch_is_good = patch.isascii() and patch.isdecimal() and int(patch) > 0
    if name in SIZES and patch_is_good:
        return name, int(patch)
    wanted_patch = patch if patch_is_good else "16"
    guesses = ", ".join(f'"{guess}/{wanted_patch}"' for guess in _nearest_sizes(name))
    if name not in SIZES:
        fault = f'no size "{name}"'
    elif not slash:
        fault = "the patch side is missing"
    else:
        fault = f'the patch side "{patch}" is not a positive whole number'
    raise UserError(
        f'unknown model variant "{variant}": {fault}; '
        f"nearest: {guesses} (sizes: {', '.join(SIZES)}; any patch side in px after the slash)"
    )


def _nearest_sizes(name: str) -> list[str]:
    if name in SIZES:
        return [name]
    by_case = [size for size in SIZES if size.lower() == name.lower()]
    close = difflib.get_close_matches(name, SIZES, n=3, cutoff=0.5)
    by_start = [size for size in SIZES if name and size.lower().startswith(name[0].lower())]
    return list(dict.fromkeys(by_case or close or by_start))[:3] or ["B"]


def nearest_img_sizes(img_size: int, patch_size: int) -> list[int]:
    """Return the image sides in px next to img_size, below and above, that the patch divides."""
    below = img_size // patch_size * patch_size
    return [side for side in (below, below + patch_size) if side > 0]


def resolve_shape(config: ShapeFields) -> ModelShape:
    """Work out every length of a model.

    Args:
        config: The model section of a recipe. Its own embed_dim, depth, num_heads and mlp_dim each
            replace that one value of the variant; no other value follows.

    Raises:
        UserError: The fields contradict each other; the message lists every contradiction.
    """
    name, patch_size = parse_variant(config.variant)
    size = SIZES[name]
    embed_dim = size.embed_dim if config.embed_dim is None else config.embed_dim
    num_heads = size.num_heads if config.num_heads is None else config.num_heads
    problems = list(_shape_problems(config, patch_size, embed_dim, num_heads))
    if problems:
        raise UserError("; ".join(problems))
    side = config.img_size // patch_size
    return ModelShape(
        embed_dim=embed_dim,
        depth=size.depth if config.depth is None else config.depth,
        num_heads=num_heads,
        mlp_dim=size.mlp_dim if config.mlp_dim is None else config.mlp_dim,
        patch_size=patch_size,
        grid_size=(side, side),
        num_patches=side * side,
        num_prefix_tokens=int(config.class_token),
    )


def _shape_problems(
    config: ShapeFields, patch_size: int, embed_dim: int, num_heads: int
) -> Iterator[str]:
    if config.img_size % patch_size:
        sides = " or ".join(str(side) for side in nearest_img_sizes(config.img_size, patch_size))
        yield (
            f"model.img_size = {config.img_size} is not a multiple of the patch side {patch_size} "
            f'of model.variant = "{config.variant}"; nearest that fit: {sides}'
        )
    if embed_dim % num_heads:
        below = embed_dim // num_heads * num_heads
        widths = " or ".join(str(width) for width in (below, below + num_heads) if width > 0)
        yield (
            f"model.embed_dim = {embed_dim} does not divide into model.num_heads = {num_heads}; "
            f"nearest widths that do: {widths}"
        )
    # Four parts (sine and cosine of x and y), each of at least two frequencies.
    if config.pos_embed == "sincos2d" and (embed_dim % 4 or embed_dim < 8):
        yield (
            f'model.pos_embed = "sincos2d" needs embed_dim to be a multiple of 4 and at least 8, '
            f'not {embed_dim}; change it or use "learned"'
        )
    if config.global_pool == "token" and not config.class_token:
        yield (
            'model.global_pool = "token" reads the class token, but model.class_token is false; '
            'set global_pool = "avg" or class_token = true'
        )
