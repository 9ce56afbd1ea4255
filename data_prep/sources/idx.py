"""Arrays in the IDX files of MNIST and Fashion-MNIST, gzipped or not.

The folder holds `train-images-idx3-ubyte[.gz]` and `train-labels-idx1-ubyte[.gz]`, and the same
with `t10k` for the test images. `--split train` takes the first pair, `--split val` (or `test`) the
second. Each image becomes a grey PNG.
IDX: two zero bytes, a type code (8 = unsigned bytes), the number of axes, their big-endian sizes,
the values.
"""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep.images import encode_png
from data_prep.sources.build import Column, Entry, SourceOptions
from vitscale.config.errors import DataError, UserError

STEMS = {"train": "train", "val": "t10k", "test": "t10k"}


class IdxFolder:
    """Images and labels in a pair of IDX files.

    Args:
        uri: The folder with the files.
        options: `split` is "train", "val" or "test".
    """

    kind = "idx"

    def __init__(self, uri: str, options: SourceOptions) -> None:
        self._folder = Path(uri)
        self._split = options.split
        self._num_classes = 0
        self._images: npt.NDArray[np.uint8] | None = None

    def entries(self) -> Iterator[Entry]:
        """List all images.

        Raises:
            UserError: A file is missing, or the split is not one of the three.
            DataError: A file is damaged, or the two do not belong together.
        """
        labels = _read_idx(self._path("labels", 1), 1)
        images = self._load()
        if len(images) != len(labels):
            raise DataError(
                f"idx: {self._folder}: {len(images)} images and {len(labels)} labels; not a pair"
            )
        if not len(labels):
            raise UserError(
                f"idx: {self._folder}: the files of split {self._split!r} hold no images"
            )
        self._num_classes = int(labels.max()) + 1
        num_bytes = images[0].size
        stem = STEMS[self._split]
        for number, label in enumerate(labels.tolist()):
            yield Entry(f"{stem}/{number:06d}", num_bytes, (label,))

    def columns(self) -> list[Column]:
        """Give the classes: "0" up to the largest label."""
        return [Column("label", names=tuple(map(str, range(self._num_classes))))]

    def read(self, entry: Entry) -> bytes:
        """Encode one image as PNG."""
        return encode_png(self._load()[int(entry.name.rpartition("/")[2])])

    def _load(self) -> npt.NDArray[np.uint8]:
        if self._images is None:
            self._images = _read_idx(self._path("images", 3), 3)
        return self._images

    def _path(self, what: str, axes: int) -> Path:
        if self._split not in STEMS:
            raise UserError(f"idx: --split {self._split!r} is not one of {', '.join(STEMS)}")
        name = f"{STEMS[self._split]}-{what}-idx{axes}-ubyte"
        for candidate in (f"{name}.gz", name):
            path = self._folder / candidate
            if path.is_file():
                return path
        raise UserError(
            f"idx: {self._folder} has neither {name}.gz nor {name}; "
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
