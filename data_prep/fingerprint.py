"""What a picture looks like in a few bytes: equal for equal pixels, close for close pictures."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
from PIL import Image, ImageOps

from vitscale.config.errors import DataError
from vitscale.data.dataset import open_dataset
from vitscale.data.decode import decode_rgb
from vitscale.data.manifest import load_index

# The picture is brought to this size, px, before its hashes: all of them see the same.
THUMBNAIL = 64


class Fingerprints(NamedTuple):
    """Of the samples of a shard, or of a dataset; rows in stored order."""

    # of the decoded pixels and their shape
    pixels: npt.NDArray[np.uint64]
    # perceptual and difference hash of the picture and of its mirror image: (n, 2) each
    phash: npt.NDArray[np.uint64]
    dhash: npt.NDArray[np.uint64]


def fingerprint_shard(uri: str, shard_id: int) -> Fingerprints:
    """Take the fingerprints of one shard of a dataset."""
    dataset = open_dataset(uri)
    start = int(dataset.manifest.shards.starts[shard_id])
    count = len(load_index(dataset.storage, dataset.manifest, shard_id))
    pixels = np.empty(count, np.uint64)
    phash = np.empty((count, 2), np.uint64)
    dhash = np.empty((count, 2), np.uint64)
    for row in range(count):
        sample = dataset[start + row]
        try:
            picture = decode_rgb(sample.image, 3)
        except DataError as error:
            raise DataError(f"{uri}: shard {sample.shard}, key {sample.key}: {error}") from error
        pixels[row], phash[row], dhash[row] = fingerprint(picture)
    return Fingerprints(pixels, phash, dhash)


def fingerprint(picture: npt.NDArray[np.uint8]) -> tuple[int, list[int], list[int]]:
    """Take the fingerprint of one picture, (h, w, 3)."""
    import imagehash

    shape = f"{picture.shape}".encode()
    pixels = xxhash.xxh3_64(shape)
    pixels.update(np.ascontiguousarray(picture).data)
    small = Image.fromarray(picture).convert("L")
    small = small.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
    views = (small, ImageOps.mirror(small))
    return (
        pixels.intdigest(),
        [_as_number(imagehash.phash(view).hash) for view in views],
        [_as_number(imagehash.dhash(view).hash) for view in views],
    )


def _as_number(bits: npt.NDArray[np.bool_]) -> int:
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


def join(parts: list[Fingerprints]) -> Fingerprints:
    """Lay the fingerprints of shards end to end."""
    return Fingerprints(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
