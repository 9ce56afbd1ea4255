"""Which sample fills which slot of which step: a pure function, by arithmetic on integers.

Slot j of step k is position p = k * global_batch + j. With `usable` samples an epoch and C lanes,
epoch = p div usable, q = p mod usable, lane = q mod C, place in the lane = q div C. An epoch's
shards, in a keyed order of that epoch, are laid end to end and cut into C stretches, one a lane,
of exactly the lengths that this arithmetic visits: every sample is met once an epoch by
construction. Inside a lane, each run of `shuffle_block` shards is one window, and the places of a
window are permuted by a key of (seed, epoch, lane, window); so a lane never reads from more than
`shuffle_block` shards at a time.

Ranks, nodes, workers and micro-batches are not arguments here: they only choose which slots they
look at. Nothing is materialised but one table of the shards for the current epochs.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vitscale.config.errors import DataError, UserError
from vitscale.data.windows import EpochTable

# Most lanes that are taken without being asked for: whole lanes for up to 64 nodes.
DEFAULT_LANES = 64
# A batch can lie across two epochs, and prefetching can already be in the one after.
_CACHED_EPOCHS = 3
# Candidates for a substitute that are looked up at once.
_REPLACEMENTS = 64
# Version of what `state` gives.
STATE_VERSION = 2

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Located:
    """Where the samples of some positions are; arrays of one length."""

    epoch: Int64
    # Ordinal of the shard in the manifest.
    shard_id: Int64
    # Ordinal of the sample inside its shard.
    index: Int64
    # Ordinal of the sample in the dataset: samples of all earlier shards + index.
    sample_index: Int64
    # True where the sample of the position is in quarantine.
    substitute: NDArray[np.bool_]


def default_lanes(global_batch: int, num_shards: int | None = None) -> int:
    """Choose the number of lanes for a run that did not ask for one.

    Args:
        global_batch: Examples of one step; the lanes must divide it.
        num_shards: Shards with samples. A dataset with fewer shards than lanes would be cut inside
            its shards, the same way every epoch, so it gets no more lanes than shards.

    Returns:
        The largest divisor of global_batch that is at most 64 and at most num_shards.
    """
    most = min(DEFAULT_LANES, global_batch, max(num_shards or DEFAULT_LANES, 1))
    return next(lanes for lanes in range(most, 0, -1) if global_batch % lanes == 0)


class Order:
    """The order of training examples.

    Args:
        shard_sizes: Samples of each shard, by shard_id; empty shards are allowed.
        seed: Seed of the run.
        global_batch: Examples of one step over all ranks.
        lanes: Canonical lanes, a divisor of global_batch; None: `default_lanes`.
        shuffle_block: Shards within which samples are shuffled, at least 1.
        tail: "carry": a batch goes on into the next epoch. "drop": an epoch is cut down to whole
            batches; what is left out lies in the last window of the last lane and so is another
            random handful every epoch.
        quarantine: sample_index of the samples that must not be fed.
        dataset_digest: Names the samples and their shards (`order_digest`), kept in the state.

    Raises:
        UserError: The values contradict each other.
    """

    def __init__(
        self,
        shard_sizes: Sequence[int] | Int64,
        seed: int,
        global_batch: int,
        lanes: int | None = None,
        shuffle_block: int = 16,
        tail: Literal["carry", "drop"] = "carry",
        quarantine: Collection[int] = frozenset(),
        dataset_digest: str = "",
    ) -> None:
        sizes = np.asarray(shard_sizes, dtype=np.int64)
        self.num_samples = int(sizes.sum())
        if lanes is None:
            lanes = default_lanes(global_batch, int(np.count_nonzero(sizes)))
        self.seed, self.global_batch, self.lanes = seed, global_batch, lanes
        self.shuffle_block, self.tail, self.dataset_digest = shuffle_block, tail, dataset_digest
        self._check(sizes)
        whole = self.num_samples // global_batch * global_batch
        # Samples fed in one epoch; the length of an epoch in positions.
        self.usable = whole if tail == "drop" else self.num_samples
        self._sizes = sizes
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self._quarantine = np.unique(np.fromiter(quarantine, dtype=np.int64))
        self._epochs: OrderedDict[int, EpochTable] = OrderedDict()

    def _check(self, sizes: Int64) -> None:
        problems = []
        if self.num_samples == 0 or sizes.min() < 0:
            problems.append(f"the dataset has {self.num_samples} samples; at least one is needed")
        if self.global_batch < 1 or self.lanes < 1 or self.shuffle_block < 1:
            problems.append(
                f"global_batch = {self.global_batch}, lanes = {self.lanes} and shuffle_block = "
                f"{self.shuffle_block} must all be at least 1"
            )
        elif self.global_batch % self.lanes:
            problems.append(
                f"lanes = {self.lanes} must divide global_batch = {self.global_batch}; "
                f"{default_lanes(self.global_batch)} does"
            )
        if self.tail not in ("carry", "drop"):
            problems.append(f'tail = "{self.tail}" is neither "carry" nor "drop"')
        if self.tail == "drop" and self.num_samples < self.global_batch:
            problems.append(
                f'tail = "drop" leaves nothing of {self.num_samples} samples with global_batch = '
                f'{self.global_batch}; use tail = "carry" or a smaller batch'
            )
        if problems:
            raise UserError("; ".join(problems))

    # Datasets; a mixture has several.
    num_sources = 1

    @property
    def num_shards(self) -> int:
        """Shards, empty ones too."""
        return len(self._starts) - 1

    @property
    def shard_sizes(self) -> Int64:
        """Samples of each shard."""
        return np.diff(self._starts)

    @property
    def steps_per_epoch(self) -> float:
        """Steps in which one epoch is fed; not whole where batches carry over."""
        return self.usable / self.global_batch

    @property
    def quarantine_digest(self) -> str:
        """SHA-256 over the quarantined ordinals, sorted, as 8 little-endian bytes each."""
        return hashlib.sha256(self._quarantine.astype("<i8").tobytes()).hexdigest()

    def epoch_at(self, seen_examples: int) -> int:
        """Return the epoch of the next example; smaller epochs are complete.

        Args:
            seen_examples: Examples consumed since step 0.

        Returns:
            Its epoch, from 0.
        """
        return seen_examples // self.usable

    def open_epochs(self, seen_examples: int) -> list[range]:
        """Give, for each dataset, the epochs that are begun and not complete; earlier ones are.

        Args:
            seen_examples: Examples consumed since step 0.

        Returns:
            Of this one dataset the one epoch of the next example.
        """
        epoch = self.epoch_at(seen_examples)
        return [range(epoch, epoch + 1)]

    def source_of(self, positions: Int64) -> Int64:
        """Give the dataset that fills each position: 0, there is one."""
        return np.zeros(len(positions), dtype=np.int64)

    def step_positions(self, step: int) -> Int64:
        """Return the positions of the batch that follows `step` completed updates.

        Args:
            step: Completed updates before this batch.

        Returns:
            One position a slot of the global batch.
        """
        return np.arange(self.global_batch, dtype=np.int64) + step * self.global_batch

    def rank_slots(self, rank: int, world_size: int) -> Int64:
        """Return the slots of the global batch that one rank computes.

        Slots of one residue modulo `lanes` follow one lane through an epoch, so ranks get whole
        residues, neighbouring ranks (a node) neighbouring ones; residues are split only where
        there are more ranks than lanes or the numbers do not divide.

        Args:
            rank: This process.
            world_size: All processes.

        Returns:
            global_batch / world_size slots, ascending.

        Raises:
            UserError: world_size does not divide global_batch.
        """
        if self.global_batch % world_size:
            raise UserError(
                f"global_batch = {self.global_batch} cannot be shared evenly by {world_size} ranks;"
                " change one of them so that the number of ranks divides the batch"
            )
        count = self.global_batch // world_size
        by_lane = np.arange(self.global_batch, dtype=np.int64).reshape(-1, self.lanes).T.reshape(-1)
        return np.sort(by_lane[rank * count : (rank + 1) * count])

    def quarantine(self, samples: Collection[int]) -> None:
        """Keep more samples from being fed, at every position from now on.

        Args:
            samples: Their sample_index.
        """
        more = np.fromiter(samples, dtype=np.int64)
        self._quarantine = np.union1d(self._quarantine, more)

    def samples(self, positions: Int64) -> Located:
        """Find the samples that are fed at some positions, wherever these are.

        Args:
            positions: Any positions, 0 or more, in any order.

        Returns:
            Their samples, elementwise; substitutes in the place of those in quarantine.

        Raises:
            DataError: All samples of a window that is asked for are in quarantine.
        """
        found = self.places(positions)
        for i in np.flatnonzero(found.substitute):
            shard_id, index = next(self.replacements(int(positions[i])))
            found.shard_id[i], found.index[i] = shard_id, index
            found.sample_index[i] = self._starts[shard_id] + index
        return found

    def places(self, positions: Int64) -> Located:
        """Find the samples that belong to some positions; the cost does not depend on where.

        Args:
            positions: Any positions, 0 or more, in any order.

        Returns:
            Their samples, elementwise; `substitute` marks those that are in quarantine.
        """
        positions = np.asarray(positions, dtype=np.int64)
        epochs, q = np.divmod(positions, self.usable)
        shard_id, index = np.empty_like(q), np.empty_like(q)
        for epoch in np.unique(epochs):
            mine = np.flatnonzero(epochs == epoch)
            table = self._epoch(int(epoch))
            shard_id[mine], index[mine] = table.at(*table.windows(q[mine]))
        sample_index = self._starts[shard_id] + index
        bad = np.isin(sample_index, self._quarantine)
        return Located(epochs, shard_id, index, sample_index, bad)

    def replacements(self, position: int) -> Iterator[tuple[int, int]]:
        """Give what may stand in for the sample of a position: the others of its window, in turn.

        Which one is taken does not depend on who asks, nor on which of the samples that cannot be
        read are known already: whoever tries them in this order meets the same first sound one.

        Args:
            position: The position.

        Yields:
            shard_id and index of samples that are not in quarantine.

        Raises:
            DataError: There is none left.
        """
        epoch, q = divmod(position, self.usable)
        table = self._epoch(epoch)
        window, within = table.windows(np.array([q], dtype=np.int64))
        size = int(window.size[0])
        for start in range(1, size, _REPLACEMENTS):
            count = min(_REPLACEMENTS, size - start)
            others = (within + np.arange(start, start + count, dtype=np.int64)) % size
            shard_id, index = table.at(window.repeated(0, count), others)
            good = ~np.isin(self._starts[shard_id] + index, self._quarantine)
            yield from zip(shard_id[good].tolist(), index[good].tolist(), strict=True)
        shards = self.shards_around(position)
        raise DataError(
            f"all {size} samples of a shuffle window are in quarantine or damaged, shard_id "
            f"{shards}; repair the dataset or raise data.shuffle_block = {self.shuffle_block}"
        )

    def shards_around(self, position: int) -> list[int]:
        """Give the shards of a position's window, for messages."""
        epoch, q = divmod(position, self.usable)
        table = self._epoch(epoch)
        window, _ = table.windows(np.array([q], dtype=np.int64))
        first, last = int(window.start[0]), int(window.start[0] + window.size[0] - 1)
        ends = np.searchsorted(table.starts, [first, last], side="right") - 1
        return sorted(int(shard) for shard in table.shards[ends[0] : ends[1] + 1])

    def _epoch(self, epoch: int) -> EpochTable:
        if epoch in self._epochs:
            self._epochs.move_to_end(epoch)
            return self._epochs[epoch]
        table = EpochTable(
            self._sizes, self.seed, epoch, self.usable, self.lanes, self.shuffle_block
        )
        self._epochs[epoch] = table
        if len(self._epochs) > _CACHED_EPOCHS:
            self._epochs.popitem(last=False)
        return table

    def state(self, seen_examples: int) -> dict[str, Any]:
        """Describe the order and how far the model has consumed it, for a checkpoint.

        Args:
            seen_examples: Examples consumed since step 0.

        Returns:
            Plain values, equal on all ranks.
        """
        return {
            "version": STATE_VERSION,
            "seen_examples": seen_examples,
            "epoch": self.epoch_at(seen_examples),
            "dataset_digest": self.dataset_digest,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "global_batch": self.global_batch,
            "lanes": self.lanes,
            "shuffle_block": self.shuffle_block,
            "tail": self.tail,
            "quarantine_digest": self.quarantine_digest,
        }

    def check_state(self, saved: dict[str, Any]) -> None:
        """Refuse to go on from the state of another order.

        Args:
            saved: What `state` gave when the checkpoint was written.

        Raises:
            UserError: Values that make the batches differ; names each with both values.
        """
        now = self.state(0)
        if saved.get("version") != STATE_VERSION:
            raise UserError(
                f"the data order of the checkpoint has version {saved.get('version', 1)}, this "
                f"vitscale writes and reads version {STATE_VERSION}; go on with the release that "
                "wrote it, or start anew from its weights (--init)"
            )
        wrong = [
            f"{name}: the checkpoint has {saved.get(name)!r}, this run {now[name]!r}"
            for name in now
            if name not in ("seen_examples", "epoch") and saved.get(name) != now[name]
        ]
        if wrong:
            raise UserError(
                "the data order of the checkpoint cannot be continued: "
                + "; ".join(wrong)
                + ". Give the values of the checkpoint, or start anew from its weights (--init)"
            )


def eval_slots(num_samples: int, rank: int, world_size: int, micro_batch: int) -> Int64:
    """Share out the samples of an evaluation: each once, and as many steps on every rank.

    Args:
        num_samples: Samples of the dataset.
        rank: This process.
        world_size: All processes.
        micro_batch: Samples of one rank in one step.

    Returns:
        sample_index by [step, place]; -1 is padding that must not be counted. Ranks take
        neighbouring stretches, so each reads its own shards.
    """
    steps = -(-num_samples // (world_size * micro_batch))
    slots = np.full(steps * micro_batch, -1, dtype=np.int64)
    share, rest = divmod(num_samples, world_size)
    start = rank * share + min(rank, rest)
    mine = np.arange(start, start + share + (rank < rest), dtype=np.int64)
    slots[: len(mine)] = mine
    return slots.reshape(steps, micro_batch)
