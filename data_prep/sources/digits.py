"""The 1,797 handwritten digits that scikit-learn ships: 8 x 8 px, grey, ten classes.

A small real data set without a download. Every fifth image (i % 5 == 4) is held out as the test
part.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from data_prep.images import encode_png
from data_prep.sources.build import Column, Entry, SourceOptions
from vitscale.config.errors import UserError

PARTS = ("train", "test", "all")
HELD_OUT_EVERY = 5
# Each value counts the dark pixels of a 4 x 4 cell. Source: sklearn.datasets.load_digits.
MAX_VALUE = 16


class Digits:
    """Handwritten digits.

    Args:
        uri: "train" (four fifths), "test" (the held-out fifth) or "all".
        options: Nothing in them concerns this source.
    """

    kind = "digits"

    def __init__(self, uri: str, options: SourceOptions) -> None:
        self._part = uri
        self._images: npt.NDArray[np.uint8] | None = None

    def entries(self) -> Iterator[Entry]:
        """List the part's images.

        Raises:
            UserError: There is no such part, or scikit-learn is not installed.
        """
        if self._part not in PARTS:
            raise UserError(
                f"digits:{self._part} is not one of {', '.join('digits:' + part for part in PARTS)}"
            )
        images, labels = _load()
        for number, label in enumerate(labels.tolist()):
            held_out = number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
            if self._part == "all" or held_out == (self._part == "test"):
                yield Entry(f"{number:04d}", images[number].size, (label,))

    def columns(self) -> list[Column]:
        """Give the ten classes."""
        return [Column("label", names=tuple("0123456789"))]

    def read(self, entry: Entry) -> bytes:
        """Encode one image as PNG."""
        if self._images is None:
            self._images, _ = _load()
        return encode_png(self._images[int(entry.name)])


def _load() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(
            "digits: scikit-learn is not installed; run `pip install 'vitscale[demo]'`"
        ) from None
    data = load_digits()
    return np.rint(data.images * (255 / MAX_VALUE)).astype(np.uint8), data.target.astype(np.int64)
