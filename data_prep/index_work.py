"""The index, ledger and commit record of one shard that somebody else wrote."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from data_prep.foreign_shards import ForeignRow, ForeignShard, Reading, sha256_of
from data_prep.images import Check, ImagePolicy, Prepared, decode_fully, read_header
from data_prep.ledger import Ready, Rows
from data_prep.sources.build import LabelValue, printable
from data_prep.verdict import BadInputError
from data_prep.writer import COMMIT_VERSION, commit_name
from vitscale.data.label_columns import LabelColumn, labels_json
from vitscale.data.manifest import index_name, json_bytes, ledger_name, sha256_hex
from vitscale.data.storage import Storage, open_storage


@dataclass
class IndexPlan:
    """What is to be indexed, and how its labels count."""

    names: list[str]
    columns: list[LabelColumn]
    # by column: label -> class
    classes: list[dict[str | int, int]]
    # name -> reason, of shards that are left out
    damaged: dict[str, str]
    num_inputs: int
    record: dict[str, Any]
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        self.digest = sha256_hex(json_bytes(self.record))

    @property
    def labels(self) -> bytes:
        """The content of labels.json."""
        return json_bytes(labels_json(self.columns))


@dataclass
class IndexWork:
    """Writes index, ledger and commit record of shards.

    Args:
        reading: How to read the shards.
        plan: How labels count.
        check: How far images are looked at.
    """

    reading: Reading
    plan: IndexPlan
    check: Check
    _storage: Storage | None = field(default=None, init=False)

    def __call__(self, number: int) -> dict[str, Any]:
        """Index one shard; give its commit record."""
        name = self.plan.names[number]
        shard = self.reading.open(name)
        rows = Rows(self.plan.columns)
        offsets: list[int] = []
        if name in self.plan.damaged:
            reason = BadInputError(f"corrupt: {self.plan.damaged[name]}")
            labels: tuple[tuple[int, ...], ...] = tuple(() for _ in self.plan.columns)
            ready = Ready(labels, shard.file.num_bytes, None, reason, 0)
            rows.add_failed(f"{shard.kind}:{printable(name)}", "", ready)
        else:
            for row in shard.rows():
                self._add(rows, offsets, f"{shard.kind}:{printable(name)}", shard, row)
        return self._publish(number, rows, offsets, shard)

    def _add(
        self, rows: Rows, offsets: list[int], start: str, shard: ForeignShard, row: ForeignRow
    ) -> None:
        labels, problem = self._labels(row.labels)
        problem = row.problem or problem
        found = shard.image(row)
        if found is None:
            problem = problem or "incomplete_sample: the shard holds no bytes of the image"
        data = found or b""
        digest = xxhash.xxh3_64_intdigest(data)
        origin = f"{start}/{row.key}" if shard.kind == "webdataset" else f"{start}/{row.offset}"
        image: Prepared | BadInputError
        try:
            if problem:
                raise BadInputError(problem)
            image = self._look(data)
        except BadInputError as error:
            image = error
        ready = Ready(labels, len(data), digest if data else None, image, digest)
        if isinstance(image, BadInputError):
            rows.add_failed(origin, row.key, ready)
        else:
            assert row.offset is not None
            rows.add_packed(origin, row.key, ready, image)
            offsets.append(row.offset)

    def _look(self, data: bytes) -> Prepared:
        header = read_header(data, ImagePolicy("keep"), self.check)
        if self.check == "full" or (self.check == "header" and not header.whole):
            decode_fully(data)
        kind, width, height = header.image_format, header.width, header.height
        return Prepared(data, kind, width, height, kind, width, height, "")

    def _labels(self, values: Sequence[LabelValue]) -> tuple[tuple[tuple[int, ...], ...], str]:
        found: list[tuple[int, ...]] = []
        problem = ""
        for value, classes, column in zip(
            values, self.plan.classes, self.plan.columns, strict=True
        ):
            several = value if isinstance(value, tuple) else (value,)
            own = tuple(sorted({classes.get(label, -1) for label in several}))
            if -1 in own:
                problem = f"bad_label: {value!r} is no class of {column.name!r}"
            elif not own and not column.multi:
                problem = f"no_label: in column {column.name!r}"
            found.append(own)
        return tuple(found), problem

    def _publish(
        self, number: int, rows: Rows, offsets: list[int], shard: ForeignShard
    ) -> dict[str, Any]:
        if self._storage is None:
            self._storage = open_storage(self.reading.uri)
        storage, name = self._storage, self.plan.names[number]
        index, ledger = rows.index_bytes(offsets), rows.ledger_bytes()
        counts = rows.counts()
        if index:
            storage.put(index_name(name), index)
        storage.put(ledger_name(name), ledger)
        record = {
            "version": COMMIT_VERSION,
            "plan_digest": self.plan.digest,
            "number": number,
            "name": name,
            "num_inputs": counts["num_samples"] + counts["num_failed"],
            **counts,
            "num_bytes": shard.file.num_bytes,
            "sha256": sha256_of(shard.file),
            "index_bytes": len(index),
            "index_sha256": sha256_hex(index),
            "ledger_bytes": len(ledger),
            "ledger_sha256": sha256_hex(ledger),
        }
        storage.put(commit_name(number), json_bytes(record))
        return record
