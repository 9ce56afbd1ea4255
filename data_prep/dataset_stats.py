"""What `vitscale stats` counts, in memory that does not grow with the number of samples."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data_prep.keyed_sort import HELD_ROWS, HIGH, LOW, KeyedSort
from vitscale.data.label_columns import LabelColumn
from vitscale.data.order import Order

Int64 = npt.NDArray[np.int64]

SHOWN = 5
# Steps of a distribution: 16 to a factor of 2, so that a quantile is right to 4 %.
STEPS = 16
QUANTILES = {"p01": 0.01, "p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99}
# Batches that are drawn for an entropy, and shards for the one that is expected.
DRAWN_BATCHES, DRAWN_SHARDS = 200, 20
# Beyond this numpy draws with replacement only; of so many that is the same.
MAX_WITHOUT_REPLACEMENT = 1_000_000_000


class Spread:
    """The distribution of a positive quantity.

    Args:
        least: Smaller values count as this one.
        most: Larger values count as this one in the histogram.
    """

    def __init__(self, least: float, most: float) -> None:
        self._first = int(np.floor(np.log2(least) * STEPS))
        num_steps = int(np.ceil(np.log2(most) * STEPS)) - self._first + 1
        self._counts = np.zeros(num_steps, np.int64)
        self._sums = np.zeros(num_steps)
        self._min, self._max = np.inf, -np.inf

    def add(self, values: npt.NDArray[Any]) -> None:
        """Count values."""
        if not len(values):
            return
        steps = np.floor(np.log2(np.maximum(values, 1e-9)) * STEPS).astype(np.int64)
        at = np.clip(steps - self._first, 0, len(self._counts) - 1)
        self._counts += np.bincount(at, minlength=len(self._counts))
        self._sums += np.bincount(at, values, minlength=len(self._counts))
        self._min = min(self._min, float(values.min()))
        self._max = max(self._max, float(values.max()))

    def describe(self) -> dict[str, Any]:
        """Give minimum, quantiles, mean, maximum, and [lower edge, count] of every filled step."""
        total = int(self._counts.sum())
        if not total:
            return {}
        ends = np.cumsum(self._counts)
        # The mean of a step: a size that most images have comes out exactly.
        middles = self._sums / np.maximum(self._counts, 1)
        at = {name: int(np.searchsorted(ends, share * total)) for name, share in QUANTILES.items()}
        edges = 2.0 ** ((np.arange(len(ends)) + self._first) / STEPS)
        filled = np.flatnonzero(self._counts)
        return {
            "min": _short(self._min),
            **{name: _short(float(middles[step])) for name, step in at.items()},
            "max": _short(self._max),
            "mean": _short(float(self._sums.sum()) / total),
            "histogram": [[_short(float(edges[n])), int(self._counts[n])] for n in filled],
        }


def _short(value: float) -> float:
    return float(f"{value:.4g}") if value < 10_000 else float(round(value))


class LabelStats:
    """The classes of one column, and how well they are mixed.

    Args:
        column: With the names of the classes.
        starts: Number of the first sample of each shard, and of all.
        batch: Samples in a batch.
    """

    def __init__(self, column: LabelColumn, starts: Int64, batch: int) -> None:
        self.column = column
        self._starts = starts
        num_samples = int(starts[-1])
        self.batch = min(batch, num_samples)
        self._counts = np.zeros(len(column.names), np.int64)
        self._unlabelled = 0
        self._shard_bits: list[float] = []
        steps = np.linspace(0, num_samples // self.batch - 1, DRAWN_BATCHES).astype(np.int64)
        order = Order(np.diff(starts), seed=0, global_batch=self.batch)
        steps = np.unique(steps)
        self._stored = [np.arange(self.batch) + step * self.batch for step in steps]
        self._trained = [order.samples(order.step_positions(int(s))).sample_index for s in steps]
        # Of these the labels are kept, in ascending order.
        self._wanted = np.unique(np.concatenate([*self._stored, *self._trained]))
        self._kept: list[Int64] = []
        self._kept_lengths: list[Int64] = []

    def add(self, shard_id: int, values: pa.ChunkedArray) -> None:
        """Count the labels of a shard; shards come in their order."""
        flat, ends = _flat(values)
        self._unlabelled += int((flat < 0).sum()) + int((np.diff(ends) == 0).sum())
        own = np.bincount(flat[flat >= 0], minlength=len(self._counts))
        self._counts += own
        if len(flat):
            self._shard_bits.append(entropy(own))
        first, last = self._starts[shard_id : shard_id + 2]
        begin, end = np.searchsorted(self._wanted, [first, last])
        rows = self._wanted[begin:end] - first
        lengths = np.diff(ends)[rows]
        self._kept.append(_gather(flat, ends, rows))
        self._kept_lengths.append(lengths)

    def describe(self) -> dict[str, Any]:
        """Give classes and entropies."""
        order = np.argsort(self._counts, kind="stable")
        names, counts = self.column.names, self._counts
        return {
            "multi": self.column.multi,
            "num_classes": len(names),
            "num_labels": int(counts.sum()),
            "unlabelled": self._unlabelled,
            "empty": int((counts == 0).sum()),
            "min": int(counts.min(initial=0)),
            "median": float(np.median(counts)) if len(counts) else 0.0,
            "max": int(counts.max(initial=0)),
            "smallest": {names[at]: int(counts[at]) for at in order[:SHOWN]},
            "largest": {names[at]: int(counts[at]) for at in order[::-1][:SHOWN]},
            "counts": counts.tolist(),
            "entropy": self._entropies(),
        }

    def _entropies(self) -> dict[str, float]:
        """Give the mean entropies, bits, each beside that of as many labels drawn at random."""
        num_labels = int(self._counts.sum())
        if not num_labels:
            return {}
        flat = np.concatenate(self._kept)
        ends = np.concatenate([[0], np.cumsum(np.concatenate(self._kept_lengths))])

        def mean_bits(batches: list[Int64]) -> float:
            rows = (np.searchsorted(self._wanted, samples) for samples in batches)
            return float(np.mean([self._bits(_gather(flat, ends, own)) for own in rows]))

        a_sample = num_labels / int(self._starts[-1])
        a_shard = num_labels / max(1, len(self._shard_bits))
        return {
            "batch": self.batch,
            "shard": float(np.mean(self._shard_bits)),
            "shard_at_random": self._expected(round(a_shard), DRAWN_SHARDS),
            "batch_as_stored": mean_bits(self._stored),
            "batch_in_training": mean_bits(self._trained),
            "batch_at_random": self._expected(round(a_sample * self.batch), DRAWN_BATCHES),
        }

    def _bits(self, labels: Int64) -> float:
        return entropy(np.bincount(labels[labels >= 0], minlength=len(self._counts)))

    def _expected(self, count: int, draws: int) -> float:
        rng = np.random.default_rng(0)
        total = int(self._counts.sum())
        if total >= MAX_WITHOUT_REPLACEMENT:
            drawn = rng.multinomial(count, self._counts / total, draws)
        else:
            drawn = rng.multivariate_hypergeometric(
                self._counts, min(count, total), draws, method="marginals"
            )
        return float(np.mean([entropy(own) for own in drawn]))


def _flat(values: pa.ChunkedArray) -> tuple[Int64, Int64]:
    """Give all labels of a column end to end, and where those of each sample end."""
    if pa.types.is_list(values.type):
        lists = values.combine_chunks()
        lists = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) else lists
        ends = lists.offsets.to_numpy().astype(np.int64)
        return lists.values.to_numpy()[ends[0] : ends[-1]], ends - ends[0]
    flat = values.to_numpy()
    return flat, np.arange(len(flat) + 1)


def _gather(flat: Int64, ends: Int64, rows: Int64) -> Int64:
    """Give the labels of some samples end to end."""
    lengths = ends[rows + 1] - ends[rows]
    first = np.repeat(ends[rows] - np.concatenate([[0], np.cumsum(lengths)[:-1]]), lengths)
    return flat[first + np.arange(len(first))]


def entropy(counts: npt.NDArray[Any]) -> float:
    """Entropy of labels by their counts, bits."""
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(abs((shares * np.log2(shares)).sum()))


@dataclass
class Doubles:
    """Samples that hold the same bytes, found in bounded memory.

    Args:
        held_rows: Hashes to hold in memory.
    """

    held_rows: int = HELD_ROWS
    _num_samples: int = 0
    _sort: KeyedSort = field(init=False)

    def __post_init__(self) -> None:
        schema = pa.schema([(HIGH, pa.uint64()), (LOW, pa.uint64())])
        self._sort = KeyedSort(schema, self.held_rows)

    def add(self, hashes: npt.NDArray[np.uint64]) -> None:
        """Take the hashes of a shard; shards come in their order."""
        numbers = np.arange(len(hashes), dtype=np.uint64) + np.uint64(self._num_samples)
        self._sort.add(pa.table([pa.array(hashes), pa.array(numbers)], names=[HIGH, LOW]))
        self._num_samples += len(hashes)

    def describe(self) -> tuple[dict[str, int], list[tuple[int, list[int]]]]:
        """Give the counts; of the largest groups the size and the numbers of some samples."""
        images = spare = 0
        largest: list[tuple[int, list[int]]] = []
        for count, group in self._groups():
            images += 1
            spare += count - 1
            largest = sorted([*largest, (count, group)], key=lambda own: (-own[0], own[1]))[:SHOWN]
        counts = {"images_stored_more_than_once": images, "samples_to_spare": spare}
        return counts, largest

    def _groups(self) -> Iterator[tuple[int, list[int]]]:
        """Give the size of every group, and its first samples."""
        for rows in self._sort:
            hashes, numbers = rows[HIGH].to_numpy(), rows[LOW].to_numpy()
            starts = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]]))
            ends = np.append(starts[1:], len(hashes))
            for at in np.flatnonzero(ends - starts > 1):
                first, last = int(starts[at]), int(ends[at])
                yield last - first, numbers[first : min(last, first + SHOWN)].tolist()
