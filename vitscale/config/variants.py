"""The published sizes of the models, and the shape that a model config resolves to.

Names only become numbers here; nothing is allocated and torch is not needed.
"""

import difflib
import re
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

# Units in each stage of a hybrid's ResNet, by the patch side that its name gives.
# Source: arXiv:2010.11929 section 4.1 (R50; at 16 px the units of the last stage move to the one
# before); R26, R (the stem alone): vision_transformer, configs/models.py (arXiv:2106.10270).
BACKBONES: dict[str, dict[int, tuple[int, ...]]] = {
    "R50": {32: (3, 4, 6, 3), 16: (3, 4, 9)},
    "R26": {32: (2, 2, 2, 2)},
    "R": {16: ()},
}
# Side of a token's patch in the ResNet's last map. "R+Ti/16" lays 8 x 8 patches on the map of a
# stem that shrinks 4 times, so a token stands for 32 x 32 px in spite of the name.
_STEM_PATCH, _STAGES_PATCH = 8, 1

# Units in each stage of the BiT ResNets, by depth. Source: big_transfer, bit_pytorch/models.py;
# 26: big_vision, models/bit.py.
RESNETS: dict[int, tuple[int, ...]] = {
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
_RESNET_NAME = re.compile(r"R([0-9]+)x([1-9])", re.ASCII)
# Channels after each stage at width 1; four times the inner ones (arXiv:1512.03385).
STAGE_CHANNELS = (256, 512, 1024, 2048)
STEM_CHANNELS = 64


@dataclass(frozen=True, slots=True)
class ModelShape:
    """All lengths of a Vision Transformer or a hybrid, derived from its config."""

    embed_dim: int
    depth: int
    num_heads: int
    mlp_dim: int
    # Side of a patch, px; of a hybrid, in numbers of the ResNet's last map.
    patch_size: int
    # Patches in (rows, columns).
    grid_size: tuple[int, int]
    num_patches: int
    # Tokens before the patches: the class token and the register tokens.
    num_prefix_tokens: int
    # Rows that a position table has before those of the patches.
    num_prefix_rows: int
    # Units in each stage of a hybrid's ResNet, none for the stem alone; None: no ResNet.
    backbone: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ResNetShape:
    """All lengths of a BiT ResNet."""

    # Units in each stage.
    layers: tuple[int, ...]
    # Factor of all channels.
    width_factor: int

    @property
    def num_features(self) -> int:
        """Channels that the head reads."""
        return STAGE_CHANNELS[-1] * self.width_factor


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
    def reg_tokens(self) -> int: ...  # noqa: D102
    @property
    def pos_embed(self) -> str: ...  # noqa: D102
    @property
    def pos_embed_at(self) -> str: ...  # noqa: D102
    @property
    def no_embed_class(self) -> bool: ...  # noqa: D102
    @property
    def block(self) -> str: ...  # noqa: D102
    @property
    def mlp(self) -> str: ...  # noqa: D102
    @property
    def patch_drop_rate(self) -> float: ...  # noqa: D102


def is_resnet(variant: str) -> bool:
    """Whether the variant is a ResNet without a transformer, such as "R50x1"."""
    return _RESNET_NAME.fullmatch(variant) is not None


def resolve_resnet(config: ShapeFields) -> ResNetShape:
    """Work out the shape of a BiT ResNet.

    Args:
        config: The model section of a recipe; its variant is a depth and a width, "R101x3".

    Raises:
        UserError: There is no such depth, or no such name.
    """
    match = _RESNET_NAME.fullmatch(config.variant)
    if match is None or int(match[1]) not in RESNETS:
        depths = ", ".join(str(depth) for depth in RESNETS)
        raise UserError(
            f'unknown ResNet "{config.variant}"; the names are R, a depth of {depths}, x and a '
            'width, such as "R50x1"'
        )
    return ResNetShape(layers=RESNETS[int(match[1])], width_factor=int(match[2]))


def split_hybrid(variant: str) -> tuple[tuple[int, ...] | None, str]:
    """Split "R50+B/16" into the units of its ResNet and "B/16"; a plain "B/16" has None.

    Raises:
        UserError: No such hybrid.
    """
    backbone, plus, rest = variant.partition("+")
    if not plus:
        return None, variant
    patch_size = parse_variant(rest)[1]
    if patch_size not in BACKBONES.get(backbone, {}):
        known = [f"{name}+SIZE/{patch}" for name, row in BACKBONES.items() for patch in row]
        raise UserError(f'unknown hybrid "{variant}"; there are {", ".join(known)}')
    return BACKBONES[backbone][patch_size], rest


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
    backbone, plain = split_hybrid(config.variant)
    name, patch_size = parse_variant(plain)
    stride = patch_size
    if backbone is not None:
        patch_size = _STAGES_PATCH if backbone else _STEM_PATCH
        # The stem halves twice, every stage after the first once more.
        stride = patch_size * 4 * 2 ** max(len(backbone) - 1, 0)
    size = SIZES[name]
    embed_dim = size.embed_dim if config.embed_dim is None else config.embed_dim
    num_heads = size.num_heads if config.num_heads is None else config.num_heads
    problems = [
        *_shape_problems(config, stride, embed_dim, num_heads),
        *_position_problems(config, embed_dim),
    ]
    if problems:
        raise UserError("; ".join(problems))
    side = config.img_size // stride
    num_prefix_tokens = int(config.class_token) + config.reg_tokens
    return ModelShape(
        embed_dim=embed_dim,
        depth=size.depth if config.depth is None else config.depth,
        num_heads=num_heads,
        mlp_dim=size.mlp_dim if config.mlp_dim is None else config.mlp_dim,
        patch_size=patch_size,
        grid_size=(side, side),
        num_patches=side * side,
        num_prefix_tokens=num_prefix_tokens,
        num_prefix_rows=0 if config.no_embed_class else num_prefix_tokens,
        backbone=backbone,
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
    if config.global_pool == "token" and not config.class_token:
        yield (
            'model.global_pool = "token" reads the class token, but model.class_token is false; '
            'set global_pool = "avg" or class_token = true'
        )
    if config.block == "parallel" and config.mlp == "swiglu":
        yield ('model.block = "parallel" has a plain MLP only; set mlp = "mlp" or block = "serial"')


def _position_problems(config: ShapeFields, embed_dim: int) -> Iterator[str]:
    kind, place = config.pos_embed, config.pos_embed_at
    # Four parts (sine and cosine of x and y), each of at least two frequencies.
    if kind == "sincos2d" and (embed_dim % 4 or embed_dim < 8):
        yield (
            f'model.pos_embed = "sincos2d" needs embed_dim to be a multiple of 4 and at least 8, '
            f'not {embed_dim}; change it or use "learned"'
        )
    if kind == "learned2d" and embed_dim % 2:
        yield f'model.pos_embed = "learned2d" needs an even embed_dim, not {embed_dim}'
    places = {"learned": "stem every shared", "learned2d": "stem every shared", "relative": "every"}
    if place not in (allowed := places.get(kind, "stem").split()):
        yield (
            f'model.pos_embed_at = "{place}" is not for pos_embed = "{kind}"; '
            f"set {' or '.join(allowed)}"
        )
    if kind == "relative" and config.block == "parallel":
        yield 'model.pos_embed = "relative" is not for block = "parallel"; set block = "serial"'
    if config.patch_drop_rate > 0 and place != "stem":
        yield (
            f"model.patch_drop_rate = {config.patch_drop_rate} needs positions that enter at the "
            f'stem, not pos_embed_at = "{place}"'
        )
