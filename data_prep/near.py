"""Finds equal and close fingerprints, in bounded memory."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from data_prep.fingerprint import Fingerprints

# Rows and columns that are compared at a time: 32 MB of differences.
TILE_ROWS, TILE_COLUMNS = 256, 16_384


class Match(NamedTuple):
    """A pair."""

    row: int
    # position in the others
    other: int
    reason: str
    # 0, or differing bits of 64
    distance: float


def find_matches(own: Fingerprints, others: Fingerprints, bits: int | None) -> list[Match]:
    """Find for every row the best match among the others, if there is one.

    Args:
        own: n fingerprints.
        others: m fingerprints.
        bits: Most differing bits of a near match; None looks for equal pixels only.
    """
    found = {match.row: match for match in _near(own, others, bits)} if bits is not None else {}
    found |= {match.row: match for match in _equal(own.pixels, others.pixels)}
    return [found[row] for row in sorted(found)]


def find_pairs(all_of: Fingerprints, bits: int | None) -> list[Match]:
    """Find pairs within one set: every row with an earlier one that it matches, if there is one."""
    order = np.argsort(all_of.pixels, kind="stable")
    values = all_of.pixels[order]
    first = order[np.searchsorted(values, all_of.pixels)]
    found = {
        int(row): Match(int(row), int(first[row]), "exact", 0.0)
        for row in np.flatnonzero(first != np.arange(len(first)))
    }
    if bits is not None:
        for row, other, distance in _close(all_of, all_of, bits, earlier_only=True):
            found.setdefault(row, Match(row, other, "near", distance))
    return [found[row] for row in sorted(found)]


def _equal(own: npt.NDArray[np.uint64], others: npt.NDArray[np.uint64]) -> list[Match]:
    if not len(others):
        return []
    order = np.argsort(others, kind="stable")
    at = np.minimum(np.searchsorted(others[order], own), len(others) - 1)
    rows = np.flatnonzero(others[order][at] == own)
    return [Match(int(row), int(order[at[row]]), "exact", 0.0) for row in rows]


def _near(own: Fingerprints, others: Fingerprints, bits: int) -> list[Match]:
    best: dict[int, Match] = {}
    for row, other, distance in _close(own, others, bits, earlier_only=False):
        if row not in best or distance < best[row].distance:
            best[row] = Match(row, other, "near", distance)
    return list(best.values())


def _close(
    own: Fingerprints, others: Fingerprints, bits: int, *, earlier_only: bool
) -> list[tuple[int, int, float]]:
    """Compare tile by tile; both kinds of hash must agree, either of the picture or its mirror."""
    found = []
    for top in range(0, len(own.pixels), TILE_ROWS):
        phash = own.phash[top : top + TILE_ROWS, :1]
        for left in range(0, len(others.pixels), TILE_COLUMNS):
            if earlier_only and left > top + TILE_ROWS:
                break
            for view in range(2):
                other = others.phash[left : left + TILE_COLUMNS, view]
                rows, columns = np.nonzero(np.bitwise_count(phash ^ other) <= bits)
                rows, columns = rows + top, columns + left
                if earlier_only:
                    rows, columns = rows[columns < rows], columns[columns < rows]
                distances = np.bitwise_count(own.phash[rows, 0] ^ others.phash[columns, view])
                second = np.bitwise_count(own.dhash[rows, 0] ^ others.dhash[columns, view])
                kept = second <= 2 * bits
                found += list(
                    zip(
                        rows[kept].tolist(),
                        columns[kept].tolist(),
                        distances[kept].astype(float).tolist(),
                        strict=True,
                    )
                )
    return found
