"""The plan of a pack: which input gets which key and shard, decided before any work.

A plan depends on the inputs (names, sizes, labels) and the settings alone, so any rank can do any
shard of it, now or after a restart, and write the same bytes. Its record on storage lets a later
run see whether it still is the same job. A plan of any size fits in memory: its rows lie in a file
(keyed_sort.py), and only where the shards begin is held.
"""

import functools
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from data_prep.images import Check, ImagePolicy
from data_prep.keyed_sort import HELD_ROWS, HIGH, LOW, KeyedSort, RowFile
from data_prep.listing import LABELS, Collected, collect, row_schema, settled
from data_prep.sources.build import Entry, Source
from vitscale.config.errors import UserError
from vitscale.data.label_columns import LabelColumn, labels_json
from vitscale.data.manifest import json_bytes, sha256_hex
from vitscale.data.tar_shard import BLOCK_BYTES, sample_bytes

PLAN_VERSION = 2
KEY_DIGITS = 9
SHOWN_DIFFERENCES = 12
NO_CLASS = "(none)"


@dataclass(frozen=True)
class Settings:
    """Everything besides the inputs that affects the bytes of a dataset."""

    split: str
    seed: int
    # aimed size of a shard in bytes, from the sizes of the inputs
    shard_bytes: int
    check: Check
    image: ImagePolicy
    # "tar" or "arrow"
    format: str = "tar"
    # every shard with nearly the same share of every class
    stratify: bool = False
    # names of shards start with digits that spread them over the servers of a store
    spread: bool = False
    # names of the classes of the first label column in their order
    label_map: tuple[str, ...] | None = None
    allow_case_twins: bool = False
    # sha256 of the list of excluded images
    exclude_digest: str = ""
    # hashes of the excluded images, as they would be stored
    excluded: frozenset[int] = field(default=frozenset(), repr=False)

    def describe(self) -> dict[str, Any]:
        """Give the fields for the plan's record."""
        described = {
            "format": self.format,
            "split": self.split,
            "seed": self.seed,
            "shard_bytes": self.shard_bytes,
            "check": self.check,
            "image": self.image.describe(),
            "stratify": self.stratify,
            "spread": self.spread,
        }
        if self.exclude_digest:
            described["exclude_sha256"] = self.exclude_digest
        return described


class Item(NamedTuple):
    """One input of a shard."""

    # position in the list of sources
    source: int
    entry: Entry
    # classes in every label column
    labels: tuple[tuple[int, ...], ...]


class Task(NamedTuple):
    """One shard to be written; small enough to travel to whoever does it."""

    number: int
    name: str
    # ordinal of the first input; keys count on from here
    first: int
    items: list[Item]
    plan_digest: str
    labels_sha256: str


@dataclass
class Plan:
    """All tasks, and the record that identifies them."""

    columns: list[LabelColumn]
    # the inputs in the order of their keys
    rows: RowFile
    # shard s holds the inputs bounds[s] to bounds[s + 1]
    bounds: npt.NDArray[np.int64]
    # plan.json
    record: dict[str, Any]
    digest: str

    @property
    def num_inputs(self) -> int:
        """Inputs of all sources."""
        return len(self.rows)

    @property
    def num_shards(self) -> int:
        """Shards, also those that may turn out empty."""
        return len(self.bounds) - 1

    def shard_name(self, number: int) -> str:
        """Give the name of a shard."""
        settings = self.record["settings"]
        name = f"shard-{number:06d}.{settings['format']}"
        if not settings["spread"]:
            return name
        return f"{xxhash.xxh3_64_intdigest(name.encode()) & 0xFF:02x}/{name}"

    def task(self, number: int) -> Task:
        """Give the work on one shard."""
        first, last = int(self.bounds[number]), int(self.bounds[number + 1])
        items = list(_items(self.rows.rows(first, last)))
        labels = sha256_hex(self.labels)
        return Task(number, self.shard_name(number), first, items, self.digest, labels)

    @functools.cached_property
    def labels(self) -> bytes:
        """The content of labels.json."""
        return json_bytes(labels_json(self.columns))


def make_plan(sources: Sequence[Source], settings: Settings, held_rows: int = HELD_ROWS) -> Plan:
    """List all inputs and assign them to shards.

    Args:
        sources: At least one.
        settings: Of the whole dataset.
        held_rows: Inputs to hold in memory while they are sorted.

    Raises:
        UserError: There is nothing to pack, or more than the keys can count.
    """
    collected = collect(
        sources, settings.seed, settings.label_map, settings.allow_case_twins, held_rows
    )
    if collected.num_inputs > 10**KEY_DIGITS:
        raise UserError(
            f"{collected.num_inputs} inputs; one dataset holds at most 10**{KEY_DIGITS}: "
            "pack several"
        )
    summary = _Summary(len(sources), collected.columns)
    tables = summary.watch(settled(collected))
    if settings.stratify:
        tables = _stratified(tables, collected, held_rows)
    rows = RowFile(row_schema(len(collected.columns)))
    digest = _RowDigest()
    total = 0
    for table in tables:
        digest.update(table)
        rows.append(table)
        total += int(_stored(table["num_bytes"].to_numpy()).sum())
    rows.finish()
    bounds = _cut(rows, total, settings.shard_bytes)
    record = {
        "version": PLAN_VERSION,
        "settings": settings.describe(),
        "num_inputs": collected.num_inputs,
        "num_input_bytes": collected.num_bytes,
        "num_shards": len(bounds) - 1,
        "columns": [
            {**column.summary(), "names_sha256": sha256_hex(json_bytes(column.names))}
            for column in collected.columns
        ],
        "sources": [
            {"kind": source.kind, "classes": classes}
            for source, classes in zip(sources, summary.classes(), strict=True)
        ],
        "inputs_sha256": digest.hexdigest(),
    }
    plan_digest = sha256_hex(json_bytes(record))
    record["plan_digest"] = plan_digest
    return Plan(collected.columns, rows, bounds, record, plan_digest)


def _items(rows: pa.Table) -> Iterator[Item]:
    names = [name for name in rows.schema.names if name.startswith(LABELS)]
    labels = zip(*(rows[name].to_pylist() for name in names), strict=True)
    fields = (
        rows[name].to_pylist() for name in ("source", "name", "num_bytes", "problem", "where")
    )
    for source, name, num_bytes, problem, where, own in zip(*fields, labels, strict=True):
        entry = Entry(os.fsdecode(name), num_bytes, (), os.fsdecode(problem), os.fsdecode(where))
        yield Item(source, entry, tuple(tuple(sorted(values)) for values in own))


def _stored(num_bytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Give the space that inputs take in a tar, if they are stored as they are."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES + sample_bytes(0)


def _cut(rows: RowFile, total: int, shard_bytes: int) -> npt.NDArray[np.int64]:
    """Cut the order into shards of nearly equal size in bytes, as few as fit the aimed size."""
    num_shards = max(1, -(-total // shard_bytes))
    goals = np.asarray([total * shard // num_shards for shard in range(1, num_shards)], np.int64)
    bounds = [0]
    done_bytes = first = 0
    while first < len(rows):
        last = min(first + RowFile.BATCH_ROWS, len(rows))
        ends = done_bytes + np.cumsum(_stored(rows.rows(first, last)["num_bytes"].to_numpy()))
        own = goals[(goals > done_bytes) & (goals <= ends[-1])]
        bounds += (first + np.searchsorted(ends, own, side="left") + 1).tolist()
        done_bytes, first = int(ends[-1]), last
    # An input larger than a shard swallows the cuts inside itself.
    return np.unique([*bounds, len(rows)]).astype(np.int64)


def _stratified(
    tables: Iterable[pa.Table], collected: Collected, held_rows: int
) -> Iterator[pa.Table]:
    """Reorder so that every stretch holds nearly the same share of every class.

    The r-th of the n inputs of a class, in the keyed order, goes to the place (r + u) / n of the
    whole, with a u for each class: inputs of a class are spread evenly, classes are not in step.
    """
    num_classes = len(collected.columns[0].names) + 1
    held = KeyedSort(row_schema(len(collected.columns)), held_rows)
    counts = np.zeros(num_classes, np.int64)
    for table in tables:
        counts += np.bincount(_first_class(table) + 1, minlength=num_classes)
        held.add(table)
    shifts = np.asarray(
        [xxhash.xxh3_64_intdigest(f"stratify/{label}".encode()) for label in range(num_classes)],
        np.uint64,
    ) / np.float64(2**64)
    seen = np.zeros(num_classes, np.int64)
    spread = KeyedSort(row_schema(len(collected.columns)), held_rows)
    for table in held:
        if not table.num_rows:
            continue
        of = _first_class(table) + 1
        order = np.argsort(of, kind="stable")
        own = np.bincount(of, minlength=num_classes)
        ranks = np.empty(len(of), np.int64)
        ranks[order] = np.arange(len(of)) - np.repeat(np.cumsum(own) - own, own)
        place = (seen[of] + ranks + shifts[of]) / counts[of]
        seen += own
        high = np.minimum(place * 2.0**64, np.nextafter(2.0**64, 0)).astype(np.uint64)
        table = table.set_column(1, table.schema.field(1), table[HIGH])
        spread.add(table.set_column(0, table.schema.field(0), pa.array(high)))
    yield from spread


def _first_class(rows: pa.Table) -> npt.NDArray[np.int64]:
    """Give the class of every row in the first column; of several the first, -1 for none."""
    lists = rows[f"{LABELS}0"].combine_chunks()
    starts, values = lists.offsets.to_numpy(), lists.values.to_numpy()
    counts = np.diff(starts)
    found = np.full(len(counts), -1, np.int64)
    found[counts > 0] = values[starts[:-1][counts > 0]]
    return found


class _Summary:
    """Sums up every source by class, so that a change can be named."""

    def __init__(self, num_sources: int, columns: list[LabelColumn]) -> None:
        self._names = [NO_CLASS, *columns[0].names]
        shape = (num_sources, len(self._names))
        self._counts = np.zeros(shape, np.int64)
        self._sizes = np.zeros(shape, np.int64)
        self._checks = np.zeros(shape, np.uint64)

    def watch(self, tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
        """Pass tables on, counting them."""
        for rows in tables:
            at = (rows["source"].to_numpy(), _first_class(rows) + 1)
            sizes = rows["num_bytes"].to_numpy()
            # Sums do not depend on the order. The keys already are hashes of the names.
            checks = (rows[LOW].to_numpy() ^ sizes.astype(np.uint64)) * np.uint64(
                0x9E3779B97F4A7C15
            )
            np.add.at(self._counts, at, 1)
            np.add.at(self._sizes, at, sizes)
            np.add.at(self._checks, at, checks)
            yield rows

    def classes(self) -> list[dict[str, dict[str, Any]]]:
        """Give class -> what was counted, for every source."""
        return [
            {
                name: {
                    "num_inputs": int(self._counts[source, at]),
                    "num_bytes": int(self._sizes[source, at]),
                    "check": f"{int(self._checks[source, at]):016x}",
                }
                for at, name in enumerate(self._names)
                if self._counts[source, at]
            }
            for source in range(len(self._counts))
        ]


class _RowDigest:
    """A digest of all rows in their order, the same however they are cut into tables."""

    FIELDS = ("name", "problem")

    def __init__(self) -> None:
        self._hashes: dict[str, Any] = {}

    def _add(self, name: str, data: Any) -> None:
        self._hashes.setdefault(name, hashlib.sha256()).update(np.ascontiguousarray(data).data)

    def update(self, rows: pa.Table) -> None:
        """Add rows."""
        rows = rows.combine_chunks()
        self._add("source", rows["source"].to_numpy())
        self._add("num_bytes", rows["num_bytes"].to_numpy())
        for name in rows.schema.names:
            if name in self.FIELDS or name.startswith(LABELS):
                array = rows[name].chunk(0)
                is_list = name.startswith(LABELS)
                ends = np.frombuffer(array.buffers()[1], np.int32 if is_list else np.int64)
                ends = ends[array.offset : array.offset + len(array) + 1]
                self._add(f"{name}/lengths", np.diff(ends))
                if is_list:
                    values = array.values.to_numpy()
                else:
                    values = np.frombuffer(array.buffers()[2] or b"", np.uint8)
                self._add(f"{name}/values", values[ends[0] : ends[-1]])

    def hexdigest(self) -> str:
        """Give the digest."""
        return sha256_hex(json_bytes({k: h.hexdigest() for k, h in self._hashes.items()}))


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Name the leaves in which two plan records differ, `place: old -> new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted(old.keys() | new.keys()):
            if key in ("plan_digest", "inputs_sha256"):
                continue
            place = f"{where}.{key}" if where else key
            found += differences(old.get(key), new.get(key), place)
        return found
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [text for at, (a, b) in pairs for text in differences(a, b, f"{where}[{at}]")]
    if old == new:
        return []
    if where.endswith(".check"):
        return [f"{where.removesuffix('.check')}: names or sizes of inputs changed"]
    return [f"{where}: {_short(old)} -> {_short(new)}"]


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 100 else text[:97] + "..."


def changed_plan_message(uri: str, old: Any, new: dict[str, Any]) -> str:
    """Explain why a dataset that another plan began cannot be continued with this one."""
    found = differences(old, new) or ["labels, or the order of inputs within a class"]
    shown = "".join(f"\n  {text}" for text in found[:SHOWN_DIFFERENCES])
    more = (
        f"\n  and {len(found) - SHOWN_DIFFERENCES} more" if len(found) > SHOWN_DIFFERENCES else ""
    )
    return (
        f"{uri} was begun with other inputs or settings; they are never mixed. Changed (there -> "
        f"now):{shown}{more}\n"
        "Use the same inputs and settings again, or pack into an empty --out."
    )
