"""Samples that could not be read: what is known of each, and how many a run may meet.

A sample is bad for good: it was fetched twice, or its bytes are those of pack time and still no
picture. What the store cannot deliver at the moment is no verdict on a sample and ends the run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from vitscale.config.errors import DataError


@dataclass(frozen=True)
class BadSample:
    """A sample that was found to be damaged."""

    sample_index: int
    # Name of its shard in the dataset, and its key.
    shard: str
    key: str
    # xxh64 of the key, 0 .. 2^64 - 1
    key_hash: int
    # dataset, shard, key, offset and what is wrong
    message: str
    # where in the order of the run it was met, and in which epoch
    position: int
    epoch: int


class Quarantine:
    """The bad samples of a run, over all ranks.

    Args:
        max_total: Samples that may be lost over the whole run.
        max_in_a_row: Samples that may be lost one directly after the other in the order of the run.
    """

    def __init__(self, max_total: int, max_in_a_row: int) -> None:
        self.max_total, self.max_in_a_row = max_total, max_in_a_row
        self._samples: dict[int, BadSample] = {}

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def samples(self) -> list[BadSample]:
        """All of them, by sample_index."""
        return [self._samples[key] for key in sorted(self._samples)]

    def add(self, found: Iterable[BadSample]) -> list[BadSample]:
        """Take in what the ranks found.

        Args:
            found: Bad samples in any order; the same on all ranks.

        Returns:
            Those that were not known, by position.
        """
        new: dict[int, BadSample] = {}
        for bad in sorted(found, key=lambda one: (one.position, one.sample_index)):
            if bad.sample_index not in self._samples:
                new.setdefault(bad.sample_index, bad)
        self._samples.update(new)
        return list(new.values())

    def check(self) -> None:
        """Make sure that the run may go on.

        Raises:
            DataError: More samples are lost than allowed; names the latest.
        """
        if not self._samples:
            return
        latest = max(self._samples.values(), key=lambda bad: bad.position)
        row = longest_row([bad.position for bad in self._samples.values()])
        over = ""
        if len(self._samples) > self.max_total:
            over = f"{len(self._samples)} (data.max_bad_samples = {self.max_total})"
        elif row > self.max_in_a_row:
            over = f"{row} in a row (data.max_bad_in_a_row = {self.max_in_a_row})"
        if over:
            raise DataError(
                f"too many samples are damaged: {over}. The latest: {latest.message}. See "
                "quarantine.jsonl in the run folder; mend the dataset with `vitscale verify "
                "--repair`, or raise the limit and resume"
            )

    def state(self) -> list[dict[str, Any]]:
        """Describe the bad samples as plain values, for a checkpoint."""
        return [asdict(bad) for bad in self.samples]

    def load(self, state: Sequence[dict[str, Any]]) -> None:
        """Take over the bad samples of a checkpoint."""
        names = [field.name for field in fields(BadSample)]
        self.add(BadSample(**{name: row[name] for name in names}) for row in state)


def longest_row(positions: Sequence[int]) -> int:
    """Give the length of the longest run of neighbouring numbers."""
    longest = length = 0
    before = None
    for position in sorted(set(positions)):
        length = length + 1 if before is not None and position == before + 1 else 1
        longest, before = max(longest, length), position
    return longest
