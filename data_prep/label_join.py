"""Brings a list of labels to the samples of a dataset, whatever the order of either.

Both are sorted by hashes of their keys and met bucket by bucket; what comes out is sorted by the
place of the samples (keyed_sort.py). So memory hardly grows with the number of rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data_prep.keyed_sort import HELD_ROWS, HIGH, LOW, NUM_BUCKETS, KeyedSort
from data_prep.label_rows import LABEL_ROWS, SHOWN_ROWS, By, LabelList, halves, hash_name
from data_prep.ledger import LEDGER_FIELDS
from vitscale.config.errors import UserError
from vitscale.data.label_columns import LabelColumn
from vitscale.data.manifest import Manifest, damaged, ledger_name, load_index, read_table
from vitscale.data.storage import Storage
from vitscale.observe.progress import Progress

Int64 = npt.NDArray[np.int64]

_SAMPLE_ROWS = pa.schema([(HIGH, pa.uint64()), (LOW, pa.uint64()), ("sample", pa.int64())])
# One row a label; HIGH grows with the place of the sample, evenly over all values.
_JOINED_ROWS = pa.schema(
    [(HIGH, pa.uint64()), (LOW, pa.uint64()), ("sample", pa.int64()), ("class", pa.int64())]
)


@dataclass(frozen=True)
class Joined:
    """Labels by the place of their samples."""

    # with the names of the classes
    column: LabelColumn
    rows: KeyedSort
    # rows of the list whose key no sample has
    num_unknown: int


@dataclass(frozen=True)
class _Found:
    """What a bucket gives."""

    # one of each for every label, samples in the order of the bucket
    samples: Int64
    classes: Int64
    # numbers of the rows whose key no sample has
    unknown: Int64
    # numbers of the rows with a second class for a sample
    second: Int64


def join_labels(
    storage: Storage,
    manifest: Manifest,
    labels: LabelList,
    names: Sequence[str] | None,
    held_rows: int = HELD_ROWS,
) -> tuple[Joined, list[int]]:
    """Find the sample of every row of a list.

    Args:
        storage: The dataset.
        manifest: Its manifest.
        labels: The list.
        names: Classes in their order; None takes those that occur.
        held_rows: Rows to hold in memory.

    Returns:
        The labels, and the numbers of some rows whose key no sample has.

    Raises:
        UserError: The list is wrong, or gives a sample two classes in a column that is not
            multi-label.
        DataError: The dataset is damaged.
    """
    listed = KeyedSort(LABEL_ROWS, held_rows)
    progress = Progress(None, "labels", "read")
    for rows in labels.rows():
        listed.add(rows)
        progress.update(rows.num_rows)
    progress.close()
    column, class_of = labels.classes(names)
    samples = _samples(storage, manifest, labels.by, held_rows)
    joined = KeyedSort(_JOINED_ROWS, held_rows)
    num_unknown, some_unknown = 0, np.empty(0, np.int64)
    for own, other in zip(_buckets(samples), _buckets(listed), strict=True):
        found = _met(own, other, class_of, multi=column.multi)
        if len(found.second):
            _refuse_second(labels, found.second)
        num_unknown += len(found.unknown)
        some_unknown = np.sort(np.concatenate([some_unknown, found.unknown]))[:SHOWN_ROWS]
        if len(found.samples):
            joined.add(_joined_rows(found, manifest.num_samples))
    return Joined(column, joined, num_unknown), some_unknown.tolist()


def by_shard(joined: Joined, starts: Int64) -> Iterator[tuple[Int64, Int64]]:
    """Give the rows of each shard's index that have labels, and the labels; once.

    Args:
        joined: The labels.
        starts: Global index of each shard's first sample, and the total.
    """
    tables = iter(joined.rows)
    samples, classes = np.empty(0, np.int64), np.empty(0, np.int64)
    for start, end in pairwise(starts.tolist()):
        while not len(samples) or samples[-1] < end:
            table = next(tables, None)
            if table is None:
                break
            samples = np.concatenate([samples, table["sample"].to_numpy()])
            classes = np.concatenate([classes, table["class"].to_numpy()])
        cut = int(np.searchsorted(samples, end))
        yield samples[:cut] - start, classes[:cut]
        samples, classes = samples[cut:], classes[cut:]


def _samples(storage: Storage, manifest: Manifest, by: By, held_rows: int) -> KeyedSort:
    """Give the samples of a dataset by the hash of their keys or sources."""
    if by == "source" and not manifest.ledger:
        raise UserError(
            f"{storage.uri} has no ledger, so nobody knows the sources of its samples; give a list "
            "with keys"
        )
    rows = KeyedSort(_SAMPLE_ROWS, held_rows)
    starts = manifest.shards.starts.tolist()
    progress = Progress(manifest.num_shards, "shards", "read keys")
    for shard_id in range(manifest.num_shards):
        names = load_index(storage, manifest, shard_id).keys
        if by == "source":
            sources = _sources(storage, manifest, shard_id)
            names = [sources[key] for key in names]
        high, low = halves(b"".join(map(hash_name, names)))
        numbers = np.arange(starts[shard_id], starts[shard_id] + len(names))
        rows.add(pa.table([high, low, numbers], schema=_SAMPLE_ROWS))
        progress.update()
    progress.close()
    return rows


def _sources(storage: Storage, manifest: Manifest, shard_id: int) -> dict[str, str]:
    """Give key -> source of the samples of a shard."""
    name = ledger_name(manifest.shards.names[shard_id])
    hashes = {entry["name"]: entry["sha256"] for entry in manifest.ledger}
    if name not in hashes:
        raise damaged(storage.uri, name, "is not in the manifest")
    columns = [LabelColumn(own["name"], own["multi"], ()).field for own in manifest.columns]
    table = read_table(storage, name, hashes[name], pa.schema([*LEDGER_FIELDS, *columns]))
    return dict(zip(table["key"].to_pylist(), table["source"].to_pylist(), strict=True))


def _buckets(rows: KeyedSort) -> Iterator[pa.Table]:
    """Give sorted rows in as many tables as there are buckets, also where all are in memory."""
    tables = iter(rows)
    first, second = next(tables), next(tables, None)
    if second is not None:
        yield first
        yield second
        yield from tables
        return
    upper = first[HIGH].to_numpy() >> np.uint64(56)
    bounds = np.searchsorted(upper, np.arange(NUM_BUCKETS + 1)).tolist()
    for start, end in pairwise(bounds):
        yield first.slice(start, end - start)


def _met(own: pa.Table, other: pa.Table, class_of: Int64, *, multi: bool) -> _Found:
    """Find the samples of the labels in a bucket; both are in the order of their hashes."""
    at = positions(own, other)
    numbers = other["number"].to_numpy()
    lists = other["codes"].combine_chunks()
    starts = lists.offsets.to_numpy()
    codes = lists.values.to_numpy()[starts[0] : starts[-1]]
    row_of = np.repeat(np.arange(len(at)), np.diff(starts))
    is_known = at[row_of] >= 0
    row_of, classes = row_of[is_known], class_of[codes[is_known]]
    # The first of equal pairs; rows of one sample lie together, in the order of the list.
    pairs = at[row_of] * (len(class_of) + int(class_of.max()) + 1) + classes
    first = np.sort(np.unique(pairs, return_index=True)[1])
    row_of, classes = row_of[first], classes[first]
    places = at[row_of]
    second = row_of[1:][places[1:] == places[:-1]] if not multi else row_of[:0]
    return _Found(own["sample"].to_numpy()[places], classes, numbers[at < 0], numbers[second])


def positions(own: pa.Table, other: pa.Table) -> Int64:
    """Find the rows of one table that have the hashes of another one's; -1: none."""
    if not own.num_rows:
        return np.full(other.num_rows, -1, np.int64)
    high, low = own[HIGH].to_numpy(), own[LOW].to_numpy()
    other_high, other_low = other[HIGH].to_numpy(), other[LOW].to_numpy()
    at = np.searchsorted(high, other_high)
    last = len(high) - 1
    while True:
        here = np.minimum(at, last)
        # Upper halves that happen to be equal.
        passed = (at <= last) & (high[here] == other_high) & (low[here] < other_low)
        if not passed.any():
            break
        at = at + passed
    found = (at <= last) & (high[here] == other_high) & (low[here] == other_low)
    return np.where(found, here, -1)


def _joined_rows(found: _Found, num_samples: int) -> pa.Table:
    step = np.uint64((2**64 - 1) // num_samples)
    high = found.samples.astype(np.uint64) * step
    return pa.table(
        [high, np.zeros(len(high), np.uint64), found.samples, found.classes], schema=_JOINED_ROWS
    )


def _refuse_second(labels: LabelList, numbers: Int64) -> None:
    shown = np.unique(numbers)[:SHOWN_ROWS].tolist()
    keys = ", ".join(map(repr, labels.keys(shown)))
    raise UserError(
        f"the list gives several classes to one sample, first in row {shown[0]}: {keys}; for any "
        "number of classes a sample add the column with --multi"
    )
