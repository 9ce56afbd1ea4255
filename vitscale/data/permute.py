"""Keyed random streams and keyed permutations: arithmetic only, nothing is materialised.

The order of a run must not change with the version of a library, so nothing here uses a library's
random generator: keys come from BLAKE2b, permutations from a small Feistel network over integers.
"""

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

# Rounds of the network. With three, tables of a few cells still favour some permutations; with six
# a chi-square test over 20,000 keys finds nothing (tests/data/test_order.py has it).
_ROUNDS = 6
# Elements permuted at once where all are asked for: keeps the temporaries in the cache.
_CHUNK = 32_768

_U64 = np.uint64
_GOLDEN = _U64(0x9E3779B97F4A7C15)
_LOW_32_BITS = _U64(32)
# One step of a 64-bit linear congruential generator (Knuth, MMIX) gives the next round its key.
_NEXT_KEY = _U64(6364136223846793005), _U64(1442695040888963407)


def stream(seed: int, purpose: str, *parts: int) -> int:
    """Derive the 64-bit key of one random stream.

    Streams of different purposes or parts are unrelated, also where seed + part would agree.

    Args:
        seed: Seed of the run; any integer.
        purpose: What the stream is for: "shards", "augment".
        parts: What it is bound to: the epoch, the ordinal of a sample.

    Returns:
        A key in 0 .. 2^64 - 1.
    """
    text = "\0".join([purpose, str(seed), *map(str, parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit values so that every input bit moves every output bit.

    Args:
        values: Any values; sums and products wrap around on purpose.

    Returns:
        As many values; different inputs give different outputs.

    Source:
        The output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    values = values + _GOLDEN
    values = (values ^ (values >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U64(27))) * _U64(0x94D049BB133111EB)
    return values ^ (values >> _U64(31))


def permute(
    values: NDArray[np.int64], sizes: NDArray[np.int64], keys: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Send each value to its place in a keyed permutation of 0 .. size - 1.

    The value is written as row * columns + column of the smallest near-square table that holds
    `size` cells. Adding a keyed function of the column to the row, and of the row to the column,
    can be undone, so a chain of such rounds permutes the table; a value that leaves 0 .. size - 1
    is sent on until it is back in, which permutes that range.

    Args:
        values: Each in 0 .. size - 1.
        sizes: Length of the permuted range of each value, 1 .. 2^62.
        keys: Key of the permutation of each value.

    Returns:
        The images, elementwise.
    """
    size = sizes.astype(_U64)
    # Any near-square shape is right as long as it has `size` cells; sqrt is exactly rounded by
    # IEEE 754, so every machine takes the same shape.
    rows = np.ceil(np.sqrt(sizes.astype(np.float64))).astype(_U64)
    columns = (size + rows - _U64(1)) // rows
    result = _rounds(values.astype(_U64), rows, columns, keys)
    outside = np.flatnonzero(result >= size)
    while outside.size:
        walked = _rounds(result[outside], rows[outside], columns[outside], keys[outside])
        result[outside] = walked
        outside = outside[walked >= size[outside]]
    return result.astype(np.int64)


def _rounds(
    values: NDArray[np.uint64],
    rows: NDArray[np.uint64],
    columns: NDArray[np.uint64],
    keys: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    row, column = np.divmod(values, columns)
    for _ in range(_ROUNDS):
        row = _add_modulo(row, mix64(column ^ keys), rows)
        keys = keys * _NEXT_KEY[0] + _NEXT_KEY[1]
        column = _add_modulo(column, mix64(row ^ keys), columns)
        keys = keys * _NEXT_KEY[0] + _NEXT_KEY[1]
    return row * columns + column


def _add_modulo(
    half: NDArray[np.uint64], noise: NDArray[np.uint64], modulus: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    half = half + _scaled(noise, modulus)
    return np.where(half >= modulus, half - modulus, half)


def _scaled(noise: NDArray[np.uint64], modulus: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # Upper 32 bits of noise scaled to 0 .. modulus - 1 by a product: several times faster than a
    # 64-bit remainder. A half stays below 2^32 because sizes stay below 2^62.
    return ((noise >> _LOW_32_BITS) * modulus) >> _LOW_32_BITS


def permutation(size: int, key: int) -> NDArray[np.int64]:
    """Write out a whole keyed permutation of 0 .. size - 1.

    The same as `permute` of every value, ten times faster: with one key, what a round adds depends
    on a column or a row alone, so it is looked up in tables of about sqrt(size) values. They are
    repeated as often as a half can pass its modulus, so the remainder is taken once, at the end.

    Args:
        size: Its length, 0 or more.
        key: Its key, as `stream` gives it.

    Returns:
        The images of 0, 1, ... in order.
    """
    result = np.empty(size, dtype=np.int64)
    rows = math.ceil(math.sqrt(size))
    columns = -(-size // rows) if rows else 0
    tables = _round_tables(rows, columns, key)
    row_starts = np.tile(np.arange(rows, dtype=np.int64) * columns, _ROUNDS + 1)
    rest = np.tile(np.arange(columns, dtype=np.int64), _ROUNDS + 1)
    step = max(1, _CHUNK // max(columns, 1))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        row = np.repeat(np.arange(first, last, dtype=np.int64), columns)
        column = np.tile(np.arange(columns, dtype=np.int64), last - first)
        for by_column, by_row in tables:
            row += by_column.take(column)
            column += by_row.take(row)
        part = result[first * columns : last * columns]
        part[:] = (row_starts.take(row) + rest.take(column))[: len(part)]
    outside = np.flatnonzero(result >= size)
    while outside.size:
        shape = (np.full(outside.size, value, dtype=_U64) for value in (rows, columns, key))
        walked = _rounds(result[outside].astype(_U64), *shape).astype(np.int64)
        result[outside] = walked
        outside = outside[walked >= size]
    return result


def _round_tables(
    rows: int, columns: int, key: int
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Give, for each round, what is added to a row by column, and to a column by row."""
    tables = []
    keys = np.array([key], dtype=_U64)
    for number in range(_ROUNDS):
        pair = []
        for length, modulus in ((columns, rows), (rows, columns)):
            noise = mix64(np.arange(length, dtype=_U64) ^ keys)
            added = _scaled(noise, np.array([modulus], dtype=_U64)).astype(np.int64)
            keys = keys * _NEXT_KEY[0] + _NEXT_KEY[1]
            pair.append(added)
        # Before it is looked up in round n, a column has passed its modulus n times at most, and
        # a row, which was added to just before, once more.
        tables.append((np.tile(pair[0], number + 1), np.tile(pair[1], number + 2)))
    return tables
