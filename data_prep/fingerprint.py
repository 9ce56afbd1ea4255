"""What a picture looks like in a few bytes: equal for equal pixels, close for close pictures."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import xxhash
from PIL import Image, ImageOps

from vitscale.config.errors import DataError
from vitscale.data.dataset import Dataset, open_dataset
from vitscale.data.decode import decode_rgb
from vitscale.data.manifest import ShardTable, damaged

# Raised when equal pictures get other fingerprints than before.
FINGERPRINT_VERSION = 1
# The picture is brought to this size, px, before its hashes: all of them see the same.
THUMBNAIL = 64
# Columns of the array that holds fingerprints.
FINGERPRINT_WIDTH = 7
# Mean colours of the quarters of a picture: four times three values of so many bits.
COLOUR_BITS = 5
_QUARTERS, _VALUES = 2, 12


@dataclass(frozen=True)
class Fingerprints:
    """Of the samples of a shard, or of a dataset; rows in stored order; 56 bytes each."""

    # halves of xxh3_128 of the decoded pixels and their shape; (n, 2)
    pixels: npt.NDArray[np.uint64]
    # perceptual and difference hash of the picture and of its mirror image; (n, 2) each
    phash: npt.NDArray[np.uint64]
    dhash: npt.NDArray[np.uint64]
    # mean colours of the quarters: upper left and right, lower left and right; red, green, blue;
    # COLOUR_BITS each, the first one highest; (n,)
    colours: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.pixels)

    def as_array(self) -> npt.NDArray[np.uint64]:
        """Give all of it as one array, (n, 7)."""
        return np.column_stack([self.pixels, self.phash, self.dhash, self.colours])

    def part(self, start: int, end: int) -> "Fingerprints":
        """Give some of the rows; nothing is copied."""
        rows = slice(start, end)
        return Fingerprints(
            self.pixels[rows], self.phash[rows], self.dhash[rows], self.colours[rows]
        )

    def put(self, start: int, other: "Fingerprints") -> None:
        """Overwrite rows from `start` on."""
        rows = slice(start, start + len(other))
        self.pixels[rows], self.phash[rows] = other.pixels, other.phash
        self.dhash[rows], self.colours[rows] = other.dhash, other.colours

    @classmethod
    def from_array(cls, array: npt.NDArray[np.uint64]) -> "Fingerprints":
        """Take apart what `as_array` gave; nothing is copied."""
        return cls(array[:, :2], array[:, 2:4], array[:, 4:6], array[:, 6])

    @classmethod
    def empty(cls, count: int) -> "Fingerprints":
        """Make room for so many."""
        return cls.from_array(np.empty((count, FINGERPRINT_WIDTH), np.uint64))


@dataclass
class FingerprintWork:
    """Takes the fingerprints of single shards; every process opens the dataset itself.

    Args:
        uri: The dataset.
    """

    uri: str
    _opened: Dataset | None = None

    def __call__(self, shard_id: int) -> tuple[int, npt.NDArray[np.uint64]]:
        """Give the shard's number and its fingerprints as one array.

        Raises:
            DataError: A sample is damaged.
        """
        if self._opened is None:
            self._opened = open_dataset(self.uri)
        shard = only_shard(self._opened, shard_id)
        found = Fingerprints.empty(len(shard))
        for row, sample in enumerate(shard):
            try:
                picture = decode_rgb(sample.image, 3)
            except DataError as error:
                raise damaged(
                    self.uri, sample.shard, str(error), sample.key, sample.offset
                ) from error
            taken = fingerprint(picture)
            found.pixels[row], found.phash[row], found.dhash[row], found.colours[row] = taken
        return shard_id, found.as_array()


def only_shard(dataset: Dataset, shard_id: int) -> Dataset:
    """Give one shard as a dataset: going through it reads the shard from front to end."""
    shards = dataset.manifest.shards
    at = slice(shard_id, shard_id + 1)
    table = ShardTable(
        names=shards.names[at],
        num_samples=shards.num_samples[at],
        num_bytes=shards.num_bytes[at],
        sha256=shards.sha256[at],
        index_sha256=shards.index_sha256[at],
    )
    count = int(table.num_samples[0])
    return Dataset(
        dataset.storage, replace(dataset.manifest, shards=table, num_samples=count, num_shards=1)
    )


def fingerprint(
    picture: npt.NDArray[np.uint8],
) -> tuple[list[int], list[int], list[int], int]:
    """Take the fingerprint of one picture, (h, w, 3): a row of `Fingerprints`."""
    import imagehash

    small = Image.fromarray(picture).resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
    grey = small.convert("L")
    views = (grey, ImageOps.mirror(grey))
    return (
        pixel_hash(picture),
        [_as_number(imagehash.phash(view).hash) for view in views],
        [_as_number(imagehash.dhash(view).hash) for view in views],
        _colours(small),
    )


def _colours(small: Image.Image) -> int:
    quarters = small.resize((_QUARTERS, _QUARTERS), Image.Resampling.BOX)
    number = 0
    for value in quarters.tobytes():
        number = number << COLOUR_BITS | value >> (8 - COLOUR_BITS)
    return number


def mirrored(colours: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Give the colours of the mirror images: left and right quarters change places."""
    width = 3 * COLOUR_BITS
    quarters = [colours >> np.uint64(width * at) & np.uint64((1 << width) - 1) for at in range(4)]
    result = np.zeros_like(colours)
    for at, quarter in zip((1, 0, 3, 2), quarters, strict=True):
        result |= quarter << np.uint64(width * at)
    return result


def colour_steps(
    one: npt.NDArray[np.uint64], other: npt.NDArray[np.uint64]
) -> npt.NDArray[np.int64]:
    """Give the largest difference of two pictures' colours, in steps of 2**(8 - COLOUR_BITS)."""
    steps = np.zeros(len(one), np.int64)
    mask = np.uint64((1 << COLOUR_BITS) - 1)
    for at in range(_VALUES):
        shift = np.uint64(at * COLOUR_BITS)
        values = [(side >> shift & mask).astype(np.int64) for side in (one, other)]
        steps = np.maximum(steps, abs(values[0] - values[1]))
    return steps


def pixel_hash(picture: npt.NDArray[np.uint8]) -> list[int]:
    """Give both halves of the xxh3_128 of a picture's shape and pixels."""
    pixels = xxhash.xxh3_128(f"{picture.shape}".encode())
    pixels.update(np.ascontiguousarray(picture).data)
    return list(divmod(pixels.intdigest(), 1 << 64))


def _as_number(bits: npt.NDArray[np.bool_]) -> int:
    return int.from_bytes(np.packbits(bits).tobytes(), "big")
