"""Proof that an epoch fed every sample exactly once, and the digest of a batch.

The proof is a count and a sum of key hashes modulo 2^64: both add up over ranks and restarts, and
a sample that is missing, doubled or exchanged changes at least one of them. A sample in quarantine
is accounted for under its own key, in a count and a sum apart: what was fed and what was replaced
together make the dataset, whenever the damage was found.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from vitscale.data.manifest import Manifest
from vitscale.data.order import Order


def hash_key(key: str) -> int:
    """Return xxh64 of a key's UTF-8 bytes, as the manifest sums it up.

    Args:
        key: The sample's key.

    Returns:
        The hash, 0 .. 2^64 - 1.
    """
    return xxhash.xxh64_intdigest(key.encode())


def batch_digest(key_hashes: NDArray[np.int64]) -> str:
    """Name the content and order of a global batch.

    Args:
        key_hashes: Key hashes of the whole global batch in slot order, as int64 or uint64.

    Returns:
        xxh64 over the hashes as 8 little-endian bytes each: 16 hexadecimal digits.
    """
    unsigned = np.asarray(key_hashes).astype(np.int64, copy=False).view(np.uint64)
    return xxhash.xxh64_hexdigest(unsigned.astype("<u8").tobytes())


class EpochAudit:
    """Count and sum the keys that were fed and those that were replaced, epoch by epoch.

    Each rank adds what it consumed; `totals` of all ranks are added up (an all-reduce of int64,
    which wraps around as the sums should) and judged by `verdict`. Between two steps the epochs
    below `order.epoch_at(seen_examples)` are complete and that one alone is begun: its added-up
    totals belong in a checkpoint; after a restart, one rank loads them, the others begin empty.

    Args:
        num_examples: Samples that one epoch must feed or replace.
        keys_sum64: Sum of their key hashes modulo 2^64; None: not known, only the count is judged.
    """

    # Fed: count, sum of hashes; replaced: count, sum of hashes of the keys that should have been.
    COLUMNS = 4

    def __init__(self, num_examples: int, keys_sum64: int | None) -> None:
        self.num_examples = num_examples
        self.keys_sum64 = keys_sum64
        self._epochs: dict[int, NDArray[np.uint64]] = {}

    @classmethod
    def expecting(cls, manifest: Manifest, order: Order) -> "EpochAudit":
        """Expect what a manifest promises.

        Args:
            manifest: The dataset.
            order: Its order. With tail = "drop" another handful is left out every epoch, so only
                the count can be judged.

        Returns:
            An empty audit.
        """
        whole = order.usable == manifest.num_samples
        return cls(order.usable, manifest.keys_sum64 if whole else None)

    def add(
        self,
        epochs: NDArray[np.int64],
        key_hashes: NDArray[np.int64],
        substitutes: NDArray[np.bool_],
        replaced: NDArray[np.int64],
    ) -> None:
        """Add examples that the model consumed.

        Args:
            epochs: Epoch of each example.
            key_hashes: Hash of each example's key, as int64.
            substitutes: True where the example stood in for a bad sample: not counted as fed.
            replaced: There, the hash of the bad sample's key.
        """
        epochs, stands_in = np.asarray(epochs), np.asarray(substitutes)
        fed = np.asarray(key_hashes).astype(np.int64, copy=False).view(np.uint64)
        due = np.asarray(replaced).astype(np.int64, copy=False).view(np.uint64)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            plain, other = mine & ~stands_in, mine & stands_in
            row = self._epochs.setdefault(int(epoch), np.zeros(self.COLUMNS, dtype=np.uint64))
            sums = fed[plain].sum(dtype=np.uint64), due[other].sum(dtype=np.uint64)
            row += np.array([plain.sum(), sums[0], other.sum(), sums[1]], dtype=np.uint64)

    def totals(self, epochs: Sequence[int]) -> NDArray[np.int64]:
        """Give this rank's part of some epochs.

        Args:
            epochs: The epochs, the same on all ranks; those this rank never met give zeros.

        Returns:
            Counts and sums by [epoch, COLUMNS]; the sums as signed values that wrap around.
        """
        nothing = np.zeros(self.COLUMNS, dtype=np.uint64)
        rows = [self._epochs.get(epoch, nothing) for epoch in epochs]
        return np.array(rows, dtype=np.uint64).reshape(-1, self.COLUMNS).view(np.int64)

    def load(self, totals: Mapping[int, Sequence[int]]) -> None:
        """Go on from saved totals of all ranks; call on one rank only.

        Args:
            totals: Counts and sums of each epoch that was not complete, signed or unsigned.
        """
        for epoch, values in totals.items():
            self._epochs[int(epoch)] = np.array([value % 2**64 for value in values], np.uint64)

    def verdict(self, totals: Sequence[int] | NDArray[np.int64]) -> str | None:
        """Judge a complete epoch.

        Args:
            totals: Counts and sums over all ranks.

        Returns:
            None when every sample was fed exactly once or is in quarantine, or else a sentence that
            says what differs.
        """
        fed, fed_sum, replaced, replaced_sum = (int(value) for value in totals)
        kept = f" and {replaced} in quarantine" if replaced else ""
        if fed + replaced != self.num_examples:
            return f"{fed} examples were fed{kept}, {self.num_examples} were due"
        total = (fed_sum + replaced_sum) % 2**64
        if self.keys_sum64 is not None and total != self.keys_sum64:
            return (
                f"the keys of {fed} examples{kept} sum up to {total:016x}, those of the dataset to "
                f"{self.keys_sum64:016x}: some were fed twice and others not"
            )
        return None

    def close(self, epochs: Sequence[int]) -> None:
        """Forget epochs that were judged.

        Args:
            epochs: Those epochs; the ones this rank never met are ignored.
        """
        for epoch in epochs:
            self._epochs.pop(epoch, None)
