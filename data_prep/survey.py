"""A first look at somebody else's shards: which labels there are, and that no key comes twice."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from data_prep.sources.build import printable
from data_prep.sources.files import RandomFile
from data_prep.sources.foreign_tars import scan_samples
from vitscale.config.errors import DataError


class Survey(NamedTuple):
    """What the labels and keys of one shard are."""

    number: int
    # by column: all that occur, and whether a sample has several
    values: list[set[str | int]]
    multi: list[bool]
    # xxh64 of the keys of usable samples
    key_hashes: npt.NDArray[np.uint64]
    num_samples: int


@dataclass(frozen=True)
class SurveyWork:
    """Looks at the labels and keys of shards.

    Args:
        uri: Where the shards are.
        label_columns: Members or fields with labels; empty finds the one there is.
    """

    uri: str
    label_columns: tuple[str, ...]

    def __call__(self, task: tuple[int, str]) -> Survey:
        """Survey one shard."""
        number, name = task
        width = max(1, len(self.label_columns))
        values: list[set[str | int]] = [set() for _ in range(width)]
        multi = [False] * width
        hashes = []
        count = 0
        for sample in scan_samples(RandomFile(f"{self.uri}/{name}"), self.label_columns):
            count += 1
            if sample.problem:
                continue
            hashes.append(xxhash.xxh64_intdigest(printable(sample.key).encode()))
            for at, label in enumerate(sample.labels):
                several = isinstance(label, tuple)
                multi[at] |= several
                values[at].update(label if several else (label,))  # type: ignore[arg-type]
        return Survey(number, values, multi, np.asarray(hashes, np.uint64), count)


def refuse_doubles(work: SurveyWork, names: list[str], surveys: list[Survey]) -> None:
    """Make sure that keys are unique.

    Args:
        work: What the surveys were made with.
        names: Of the shards.
        surveys: Of all of them.

    Raises:
        DataError: Keys come twice; names one with its shards.
    """
    hashes = np.sort(np.concatenate([survey.key_hashes for survey in surveys]))
    twice = hashes[1:][hashes[1:] == hashes[:-1]]
    if not len(twice):
        return
    places = []
    for survey, name in zip(surveys, names, strict=True):
        if np.isin(twice[0], survey.key_hashes):
            for sample in scan_samples(RandomFile(f"{work.uri}/{name}"), work.label_columns):
                key = printable(sample.key)
                if xxhash.xxh64_intdigest(key.encode()) == int(twice[0]):
                    places.append(f"{key} in {name}")
    raise DataError(
        f"{work.uri}: {len(twice)} keys come twice, for example {' and '.join(places[:2])}; "
        "a dataset needs unique keys: `vitscale pack --source webdataset:...` gives new ones"
    )
