"""The Oxford-IIIT Pet data set: images/*.jpg, annotations/trainval.txt and annotations/test.txt.

A line is `Abyssinian_100 1 1 1`: name of the image, class from 1 to 37, species (1 cat, 2 dog),
breed within the species. Classes are called as their images are.
Source of the layout: annotations/README of https://www.robots.ox.ac.uk/~vgg/data/pets/
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from data_prep.sources.build import Column, Entry, SourceOptions
from data_prep.sources.local_files import read_listed
from vitscale.config.errors import DataError, UserError

LISTS = {"train": "trainval.txt", "val": "test.txt", "test": "test.txt"}
SPECIES = ("cat", "dog")


class _Line(NamedTuple):
    image: str
    # both from 1
    breed: int
    species: int


class Pets:
    """Cats and dogs of 37 breeds.

    Args:
        uri: The folder that holds images/ and annotations/.
        options: `split` is "train" (trainval.txt), "val" or "test" (both test.txt).
    """

    kind = "pets"

    def __init__(self, uri: str, options: SourceOptions) -> None:
        self._folder = Path(uri)
        self._split = options.split
        self._names: tuple[str, ...] = ()

    def entries(self) -> Iterator[Entry]:
        """List the images of the split.

        Raises:
            UserError: There is no such list, or the split is not one of the three.
            DataError: A list is damaged.
        """
        if self._split not in LISTS:
            raise UserError(f"pets: --split {self._split!r} is not one of {', '.join(LISTS)}")
        own = self._folder / "annotations" / LISTS[self._split]
        if not own.is_file():
            raise UserError(
                f"pets: {own} is missing; give the folder that holds images/ and annotations/"
            )
        self._names = self._class_names()
        for line in _lines(own):
            name = f"images/{line.image}.jpg"
            labels = (line.breed - 1, line.species - 1)
            try:
                yield Entry(name, os.stat(self._folder / name).st_size, labels)
            except (FileNotFoundError, NotADirectoryError):
                yield Entry(name, 0, labels, f"missing_file: {name}")

    def columns(self) -> list[Column]:
        """Give the breeds and the species."""
        return [Column("label", names=self._names), Column("species", names=SPECIES)]

    def read(self, entry: Entry) -> bytes:
        """Read one input."""
        return read_listed(str(self._folder / entry.name), entry.num_bytes)

    def _class_names(self) -> tuple[str, ...]:
        """Name the classes after the images in both lists, so that splits agree."""
        names: dict[int, str] = {}
        for list_name in sorted(set(LISTS.values())):
            path = self._folder / "annotations" / list_name
            for line in _lines(path) if path.is_file() else ():
                name = line.image.rpartition("_")[0]
                if names.setdefault(line.breed, name) != name:
                    raise DataError(
                        f"pets: {path}: {line.image} is of class {line.breed}, which is "
                        f"{names[line.breed]} elsewhere; fetch annotations.tar.gz again"
                    )
        if sorted(names) != list(range(1, len(names) + 1)) or not names:
            raise DataError(
                f"pets: {self._folder}/annotations: the classes are {sorted(names)}, expected 1 to "
                "37; fetch annotations.tar.gz again"
            )
        return tuple(names[number] for number in sorted(names))


def _lines(path: Path) -> Iterator[_Line]:
    with open(path, encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            fields = text.split()
            if not fields or text.startswith("#"):
                continue
            plain = len(fields) == 4 and all(field.isdecimal() for field in fields[1:])
            if not plain or int(fields[2]) not in (1, 2) or "/" in fields[0]:
                raise DataError(
                    f"pets: {path}: line {number} is {text.strip()!r}, expected such as "
                    "'Abyssinian_100 1 1 1'"
                )
            yield _Line(fields[0], int(fields[1]), int(fields[2]))
