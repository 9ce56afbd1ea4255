"""Oxford's 102 flowers: jpg/image_00001.jpg ..., imagelabels.mat and setid.mat.

`--split train` takes `trnid`, `val` takes `valid`, `test` takes `tstid`; 1,020, 1,020 and 6,149
images as published. The files name no classes: they are called "1" to "102", as they are numbered.
Source of the layout: https://www.robots.ox.ac.uk/~vgg/data/flowers/102/
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.sources.build import Column, Entry, SourceOptions
from data_prep.sources.local_files import read_listed
from vitscale.config.errors import DataError, UserError

SPLITS = {"train": "trnid", "val": "valid", "test": "tstid"}


class Flowers:
    """Flowers of 102 kinds.

    Args:
        uri: The folder that holds jpg/ and the two .mat files.
        options: `split` is "train", "val" or "test".
    """

    kind = "flowers"

    def __init__(self, uri: str, options: SourceOptions) -> None:
        self._folder = Path(uri)
        self._split = options.split
        self._num_classes = 0

    def entries(self) -> Iterator[Entry]:
        """List the images of the split.

        Raises:
            UserError: A file is missing, SciPy is not installed, or the split is not one of the
                three.
            DataError: A file is damaged, or they do not belong together.
        """
        if self._split not in SPLITS:
            raise UserError(f"flowers: --split {self._split!r} is not one of {', '.join(SPLITS)}")
        labels = self._numbers("imagelabels.mat", "labels")
        images = self._numbers("setid.mat", SPLITS[self._split])
        self._num_classes = max(labels)
        for number in images:
            if number > len(labels):
                raise DataError(
                    f"flowers: setid.mat in {self._folder} names image {number}, imagelabels.mat "
                    f"has {len(labels)} labels; not a pair"
                )
            name = f"jpg/image_{number:05d}.jpg"
            own = (labels[number - 1] - 1,)
            try:
                yield Entry(name, os.stat(self._folder / name).st_size, own)
            except (FileNotFoundError, NotADirectoryError):
                yield Entry(name, 0, own, f"missing_file: {name}")

    def columns(self) -> list[Column]:
        """Give the classes by their numbers."""
        return [Column("label", names=tuple(map(str, range(1, self._num_classes + 1))))]

    def read(self, entry: Entry) -> bytes:
        """Read one input."""
        return read_listed(str(self._folder / entry.name), entry.num_bytes)

    def _numbers(self, file_name: str, field: str) -> list[int]:
        """Read an array of numbers from 1."""
        try:
            from scipy.io import loadmat
        except ImportError:
            raise UserError(
                "flowers: SciPy is not installed; run `pip install 'vitscale[demo]'`"
            ) from None
        path = self._folder / file_name
        if not path.is_file():
            raise UserError(
                f"flowers: {path} is missing; give the folder that holds jpg/, imagelabels.mat and "
                "setid.mat"
            )
        try:
            values: Any = loadmat(path)[field]
        except Exception as error:  # a damaged file raises nearly anything
            raise DataError(
                f"flowers: {path} is damaged: {type(error).__name__}: {error}"
            ) from error
        numbers = np.asarray(values).ravel()
        if not np.issubdtype(numbers.dtype, np.integer) or not len(numbers) or numbers.min() < 1:
            raise DataError(f"flowers: {path}: {field!r} holds no numbers from 1")
        return [int(number) for number in numbers]
