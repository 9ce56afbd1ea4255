"""What a run takes of a dataset: the labels of one column, without the samples of a list.

A view is a manifest with fewer samples, whose indexes lack the others: order, audit, readers and
evaluation take it for a dataset. Left out are the samples of the list of `vitscale dedup`, and in a
column that was added later those without a label. Its digest is one of its own, so that a run is
never continued on another view. Nothing is read but the list and the column's JSON; indexes are
cut when they are loaded.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vitscale.config.errors import DataError, UserError
from vitscale.data.audit import hash_key
from vitscale.data.exclusion import Exclusions, load_exclusions
from vitscale.data.label_columns import LabelColumn, labels_json
from vitscale.data.label_sidecar import (
    Sidecar,
    load_sidecar,
    load_sidecar_shard,
    sidecar_shard_name,
)
from vitscale.data.manifest import (
    Manifest,
    ShardIndex,
    damaged,
    first_labels,
    index_name,
    json_bytes,
    load_index,
    load_label_columns,
    sha256_hex,
)
from vitscale.data.storage import Readable, Storage


@dataclass(frozen=True)
class DatasetView:
    """Cuts indexes; see `vitscale.data.manifest.View`."""

    # manifest of the whole dataset
    stored: Manifest
    # the chosen one
    column: LabelColumn
    # where its labels are; None: in the index
    sidecar: Sidecar | None
    # shard_id -> keys that are left out
    excluded: dict[int, pa.Array] = field(repr=False)
    # what is left of every shard
    num_samples: npt.NDArray[np.int64] = field(repr=False)

    def index(self, storage: Readable, shard_id: int) -> ShardIndex:
        """Read one shard's index, with the labels and without the samples that are left out.

        Raises:
            DataError: The index, the column or the list does not fit the others.
        """
        index = load_index(storage, self.stored, shard_id)
        columns = dict(index.columns)
        kept = np.ones(len(index), bool)
        if self.sidecar is not None:
            columns[self.column.name] = self._added(storage, shard_id, index)
        labels = first_labels(columns[self.column.name], self.column.multi)
        if self.sidecar is not None and not self.column.multi:
            kept &= labels >= 0
        if shard_id in self.excluded:
            keys = set(self.excluded[shard_id].to_pylist())
            kept &= np.fromiter((key not in keys for key in index.keys), bool, len(index))
        wanted, found = int(self.num_samples[shard_id]), int(kept.sum())
        if found != wanted:
            raise damaged(
                storage.uri,
                index_name(self.stored.shards.names[shard_id]),
                f"{found} samples are left of {len(index)}, expected {wanted}: the list of "
                "excluded images names samples that are not there; make it anew",
            )
        return _cut(replace(index, labels=labels, columns=columns), kept)

    def label_columns(self, storage: Storage) -> list[LabelColumn]:
        """Read the label columns, the chosen one first."""
        columns = load_label_columns(storage, self.stored)
        return [self.column, *(own for own in columns if own.name != self.column.name)]

    def _added(self, storage: Readable, shard_id: int, index: ShardIndex) -> pa.ChunkedArray:
        assert self.sidecar is not None
        table = load_sidecar_shard(storage, self.stored, self.sidecar, shard_id)
        if table["key"].to_pylist() != index.keys:
            name = sidecar_shard_name(self.column.name, self.stored.shards.names[shard_id])
            raise damaged(storage.uri, name, "has other keys than the shard's index")
        return table[self.column.name]


def view_of(
    storage: Storage,
    manifest: Manifest,
    label_column: str | None = None,
    exclude: str | None = None,
) -> Manifest:
    """Give the manifest of a part of a dataset.

    Args:
        storage: The dataset.
        manifest: Its manifest, not a view.
        label_column: Column whose labels are taken: a stored or an added one; None takes the first
            stored one. Samples without a label in an added column are left out, unless it is
            multi-label.
        exclude: List of samples that are left out, as `vitscale dedup` writes it.

    Returns:
        The same manifest where there is nothing to change; else one with `view`.

    Raises:
        UserError: There is no such column or list, it belongs to another dataset, or no sample is
            left.
        DataError: Column or list is damaged.
    """
    default = manifest.columns[0]["name"]
    if exclude is None and label_column in (None, default):
        return manifest
    column, sidecar = _chosen(storage, manifest, label_column or default)
    exclusions = None if exclude is None else load_exclusions(exclude)
    excluded = dict(_by_shard(storage, manifest, exclusions)) if exclusions else {}
    num_samples, keys_sum64 = _what_is_left(storage, manifest, column, sidecar, excluded)
    if not num_samples.any():
        raise UserError(
            f"{storage.uri}: no sample is left with label_column = {column.name!r} and exclude = "
            f"{exclude!r}; choose others"
        )
    others = [own for own in manifest.columns if own["name"] != column.name]
    parts = {
        "label_column": sidecar.digest if sidecar else column.name,
        "exclude": exclusions.digest if exclusions else None,
    }
    return replace(
        manifest,
        num_samples=int(num_samples.sum()),
        columns=[column.summary(), *others],
        labels_sha256=_labels_sha256(manifest, column),
        keys_sum64=keys_sum64,
        samples_sha256=sha256_hex(json_bytes({"dataset": manifest.samples_sha256, **parts})),
        shards=replace(manifest.shards, num_samples=num_samples),
        digest=sha256_hex(json_bytes({"dataset": manifest.digest, **parts})),
        view=DatasetView(manifest, column, sidecar, excluded, num_samples),
    )


def check_trainable(uri: str, manifest: Manifest) -> None:
    """Refuse a label column that gives other than one class a sample.

    Raises:
        UserError: The chosen column is multi-label.
    """
    column = manifest.columns[0]
    if column["multi"]:
        raise UserError(
            f"{uri}: label column {column['name']!r} is multi-label; training and evaluation take "
            "one class a sample: choose another one (data.label_column, --label-column)"
        )


def _chosen(storage: Storage, manifest: Manifest, name: str) -> tuple[LabelColumn, Sidecar | None]:
    for column in load_label_columns(storage, manifest):
        if column.name == name:
            return column, None
    sidecar = load_sidecar(storage, manifest, name)
    return sidecar.column, sidecar


def _labels_sha256(manifest: Manifest, column: LabelColumn) -> str:
    """Name the classes: as a dataset would that has them in its only column."""
    if column.name == manifest.columns[0]["name"]:
        return manifest.labels_sha256
    return sha256_hex(json_bytes(labels_json([replace(column, name="label")])))


def _by_shard(
    storage: Storage, manifest: Manifest, exclusions: Exclusions
) -> Iterator[tuple[int, pa.Array]]:
    """Give shard_id and excluded keys of the shards that lose samples."""
    if exclusions.train_digest != manifest.digest:
        raise UserError(
            f"{exclusions.place} was made for another dataset than {storage.uri}: for one whose "
            f"manifest.json has sha256 {exclusions.train_digest[:16]}.., not "
            f"{manifest.digest[:16]}..; make it anew (vitscale dedup --train {storage.uri}). A "
            "dataset that was packed with the list (--exclude) needs it no more"
        )
    rows = exclusions.rows.select(["shard", "key"]).sort_by("shard").combine_chunks()
    shard_ids = {name: shard_id for shard_id, name in enumerate(manifest.shards.names)}
    start = 0
    for run in pc.value_counts(rows["shard"]).to_pylist():
        name, count = run["values"], run["counts"]
        if name not in shard_ids:
            raise DataError(
                f"{exclusions.place} names shard {name}, which {storage.uri} does not have; make "
                "the list anew with `vitscale dedup`"
            )
        yield shard_ids[name], rows["key"].slice(start, count).unique()
        start += count


def _what_is_left(
    storage: Storage,
    manifest: Manifest,
    column: LabelColumn,
    sidecar: Sidecar | None,
    excluded: dict[int, pa.Array],
) -> tuple[npt.NDArray[np.int64], int]:
    """Give the samples of every shard that stay, and the sum of the hashes of their keys."""
    stored = manifest.shards.num_samples
    num_samples, keys_sum64 = stored.copy(), manifest.keys_sum64
    if sidecar is not None and not column.multi:
        num_samples = np.asarray([shard.num_labelled for shard in sidecar.shards], np.int64)
        keys_sum64 = sum(shard.keys_sum64 for shard in sidecar.shards)
    for shard_id, array in excluded.items():
        keys = set(array.to_pylist())
        if sidecar is not None and num_samples[shard_id] < stored[shard_id]:
            # Some may be gone already, for want of a label.
            table = load_sidecar_shard(storage, manifest, sidecar, shard_id)
            labels = table[column.name].to_pylist()
            pairs = zip(table["key"].to_pylist(), labels, strict=True)
            keys &= {key for key, label in pairs if label >= 0}
        num_samples[shard_id] -= len(keys)
        keys_sum64 -= sum(map(hash_key, keys))
    return num_samples, keys_sum64 % 2**64


def _cut(index: ShardIndex, kept: npt.NDArray[np.bool_]) -> ShardIndex:
    """Give the rows of an index that are kept."""
    if kept.all():
        return index
    rows = np.flatnonzero(kept)
    return ShardIndex(
        keys=[index.keys[row] for row in rows],
        offsets=index.offsets[rows],
        num_bytes=index.num_bytes[rows],
        labels=index.labels[rows],
        widths=index.widths[rows],
        heights=index.heights[rows],
        image_formats=[index.image_formats[row] for row in rows],
        xxh3=index.xxh3[rows],
        columns={name: values.take(pa.array(rows)) for name, values in index.columns.items()},
    )
