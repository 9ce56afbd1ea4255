"""Finds close hashes among many without comparing all pairs.

A hash is cut into bands. Two hashes that differ in few bits differ in fewer in at least one band,
so only those need a look that share a band but for so many bits: multi-index hashing (Norouzi et
al., arXiv:1307.2982). Nothing is missed. How many bands are best depends on the bits and on how
many hashes there are; where no banding pays, all pairs are compared by the same code.
"""

from collections.abc import Callable, Iterator
from itertools import combinations
from math import comb
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from data_prep.fingerprint import Fingerprints, colour_steps, mirrored

# Wider bands would need tables that are larger than the hashes.
MAX_BAND_BITS = 22
# Pairs and rows that are looked at in one go: some 200 MB.
CHUNK_PAIRS, CHUNK_ROWS = 1 << 21, 1 << 16
# Few bits of the perceptual hash are not enough: outlines are often alike. The difference hash may
# differ in so many times as many bits, and the colours by so many steps (benchmarks/dedup.py).
DHASH_FACTOR, COLOUR_STEPS = 2, 2
_POSITION_BITS, _NONE = 48, np.int64(2**63 - 1)


class Pairs(NamedTuple):
    """Pairs of rows; three arrays of one length."""

    row: npt.NDArray[np.int64]
    # position among the others
    other: npt.NDArray[np.int64]
    # differing bits of 64
    distance: npt.NDArray[np.uint8]

    def where(self, kept: npt.NDArray[np.bool_]) -> "Pairs":
        """Give some of the pairs."""
        return Pairs(self.row[kept], self.other[kept], self.distance[kept])


class _Band(NamedTuple):
    """Where the hashes are that have a value in some of their bits."""

    shift: int
    width: int
    # value -> range in `order`
    starts: npt.NDArray[np.int64]
    # positions of hashes
    order: npt.NDArray[np.uint32]
    # bit patterns in which a value may differ
    patterns: list[int]


class NearIndex:
    """The hashes of a set, of all its pictures and of their mirror images, ready to be searched.

    Equal hashes are held once: a thousand blank pages cost no more than one. Takes some 100
    bytes a picture.

    Args:
        others: The set.
        bits: Most differing bits of a match, 0 to 64.
        chunk_rows: Rows that are looked up in one go.
        chunk_pairs: Pairs that are compared in one go.
    """

    def __init__(
        self,
        others: Fingerprints,
        bits: int,
        *,
        chunk_rows: int = CHUNK_ROWS,
        chunk_pairs: int = CHUNK_PAIRS,
    ) -> None:
        self._bits, self._chunk_rows, self._chunk_pairs = bits, chunk_rows, chunk_pairs
        rows = np.tile(np.arange(len(others.phash)), 2)
        phash, dhash = others.phash.T.ravel(), others.dhash.T.ravel()
        kept = ~is_flat(phash, dhash)
        codes = np.column_stack(
            [phash, dhash, np.concatenate([others.colours, mirrored(others.colours)])]
        )
        order = np.flatnonzero(kept)[np.lexsort((rows[kept], *codes[kept].T))]
        rows, codes = rows[order], codes[order]
        new = np.ones(len(rows), np.bool_)
        new[1:] = (codes[1:] != codes[:-1]).any(axis=1)
        self._first = rows[new]
        self._phash, self._dhash, self._colours = np.ascontiguousarray(codes[new].T)
        same = self._first[np.cumsum(new) - 1]
        self._same = Pairs(rows, same, np.zeros(len(rows), np.uint8)).where(rows != same)
        self._bands = _cut(self._phash, bits)

    def same(self) -> Pairs:
        """Give pairs within the set whose hashes are equal: every one with the first such."""
        return self._same

    def search(
        self, own: Fingerprints, done: Callable[[int], object] | None = None
    ) -> Iterator[Pairs]:
        """Find all close pairs; `Pairs` come in pieces, a pair more than once.

        Of pictures of the set with equal hashes only the first is named.

        Args:
            own: Whose pictures to look up.
            done: Told of so many more rows that are finished.
        """
        for top in range(0, len(own), self._chunk_rows):
            part = own.part(top, top + self._chunk_rows)
            rows = top + np.flatnonzero(~is_flat(part.phash[:, 0], part.dhash[:, 0]))
            phash = own.phash[rows, 0]
            for band in self._bands:
                values = (phash >> np.uint64(band.shift)) & np.uint64((1 << band.width) - 1)
                for pattern in band.patterns:
                    wanted = values.astype(np.int64) ^ pattern
                    for at, codes in _candidates(band, wanted, self._chunk_pairs):
                        found = self._compared(own, rows[at], codes)
                        if len(found.row):
                            yield found
            if done is not None:
                done(len(part))

    def closest(self, own: Fingerprints) -> Pairs:
        """Find for every row the closest of the set, the first of several, if there is one."""
        # Distance above position: the least of these numbers names the closest and first one.
        best = np.full(len(own.phash), _NONE)
        for pairs in self.search(own):
            found = pairs.distance.astype(np.int64) << _POSITION_BITS | pairs.other
            np.minimum.at(best, pairs.row, found)
        rows = np.flatnonzero(best != _NONE)
        others, distances = best[rows] & (1 << _POSITION_BITS) - 1, best[rows] >> _POSITION_BITS
        return Pairs(rows, others, distances.astype(np.uint8))

    def _compared(
        self, own: Fingerprints, rows: npt.NDArray[np.int64], codes: npt.NDArray[np.uint32]
    ) -> Pairs:
        distances = np.bitwise_count(own.phash[rows, 0] ^ self._phash[codes])
        near = distances <= self._bits
        rows, codes, distances = rows[near], codes[near], distances[near]
        second = np.bitwise_count(own.dhash[rows, 0] ^ self._dhash[codes])
        kept = second <= DHASH_FACTOR * self._bits
        rows, codes, distances = rows[kept], codes[kept], distances[kept]
        kept = colour_steps(own.colours[rows], self._colours[codes]) <= COLOUR_STEPS
        return Pairs(rows[kept], self._first[codes[kept]], distances[kept])


def is_flat(phash: npt.NDArray[np.uint64], dhash: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Say which hashes are of one colour all over: they are alike whatever the colour."""
    return (dhash == 0) & (np.bitwise_count(phash) <= 1)


class ExactIndex:
    """The pixel hashes of a set, ready to be searched.

    Args:
        pixels: (n, 2) halves of the hashes.
    """

    def __init__(self, pixels: npt.NDArray[np.uint64]) -> None:
        # Of equal ones the first comes first.
        self._order = np.argsort(pixels[:, 0], kind="stable")
        self._sorted = pixels[self._order]

    def search(self, own: npt.NDArray[np.uint64]) -> Pairs:
        """Find for every row the first one that is equal, if there is one."""
        if not len(self._order):
            return Pairs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint8))
        at = np.searchsorted(self._sorted[:, 0], own[:, 0])
        at = np.minimum(at, len(self._order) - 1)
        rows = np.flatnonzero((self._sorted[at] == own).all(axis=1))
        return Pairs(rows, self._order[at[rows]], np.zeros(len(rows), np.uint8))


def _plan(bits: int, count: int) -> int:
    """Choose the number of bands for the least work a search; 0: compare with everything."""
    costs = {0: float(count)}
    for number in range(1, bits + 2):
        width = _width(number)
        patterns = sum(comb(width, flips) for flips in range(bits // number + 1))
        costs[number] = number * patterns * (1 + count / 2**width)
    return min(costs, key=lambda number: costs[number])


def _width(number: int) -> int:
    # They need not cover all bits: of `number` bands that do not overlap one has few differences.
    return min(64 // number, MAX_BAND_BITS)


def _cut(hashes: npt.NDArray[np.uint64], bits: int) -> list[_Band]:
    number = _plan(bits, len(hashes))
    if number == 0:
        return [_band(hashes, 0, 0, 0)]
    width = _width(number)
    return [_band(hashes, at * width, width, bits // number) for at in range(number)]


def _band(hashes: npt.NDArray[np.uint64], shift: int, width: int, flips: int) -> _Band:
    values = ((hashes >> np.uint64(shift)) & np.uint64((1 << width) - 1)).astype(np.int64)
    starts = np.zeros((1 << width) + 1, np.int64)
    np.cumsum(np.bincount(values, minlength=1 << width), out=starts[1:])
    patterns = [
        sum(1 << bit for bit in chosen)
        for count in range(flips + 1)
        for chosen in combinations(range(width), count)
    ]
    return _Band(
        shift, width, starts, np.argsort(values, kind="stable").astype(np.uint32), patterns
    )


def _candidates(
    band: _Band, values: npt.NDArray[np.int64], chunk_pairs: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]]:
    """Give (positions in values, positions of hashes) of pairs that share a value, in pieces."""
    firsts = band.starts[values]
    counts = band.starts[values + 1] - firsts
    hit = np.flatnonzero(counts)
    ends = np.cumsum(counts[hit])
    total, done = int(ends[-1]) if len(ends) else 0, 0
    starts = ends - counts[hit]
    while done < total:
        # A piece may begin and end in the midst of a row's candidates.
        numbers = np.arange(done, min(done + chunk_pairs, total))
        low = int(np.searchsorted(ends, done, side="right"))
        high = int(np.searchsorted(ends, numbers[-1], side="right")) + 1
        inside = np.minimum(ends[low:high], numbers[-1] + 1) - np.maximum(starts[low:high], done)
        which = np.repeat(np.arange(low, high), inside)
        places = firsts[hit[which]] + (numbers - starts[which])
        yield hit[which], band.order[places]
        done += len(numbers)
