import numpy as np
import pytest

from data_prep.fingerprint import Fingerprints, fingerprint, mirrored
from data_prep.groups import Groups
from data_prep.near import COLOUR_STEPS, DHASH_FACTOR, ExactIndex, NearIndex, Pairs, is_flat

# red, green and blue of four quarters, five bits each, the first one highest
VALUES = [3, 9, 20, 7, 7, 7, 12, 13, 14, 1, 2, 3]
COLOURS = sum(value << 5 * (11 - at) for at, value in enumerate(VALUES))


def clustered(seed: int, count: int, spread: int) -> Fingerprints:
    """Fingerprints around twelve centres: random bits of `spread` chosen ones are turned over."""
    centres = np.random.default_rng(0).integers(0, 1 << 63, (12, 7)).astype(np.uint64)
    centres[:, 6] = COLOURS
    rng = np.random.default_rng(seed)
    table = centres[rng.integers(0, 12, count)]
    for _ in range(spread):
        flips = np.uint64(1) << rng.integers(0, 64, (count, 6)).astype(np.uint64)
        table[:, :6] ^= np.where(rng.random((count, 6)) < 0.5, flips, np.uint64(0))
    # Two steps more in one quarter, or three: within what copies may differ, or not.
    steps = rng.choice([0, 0, 2, 3], count).astype(np.uint64)
    table[:, 6] += steps << np.uint64(5 * 4)
    return Fingerprints.from_array(table)


def values_of(colours: np.ndarray) -> np.ndarray:
    return np.asarray([[int(c) >> 5 * (11 - at) & 31 for at in range(12)] for c in colours])


def distances_of_all(own: Fingerprints, others: Fingerprints, bits: int) -> np.ndarray:
    """Bits that differ of every pair, by comparing all; 255 where it is none."""
    own_values, other_values = values_of(own.colours), values_of(others.colours)
    views = []
    for view in range(2):
        first = np.bitwise_count(own.phash[:, :1] ^ others.phash[:, view])
        second = np.bitwise_count(own.dhash[:, :1] ^ others.dhash[:, view])
        seen = (
            other_values if view == 0 else other_values[:, [3, 4, 5, 0, 1, 2, 9, 10, 11, 6, 7, 8]]
        )
        steps = abs(own_values[:, None] - seen[None]).max(axis=2)
        near = (first <= bits) & (second <= DHASH_FACTOR * bits) & (steps <= COLOUR_STEPS)
        views.append(np.where(near, first, 255))
    return np.minimum(*views)


@pytest.mark.parametrize("bits", [0, 1, 3, 6, 9, 20])
@pytest.mark.parametrize(("count", "chunk_pairs"), [(40, 7), (3000, 1 << 14)])
def test_near_index_agrees_with_comparing_all_pairs(bits, count, chunk_pairs):
    own, others = clustered(1, 150, bits // 2 + 1), clustered(2, count, bits // 2 + 1)
    index = NearIndex(others, bits, chunk_rows=64, chunk_pairs=chunk_pairs)

    found = index.closest(own)

    wanted = distances_of_all(own, others, bits)
    rows = np.flatnonzero(wanted.min(axis=1) < 255)
    assert len(rows) > 3
    assert found.row.tolist() == rows.tolist()
    assert found.distance.tolist() == wanted[rows].min(axis=1).tolist()
    assert found.other.tolist() == wanted[rows].argmin(axis=1).tolist()


@pytest.mark.parametrize("bits", [1, 3, 6, 8, 9, 12, 20])
def test_near_index_misses_none_that_is_just_near_enough(bits):
    """Every row has one other that differs in `bits` bits, anywhere, among many strangers."""
    rng = np.random.default_rng(bits)
    own = rng.integers(0, 2**64, (300, 7), np.uint64)
    others = rng.integers(0, 2**64, (5000, 7), np.uint64)
    others[:300, 4:] = own[:, 4:]
    for row in range(300):
        flips = sum(1 << int(bit) for bit in rng.choice(64, bits, replace=False))
        others[row, 2] = own[row, 2] ^ np.uint64(flips)
    index = NearIndex(Fingerprints.from_array(others), bits)

    found = index.closest(Fingerprints.from_array(own))

    assert found.row.tolist() == found.other.tolist() == list(range(300))
    assert set(found.distance.tolist()) == {bits}


@pytest.mark.parametrize("bits", [0, 5])
def test_near_index_joins_the_groups_of_comparing_all_pairs(bits):
    table = clustered(3, 400, 1 + bits // 2)
    index = NearIndex(table, bits, chunk_rows=150)
    counts = []
    pieces = [index.same(), *index.search(table, counts.append)]
    assert counts == [150, 150, 100]

    groups, wanted = Groups(), Groups()
    for pairs in pieces:
        groups.join(zip(pairs.row.tolist(), pairs.other.tolist(), strict=True))
    close = np.nonzero(distances_of_all(table, table, bits) < 255)
    wanted.join(zip(*(side.tolist() for side in close), strict=True))
    # Equal mirror images are a match as well.
    mirror = np.column_stack([table.phash[:, 1], table.dhash[:, 1], mirrored(table.colours)])
    _, kinds = np.unique(mirror, axis=0, return_inverse=True)
    same = np.nonzero(kinds.reshape(-1, 1) == kinds.reshape(1, -1))
    wanted.join(zip(*(side.tolist() for side in same), strict=True))

    firsts = [groups.first(row) for row in range(400)]
    assert 2 < len(set(firsts)) < 400
    assert firsts == [wanted.first(row) for row in range(400)]


def test_near_index_of_equal_hashes_stays_small():
    same = np.ones((20_000, 7), np.uint64)
    index = NearIndex(Fingerprints.from_array(same), 6)

    found = sum(len(pairs.row) for pairs in index.search(Fingerprints.from_array(same)))

    assert found <= 20_000 * 64
    assert len(index.same().row) >= 20_000 - 1


def test_near_index_of_nothing_finds_nothing():
    own, nothing = clustered(1, 10, 1), Fingerprints.empty(0)

    assert len(NearIndex(nothing, 6).closest(own).row) == 0
    assert len(NearIndex(own, 6).closest(nothing).row) == 0
    assert len(ExactIndex(nothing.pixels).search(own.pixels).row) == 0


def test_exact_index_names_the_first_of_equal_ones():
    pixels = np.asarray([[5, 1], [3, 9], [5, 1], [5, 2]], np.uint64)
    asked = np.asarray([[3, 9], [5, 1], [3, 8], [9, 9]], np.uint64)

    found = ExactIndex(pixels).search(asked)

    assert isinstance(found, Pairs)
    assert list(zip(found.row.tolist(), found.other.tolist(), strict=True)) == [(0, 1), (1, 0)]


def test_fingerprint_of_other_shape_is_another():
    pixels = np.zeros((4, 6, 3), np.uint8)

    assert fingerprint(pixels)[0] != fingerprint(pixels.reshape(6, 4, 3))[0]


@pytest.mark.parametrize("level", [0, 7, 128, 255])
def test_fingerprint_of_one_colour_is_flat(level):
    _, phash, dhash, _ = fingerprint(np.full((50, 70, 3), level, np.uint8))

    assert is_flat(np.asarray(phash, np.uint64), np.asarray(dhash, np.uint64)).all()


def test_fingerprint_of_the_mirror_image_has_both_views_and_colours_swapped():
    rng = np.random.default_rng(0)
    picture = np.kron(rng.integers(0, 256, (4, 4, 3)), np.ones((32, 32, 1))).astype(np.uint8)

    _, phash, dhash, colours = fingerprint(picture)
    _, *mirror = fingerprint(picture[:, ::-1])

    assert mirror == [phash[::-1], dhash[::-1], int(mirrored(np.asarray([colours], np.uint64))[0])]
    upper_left = picture[:64, :64].reshape(-1, 3).mean(axis=0)
    found = [colours >> 5 * (11 - at) & 31 for at in range(3)]
    assert np.abs(np.asarray(found) * 8 + 4 - upper_left).max() <= 5


def test_groups_name_the_first_of_a_chain():
    groups = Groups()

    lost = groups.join([(8, 7), (3, 5), (1, 3), (9, 8), (5, 1)])

    assert lost == {3: 1, 5: 1, 8: 7, 9: 7}
    assert groups.join([(9, 1), (7, 3)]) == {7: 1}
    assert [groups.first(member) for member in (1, 2, 9)] == [1, 2, 1]
