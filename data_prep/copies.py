"""Samples of a training set that were found to be copies, and the rows of the list for them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vitscale.data.dataset import Dataset
from vitscale.data.manifest import load_index


class Copy(NamedTuple):
    """A sample of the training set, and what it is a copy of."""

    sample: int
    # exact, near, embedding; or one of these with self_ in front
    reason: str
    # 0, differing bits of 64, or 1 - cosine
    distance: float
    # position of the other's dataset; 0 is the training set
    dataset: int
    other: int


class Place(NamedTuple):
    """Where a sample is stored."""

    shard: str
    key: str
    # of the stored image bytes
    xxh3: int


class Copies:
    """The copies that were found: one for every sample, the first that is added.

    Args:
        uris: The training set, then those that it is compared with.
        datasets: The same, open.
    """

    def __init__(self, uris: Sequence[str], datasets: Sequence[Dataset]) -> None:
        self.uris, self.datasets = list(uris), list(datasets)
        self._found: dict[int, Copy] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, copy: Copy) -> None:
        """Take a copy, unless one of the sample is there already."""
        self._found.setdefault(copy.sample, copy)

    def all(self) -> list[Copy]:
        """Give all, in stored order."""
        return [self._found[sample] for sample in sorted(self._found)]

    def counts(self) -> dict[int, Counter[str]]:
        """Give position of a dataset -> how many copies of its samples, by reason."""
        counts: dict[int, Counter[str]] = {number: Counter() for number in range(len(self.uris))}
        for copy in self._found.values():
            counts[copy.dataset][copy.reason] += 1
        return counts

    def rows(self, pixels: npt.NDArray[np.uint64]) -> list[dict[str, Any]]:
        """Give the rows of the list.

        Args:
            pixels: (n, 2) halves of the pixel hashes of the training set.
        """
        copies = self.all()
        own = places(self.datasets[0], [copy.sample for copy in copies])
        others = [
            places(dataset, [copy.other for copy in copies if copy.dataset == number])
            for number, dataset in enumerate(self.datasets)
        ]
        return [
            {
                "shard": own[copy.sample].shard,
                "key": own[copy.sample].key,
                "xxh3_64": own[copy.sample].xxh3,
                "pixels": pixels[copy.sample].astype(">u8").tobytes(),
                "reason": copy.reason,
                "distance": copy.distance,
                "against": self.uris[copy.dataset],
                "against_key": others[copy.dataset][copy.other].key,
            }
            for copy in copies
        ]


def places(dataset: Dataset, samples: Sequence[int]) -> dict[int, Place]:
    """Look up samples; the index of every shard that has some is read once."""
    manifest = dataset.manifest
    starts = manifest.shards.starts
    wanted = np.unique(np.asarray(samples, np.int64))
    shard_ids = np.searchsorted(starts, wanted, side="right") - 1
    found = {}
    for shard_id in np.unique(shard_ids).tolist():
        index = load_index(dataset.storage, manifest, shard_id)
        for sample in wanted[shard_ids == shard_id].tolist():
            row = sample - int(starts[shard_id])
            name = manifest.shards.names[shard_id]
            found[sample] = Place(name, index.keys[row], int(index.xxh3[row]))
    return found
