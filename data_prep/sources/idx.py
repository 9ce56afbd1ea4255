"""Arrays in the IDX files of MNIST and Fashion-MNIST, gzipped or not.

The folder holds `train-images-idx3-ubyte[.gz]` and `train-labels-idx1-ubyte[.gz]`, and the same
with `t10k` for the test images. `--split train` takes the first pair, `--split val` (or `test`) the
second. Each image becomes a grey PNG.
IDX: two zero bytes, a type code (8 = unsigned bytes), the number of axes, their big-endian sizes,
the values.
"""

import gzip
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep.images import encode_png
from data_prep.sources.build import Listing
from vitscale.config.errors import DataError, UserError

STEMS = {"train": "train", "val": "t10k", "test": "t10k"}


@dataclass
class IdxFolder:
    """Images and labels in a pair of IDX files.

    Args:
        folder: Where the files are.
        split: "train", "val" or "test".
    """

    folder: str
    split: str
    kind: str = field(default="idx", init=False)
    _images: npt.NDArray[np.uint8] | None = field(default=None, init=False, repr=False)

    def listing(self) -> Listing:
        """List all images; classes are "0" up to the largest label.

        Raises:
            UserError: A file is missing, or the split is not one of the three.
            DataError: A file is damaged, or the two do not belong together.
        """
        labels = _read_idx(self._path("labels", 1), 1)
        images = self._load()
        if len(images) != len(labels):
            raise DataError(
                f"idx: {self.folder}: {len(images)} images and {len(labels)} labels; not a pair"
            )
        if not len(labels):
            raise UserError(f"idx: {self.folder}: the files of split {self.split!r} hold no images")
        listing = Listing(classes=[str(label) for label in range(int(labels.max()) + 1)])
        num_bytes = images[0].size
        stem = STEMS[self.split]
        for number, label in enumerate(labels.tolist()):
            listing.add(f"{stem}/{number:06d}", num_bytes, label)
        return listing

    def read(self, name: str, num_bytes: int) -> bytes:
        """Encode one image as PNG."""
        return encode_png(self._load()[int(name.rpartition("/")[2])])

    def _load(self) -> npt.NDArray[np.uint8]:
        if self._images is None:
            self._images = _read_idx(self._path("images", 3), 3)
        return self._images

    def _path(self, what: str, axes: int) -> Path:
        if self.split not in STEMS:
            raise UserError(f"idx: --split {self.split!r} is not one of {', '.join(STEMS)}")
        name = f"{STEMS[self.split]}-{what}-idx{axes}-ubyte"
        for candidate in (f"{name}.gz", name):
            path = Path(self.folder) / candidate
            if path.is_file():
                return path
        raise UserError(
            f"idx: {self.folder} has neither {name}.gz nor {name}; "
            "give the folder that holds the files of MNIST or Fashion-MNIST"
        )


def _read_idx(path: Path, axes: int) -> npt.NDArray[np.uint8]:
    try:
        raw = path.read_bytes()
        data = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"idx: cannot read {path}: {error}") from error
    if data[:4] != bytes([0, 0, 8, axes]):
        raise DataError(f"idx: {path} starts with {data[:4].hex()}, expected 000008{axes:02x}")
    header = 4 + 4 * axes
    shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, header, 4)]
    wanted = header + int(np.prod(shape, dtype=np.int64))
    if len(data) != wanted:
        raise DataError(f"idx: {path} holds {len(data)} bytes, its header announces {wanted}")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)
