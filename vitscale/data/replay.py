"""What a run was fed, worked out again from its order and compared with what it wrote down.

The digest in every step's row names the keys of that batch. Here the batch that the order asks for
is built from the indexes and hashed anew: where both agree, the step fed just these samples. The
counts of an epoch are of such steps alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitscale.data.audit import batch_digest, hash_key
from vitscale.data.dataset import Dataset
from vitscale.data.manifest import load_index
from vitscale.data.mixture import Mixture
from vitscale.data.order import Order
from vitscale.data.quarantine import BadSample

# Steps whose batches are worked out at once.
_STEPS = 64


@dataclass(frozen=True)
class EpochCount:
    """How often the samples of a dataset were fed in one epoch."""

    # Ordinal of the dataset in the recipe.
    source: int
    epoch: int
    # Samples fed once; never; more than once; replaced because they were bad.
    once: int
    missing: int
    twice: int
    quarantined: int
    # Whether the run has left this epoch behind.
    is_complete: bool


def key_hashes(data: Dataset, progress: Callable[[int], None]) -> NDArray[np.uint64]:
    """Hash the keys of a dataset: 8 bytes a sample.

    Args:
        data: The dataset.
        progress: Told the number of samples of every shard that is done.

    Returns:
        xxh64 of each key, by sample_index.

    Raises:
        DataError: An index is missing or damaged.
    """
    hashes = np.empty(data.manifest.num_samples, dtype=np.uint64)
    starts = data.manifest.shards.starts
    for shard_id in range(len(data.manifest.shards)):
        keys = load_index(data.storage, data.manifest, shard_id).keys
        hashes[starts[shard_id] : starts[shard_id + 1]] = [hash_key(key) for key in keys]
        progress(len(keys))
    return hashes


class Replay:
    """Follows a run step by step.

    Args:
        order: The order of the run, without a quarantine.
        hashes: Key hashes of all datasets, one after the other.
        bad: The samples that the run replaced.
    """

    def __init__(
        self, order: Order | Mixture, hashes: NDArray[np.uint64], bad: Sequence[BadSample]
    ) -> None:
        self.order, self._hashes = order, hashes
        # From that position on a sample is bad.
        self._bad_from = {one.sample_index: one.position for one in bad}
        self._bad = np.array(sorted(self._bad_from), dtype=np.int64)
        orders = [order] if isinstance(order, Order) else [s.order for s in order.sources]
        self._sizes = [own.num_samples for own in orders]
        self._sample_starts = np.concatenate([[0], np.cumsum(self._sizes)])
        self._shard_starts = self._starts_of_shards(orders)
        self._usable = [own.usable for own in orders]
        # (source, epoch) -> times that each sample was fed, and samples that were replaced.
        self._fed: dict[tuple[int, int], NDArray[np.uint8]] = {}
        self._replaced: dict[tuple[int, int], set[int]] = {}

    @staticmethod
    def _starts_of_shards(orders: Sequence[Order]) -> NDArray[np.int64]:
        sizes = np.concatenate([own.shard_sizes for own in orders])
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def steps(self, digests: Mapping[int, str]) -> Iterator[tuple[int, bool]]:
        """Compare steps with their digests, and count what they fed.

        Args:
            digests: data/digest of each finished step, counted from 1.

        Yields:
            Each step, and whether its digest is that of the batch that was due.
        """
        batch = self.order.global_batch
        numbers = sorted(digests)
        for first in range(0, len(numbers), _STEPS):
            some = numbers[first : first + _STEPS]
            positions = np.concatenate([self.order.step_positions(step - 1) for step in some])
            due = self.order.places(positions)
            fed = due.sample_index.copy()
            replaced = self._replace(positions, fed)
            for k, step in enumerate(some):
                part = slice(k * batch, (k + 1) * batch)
                is_right = batch_digest(self._hashes[fed[part]].view(np.int64)) == digests[step]
                if is_right:
                    self._count(
                        positions[part], due.epoch[part], due.sample_index[part], replaced[part]
                    )
                yield step, is_right

    def _replace(self, positions: NDArray[np.int64], fed: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Put substitutes where bad samples were due; returns where."""
        replaced = np.zeros(len(fed), dtype=bool)
        for i in np.flatnonzero(np.isin(fed, self._bad)):
            position = int(positions[i])
            if self._bad_from[int(fed[i])] > position:
                continue
            replaced[i] = True
            for shard_id, index in self.order.replacements(position):
                candidate = int(self._shard_starts[shard_id]) + index
                if self._bad_from.get(candidate, position + 1) > position:
                    fed[i] = candidate
                    break
        return replaced

    def _count(
        self,
        positions: NDArray[np.int64],
        epochs: NDArray[np.int64],
        samples: NDArray[np.int64],
        replaced: NDArray[np.bool_],
    ) -> None:
        source = self.order.source_of(positions)
        for own, epoch in {(int(s), int(e)) for s, e in zip(source, epochs, strict=True)}:
            key, start = (own, epoch), int(self._sample_starts[own])
            if key not in self._fed:
                self._fed[key] = np.zeros(self._sizes[own], dtype=np.uint8)
                self._replaced[key] = set()
            mine = (source == own) & (epochs == epoch)
            fed, times = np.unique(samples[mine & ~replaced] - start, return_counts=True)
            # Saturates: what matters is whether it is more than once.
            self._fed[key][fed] = np.minimum(self._fed[key][fed] + times, 255)
            self._replaced[key] |= set((samples[mine & replaced] - start).tolist())

    def counts(self, seen_examples: int) -> list[EpochCount]:
        """Sum up.

        Args:
            seen_examples: Examples that the run has consumed.

        Returns:
            One entry for each epoch of each dataset that was begun.
        """
        opened = self.order.open_epochs(seen_examples)
        result = []
        for source, epoch in sorted(self._fed):
            times, replaced = self._fed[source, epoch], self._replaced[source, epoch]
            once, twice = int((times == 1).sum()), int((times > 1).sum())
            due = self._usable[source]
            result.append(
                EpochCount(
                    source=source,
                    epoch=epoch,
                    once=once,
                    missing=due - once - twice - len(replaced),
                    twice=twice,
                    quarantined=len(replaced),
                    is_complete=epoch < opened[source].start,
                )
            )
        return result
