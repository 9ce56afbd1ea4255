"""What a picture looks like when it is shown: upright, and white behind what is transparent.

The packer applies it where it makes new pixels, the decoder where the stored ones are as they were.
"""

from PIL import Image

_EXIF_ORIENTATION = 0x0112
_TRANSPOSED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def is_plain(image: Image.Image) -> bool:
    """Whether the pixels are grey or RGB with nothing transparent."""
    return image.mode in ("L", "RGB") and not image.has_transparency_data


def plain(image: Image.Image) -> Image.Image:
    """Turn any mode into L or RGB; what is transparent becomes white."""
    if is_plain(image):
        return image
    if image.has_transparency_data:
        layers = image.convert("RGBA")
        white = Image.new("RGBA", layers.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layers).convert("RGB")
    return image.convert("L" if image.mode == "1" else "RGB")


def orientation_of(image: Image.Image) -> int:
    """EXIF orientation of a decoded image, 1 (upright) where there is none or it is damaged."""
    try:
        value = image.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:  # metadata that cannot be parsed says nothing about the orientation
        return 1
    return value if value in _TRANSPOSED else 1


def turned(image: Image.Image, orientation: int) -> Image.Image:
    """Turn an image of that orientation upright."""
    return image.transpose(_TRANSPOSED[orientation]) if orientation != 1 else image
