"""Several datasets in one order: which of them fills which slot is arithmetic on the position.

Every lane runs through a cycle of CYCLE places that gives each dataset its share to the place, as
evenly as whole places allow; lanes begin at different places of the cycle, so that every batch has
the shares as well. The n-th place of a lane that a dataset fills takes the n-th place of the same
lane of that dataset's own order: its own epochs, each sample once in each.

To the rest of the program a mixture is one order over the shards of all datasets, laid one after
the other. Weights may change in the middle of a run: the places from there on follow another cycle,
and every dataset goes on where it was.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitscale.config.errors import UserError
from vitscale.data.order import STATE_VERSION, Located, Order

# Places of a lane in which the shares are exact; a weight is rounded to 1 / CYCLE.
CYCLE = 1 << 16

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Source:
    """One dataset of a mixture.

    Args:
        name: Its name in messages and states.
        order: Its own order, with the lanes of the mixture.
        weight: Its share of the examples; only the ratio to the other weights counts.
    """

    name: str
    order: Order
    weight: float


def cycle_counts(weights: Sequence[float]) -> Int64:
    """Share out the places of a cycle.

    Args:
        weights: Above 0; only their ratios count.

    Returns:
        Places of each, at least 1, CYCLE in all: the largest remainders are rounded up.
    """
    exact = np.asarray(weights, dtype=np.float64) / np.sum(weights) * CYCLE
    counts = np.maximum(np.floor(exact), 1).astype(np.int64)
    by_remainder = np.argsort(counts - exact, kind="stable")
    spare = int(CYCLE - counts.sum())
    for k in range(abs(spare)):
        at = by_remainder[k % len(counts)] if spare > 0 else int(counts.argmax())
        counts[at] += 1 if spare > 0 else -1
    return counts


class _Cycle:
    """Who fills the places of a cycle.

    Args:
        counts: Places of each source, CYCLE in all.
    """

    def __init__(self, counts: Int64) -> None:
        self.counts = counts
        # The n-th of c places is due at (n + 1/2) / c of the cycle: all in the order of that.
        due = np.concatenate([(np.arange(c) + 0.5) / c for c in counts])
        owners = np.repeat(np.arange(len(counts)), counts)
        self.source = owners[np.argsort(due, kind="stable")]
        # Places of each source before each place: [CYCLE + 1, sources].
        hits = (self.source[:, None] == np.arange(len(counts))).cumsum(axis=0)
        self.before = np.concatenate([np.zeros((1, len(counts)), np.int64), hits])

    def filled(self, start: Int64, count: Int64, source: Int64) -> Int64:
        """Count the places of a source among `count` places from place `start` of the cycle on."""
        return self._until(start + count, source) - self._until(start, source)

    def _until(self, place: Int64, source: Int64) -> Int64:
        rounds, rest = np.divmod(place, CYCLE)
        return rounds * self.counts[source] + self.before[rest, source]


@dataclass(frozen=True)
class _Segment:
    """A stretch of the run with the same weights."""

    # First place of every lane in it.
    first: int
    counts: list[int]
    cycle: _Cycle
    # Places that each source has filled before, by [source, lane].
    filled: Int64


class Mixture:
    """An order over the samples of several datasets; see `vitscale.data.order.Order`.

    Args:
        sources: The datasets, two or more; same global_batch and lanes.
        segments: (seen_examples, cycle counts) of the stretches of the run so far, from a
            checkpoint; empty: the weights of the sources from the beginning.

    Raises:
        UserError: A weight is not positive, or names repeat.
    """

    def __init__(
        self, sources: Sequence[Source], segments: Sequence[tuple[int, Sequence[int]]] = ()
    ) -> None:
        self.sources = list(sources)
        first = sources[0].order
        self.global_batch, self.lanes = first.global_batch, first.lanes
        self.shuffle_block, self.seed, self.tail = first.shuffle_block, first.seed, first.tail
        names = [source.name for source in sources]
        if len(set(names)) < len(names) or min(source.weight for source in sources) <= 0:
            raise UserError(
                f"the datasets of a mixture need different names and weights above 0: "
                f"{[(source.name, source.weight) for source in sources]}"
            )
        self.usable = sum(source.order.usable for source in sources)
        sizes = [source.order.num_samples for source in sources]
        self.num_samples = sum(sizes)
        self._sample_starts = np.concatenate([[0], np.cumsum(sizes)])
        shards = [source.order.num_shards for source in sources]
        self._shard_starts = np.concatenate([[0], np.cumsum(shards)])
        # Lanes begin at places that are spread over the cycle.
        self._phase = np.arange(self.lanes, dtype=np.int64) * CYCLE // self.lanes
        self._segments: list[_Segment] = []
        counts = cycle_counts([source.weight for source in sources]).tolist()
        for seen, own in segments or [(0, counts)]:
            self._append(seen, list(own))

    @property
    def num_sources(self) -> int:
        """Datasets."""
        return len(self.sources)

    @property
    def num_shards(self) -> int:
        """Shards of all datasets."""
        return int(self._shard_starts[-1])

    @property
    def shares(self) -> list[float]:
        """Share of the examples that each dataset has from the last stretch on; 1 in all."""
        return [count / CYCLE for count in self._segments[-1].counts]

    @property
    def steps_per_epoch(self) -> float:
        """Steps in which as many examples are fed as the datasets have together."""
        return self.usable / self.global_batch

    def _append(self, seen_examples: int, counts: list[int]) -> None:
        place = seen_examples // self.lanes
        filled = np.zeros((self.num_sources, self.lanes), dtype=np.int64)
        if self._segments:
            filled = self._filled_at(place)
        self._segments.append(_Segment(place, counts, _Cycle(np.asarray(counts, np.int64)), filled))

    def _filled_at(self, place: int) -> Int64:
        """Count the places that each source has filled in the first `place` ones of each lane."""
        segment = [s for s in self._segments if s.first <= place][-1]
        lanes = np.arange(self.lanes, dtype=np.int64)
        count = np.full(self.lanes, place - segment.first, dtype=np.int64)
        rows = [
            segment.cycle.filled(self._phase[lanes], count, np.full(self.lanes, k))
            for k in range(self.num_sources)
        ]
        return segment.filled + np.stack(rows)

    def epoch_at(self, seen_examples: int) -> int:
        """Return the number of times that as many examples were fed as there are samples."""
        return seen_examples // self.usable

    def step_positions(self, step: int) -> Int64:
        """Return the positions of the batch that follows `step` completed updates."""
        return self.sources[0].order.step_positions(step)

    def rank_slots(self, rank: int, world_size: int) -> Int64:
        """Return the slots of the global batch that one rank computes."""
        return self.sources[0].order.rank_slots(rank, world_size)

    def source_of(self, positions: Int64) -> Int64:
        """Give the dataset that fills each position, counted from 0."""
        return self._own(np.asarray(positions, dtype=np.int64))[0]

    def own_positions(self, seen_examples: int) -> list[int]:
        """Give for each dataset a position of its own order below which it has been read.

        Args:
            seen_examples: Examples consumed since step 0.
        """
        filled = self._filled_at(seen_examples // self.lanes)
        least: list[int] = (filled.min(axis=1) * self.lanes).tolist()
        return least

    def _own(self, positions: Int64) -> tuple[Int64, Int64]:
        """Give the source of each position, and the position in that source's own order."""
        place, lane = np.divmod(positions, self.lanes)
        firsts = np.array([segment.first for segment in self._segments])
        number = np.searchsorted(firsts, place, side="right") - 1
        source, own = np.empty_like(positions), np.empty_like(positions)
        for k in np.unique(number):
            mine = np.flatnonzero(number == k)
            segment, at = self._segments[k], lane[mine]
            count = place[mine] - segment.first
            who = segment.cycle.source[(self._phase[at] + count) % CYCLE]
            filled = segment.filled[who, at] + segment.cycle.filled(self._phase[at], count, who)
            source[mine], own[mine] = who, filled * self.lanes + at
        return source, own

    def places(self, positions: Int64) -> Located:
        """Find the samples that belong to some positions; see `Order.places`."""
        return self._located(np.asarray(positions, dtype=np.int64), "places")

    def samples(self, positions: Int64) -> Located:
        """Find the samples that are fed at some positions; see `Order.samples`."""
        return self._located(np.asarray(positions, dtype=np.int64), "samples")

    def _located(self, positions: Int64, what: str) -> Located:
        source, own = self._own(positions)
        columns = [np.empty_like(positions) for _ in range(4)]
        substitute = np.zeros(len(positions), dtype=bool)
        for k in np.unique(source):
            mine = np.flatnonzero(source == k)
            found: Located = getattr(self.sources[k].order, what)(own[mine])
            shard, start = self._shard_starts[k], self._sample_starts[k]
            values = found.epoch, found.shard_id + shard, found.index, found.sample_index + start
            for column, value in zip(columns, values, strict=True):
                column[mine] = value
            substitute[mine] = found.substitute
        epoch, shard_id, index, sample_index = columns
        return Located(epoch, shard_id, index, sample_index, substitute)

    def replacements(self, position: int) -> Iterator[tuple[int, int]]:
        """Give what may stand in for the sample of a position: others of its dataset's window."""
        source, own = self._own(np.array([position], dtype=np.int64))
        shard = int(self._shard_starts[source[0]])
        for shard_id, index in self.sources[source[0]].order.replacements(int(own[0])):
            yield shard_id + shard, index

    def quarantine(self, samples: Collection[int]) -> None:
        """Keep more samples from being fed, at every position from now on."""
        wanted = np.fromiter(samples, dtype=np.int64)
        for k, source in enumerate(self.sources):
            start, end = self._sample_starts[k], self._sample_starts[k + 1]
            source.order.quarantine((wanted[(wanted >= start) & (wanted < end)] - start).tolist())

    def open_epochs(self, seen_examples: int) -> list[range]:
        """Give the epochs of each dataset that are begun and not complete; earlier ones are."""
        filled = self._filled_at(seen_examples // self.lanes)
        following = filled * self.lanes + np.arange(self.lanes)
        return [
            range(int(row.min()) // source.order.usable, int(row.max()) // source.order.usable + 1)
            for source, row in zip(self.sources, following, strict=True)
        ]

    def state(self, seen_examples: int) -> dict[str, Any]:
        """Describe the mixture and how far the model has consumed it, for a checkpoint."""
        return {
            "version": STATE_VERSION,
            "seen_examples": seen_examples,
            "epoch": self.epoch_at(seen_examples),
            "sources": [[source.name, source.order.state(0)] for source in self.sources],
            "segments": [[s.first * self.lanes, s.counts] for s in self._segments],
        }

    def go_on_from(self, saved: dict[str, Any], *, may_change_weights: bool) -> None:
        """Take over the stretches of a checkpoint, and begin a new one where the weights differ.

        Args:
            saved: What `state` gave when the checkpoint was written.
            may_change_weights: Whether the user asked for it.

        Raises:
            UserError: The datasets differ, or the weights do and nobody asked for that.
        """
        self.check_state(saved)
        wished = self._segments[-1].counts
        self.follow(saved)
        before = self._segments[-1].counts
        if wished == before:
            return
        if not may_change_weights:
            shares = [
                ", ".join(
                    f"{source.name} {count / CYCLE:.4f}"
                    for source, count in zip(self.sources, counts, strict=True)
                )
                for counts in (before, wished)
            ]
            raise UserError(
                f"the weights of the datasets differ: the checkpoint has {shares[0]}; this run "
                f'{shares[1]}. Ask for the change by name: --set run.allow_change=["data.train'
                '.weight"], or give the weights of the checkpoint'
            )
        self._append(saved["seen_examples"], wished)

    def follow(self, saved: dict[str, Any]) -> None:
        """Take over the stretches of a saved state and nothing else."""
        self._segments = []
        for seen, counts in saved["segments"]:
            self._append(int(seen), list(counts))

    def check_state(self, saved: dict[str, Any]) -> None:
        """Refuse to go on from the state of another mixture.

        Raises:
            UserError: Values that make the batches differ; names each with both values.
        """
        names = [source.name for source in self.sources]
        there = [name for name, _ in saved.get("sources", [])]
        if there != names:
            what = str(there) if there else "a single dataset"
            raise UserError(
                f"the checkpoint was trained on {what}, this run mixes {names}: the same datasets "
                "are needed in the same order; or start anew from its weights (--init)"
            )
        for source, (_, own) in zip(self.sources, saved["sources"], strict=True):
            source.order.check_state(own)
