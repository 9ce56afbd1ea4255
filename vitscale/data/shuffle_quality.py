"""How well batches are mixed: their labels against independent draws from the same labels.

Two measures, from the labels alone. The label entropy of a batch falls where a batch draws from few
shards of a sorted dataset. The longest run of one class along the slots grows where neighbours come
from the same place. Nothing is decoded; only the indexes of the shards that are asked for are read.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitscale.data.dataset import Dataset
from vitscale.data.manifest import load_index
from vitscale.data.order import Order
from vitscale.data.permute import permutation, stream

# Steps in a row that are looked at: at the beginning of an epoch, and from later ones on.
STEPS_IN_A_ROW = 16
LATER_STRETCHES = 3
# Slots of a stretch in which runs are counted: enough to see long ones, few enough to simulate.
RUN_SLOTS = 8192
SIMULATED_BATCHES = 300
SIMULATED_STRETCHES = 2000
# Shards whose labels stand for all, in a dataset with more.
DISTRIBUTION_SHARDS = 2048
# Index requests at a time, to a remote store.
INDEX_THREADS = 16

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class ShuffleQuality:
    """What was measured; entropies in bits."""

    num_classes: int
    num_batches: int
    # Mean over the batches, and over simulated ones of independent draws.
    entropy: float
    iid_entropy: float
    # Class that fills most slots in a row, and the 99.9th percentile of independent draws.
    longest_run: int
    iid_longest_run: int

    @property
    def entropy_lost(self) -> float:
        """Share of the entropy of independent draws that is missing; below 0: more even."""
        return 1 - self.entropy / self.iid_entropy if self.iid_entropy > 0 else 0.0


def measure_shuffle(dataset: Dataset, order: Order, seed: int = 0) -> ShuffleQuality:
    """Measure the first batches of an epoch and some later ones.

    Args:
        dataset: The training set.
        order: The order of a run over it.
        seed: Of the choice of later batches and of the simulation.

    Returns:
        The measures; samples without a label count as one class of their own.

    Raises:
        DataError: An index is missing or damaged.
    """
    steps = _steps(order, seed)
    places = [
        order.samples(np.concatenate([order.step_positions(step) for step in stretch]))
        for stretch in steps
    ]
    touched = np.unique(np.concatenate([place.shard_id for place in places]))
    labels = _read_labels(dataset, np.union1d(touched, _typical_shards(dataset, seed)))
    stretches = [
        np.array([labels[s][i] for s, i in zip(place.shard_id, place.index, strict=True)])
        for place in places
    ]
    typical = np.concatenate([labels[shard] for shard in _typical_shards(dataset, seed).tolist()])
    classes, counts = np.unique(typical, return_counts=True)
    shares = counts / counts.sum()
    rng = np.random.default_rng(seed)
    size = order.global_batch
    batches = np.concatenate([one.reshape(-1, size) for one in stretches])
    length = min(RUN_SLOTS, min(map(len, stretches)))
    return ShuffleQuality(
        num_classes=len(classes),
        num_batches=len(batches),
        entropy=float(np.mean([_entropy(np.unique(b, return_counts=True)[1]) for b in batches])),
        iid_entropy=float(
            np.mean([_entropy(rng.multinomial(size, shares)) for _ in range(SIMULATED_BATCHES)])
        ),
        longest_run=max(longest_run(one[:length]) for one in stretches),
        iid_longest_run=_iid_longest_run(shares, length, rng),
    )


def _steps(order: Order, seed: int) -> list[Int64]:
    """Give stretches of steps: from the beginning of an epoch, and from random ones in it."""
    row = np.arange(STEPS_IN_A_ROW, dtype=np.int64)
    last = int(order.steps_per_epoch) - STEPS_IN_A_ROW
    if last <= 0:
        return [row[: max(1, int(order.steps_per_epoch))]]
    later = np.random.default_rng(seed).integers(last + 1, size=LATER_STRETCHES)
    return [row, *(row + int(start) for start in later)]


def _typical_shards(dataset: Dataset, seed: int) -> Int64:
    count = len(dataset.manifest.shards)
    if count <= DISTRIBUTION_SHARDS:
        return np.arange(count, dtype=np.int64)
    return np.sort(permutation(count, stream(seed, "typical"))[:DISTRIBUTION_SHARDS])


def _read_labels(dataset: Dataset, shards: Int64) -> dict[int, Int64]:
    def read(shard_id: int) -> Int64:
        # A copy, so that the rest of the index does not stay in memory.
        return load_index(dataset.storage, dataset.manifest, shard_id).labels.copy()

    with ThreadPoolExecutor(INDEX_THREADS) as pool:
        return dict(zip(shards.tolist(), pool.map(read, shards.tolist()), strict=True))


def _entropy(counts: Int64) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def longest_run(labels: Int64) -> int:
    """Count how often the same label stands in a row, at most."""
    changes = np.flatnonzero(labels[1:] != labels[:-1])
    edges = np.concatenate([[-1], changes, [len(labels) - 1]])
    return int(np.diff(edges).max())


def _iid_longest_run(shares: NDArray[np.float64], length: int, rng: np.random.Generator) -> int:
    """Simulate the 99.9th percentile of the longest run in independent draws."""
    limits = np.cumsum(shares)
    longest = []
    for _ in range(SIMULATED_STRETCHES):
        draws = np.searchsorted(limits, rng.random(length), side="right")
        longest.append(longest_run(draws))
    return int(np.quantile(longest, 0.999, method="higher"))
