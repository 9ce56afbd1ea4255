"""One shard, from its task to its commit record.

Shard, index and ledger are published first, the record last: it says what they must look like, and
so whether the shard is done. Everything is read once and hashed while it is written.
"""

import json
import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from data_prep.comm import launcher_rank
from data_prep.images import encode_png, prepare_image
from data_prep.ledger import Ready, Rows
from data_prep.plan import KEY_DIGITS, Item, Settings, Task
from data_prep.sources.build import Source, SourceOptions, build_source, printable
from data_prep.verdict import BadInputError
from vitscale.config.errors import UserError, VitscaleError
from vitscale.data.arrow_shard import ArrowShardWriter
from vitscale.data.label_columns import LABELS_NAME, LabelColumn, parse_labels
from vitscale.data.manifest import (
    index_name,
    json_bytes,
    ledger_name,
    parquet_bytes,
    sha256_hex,
)
from vitscale.data.storage import Storage, open_storage
from vitscale.data.tar_shard import TarShardWriter

COMMIT_VERSION = 2
SHOWN_FAILURES = 3
# Bytes of inputs that threads may hold ready in front of the writer.
AHEAD_BYTES = 128 << 20
WRITERS: dict[str, type[TarShardWriter] | type[ArrowShardWriter]] = {
    "tar": TarShardWriter,
    "arrow": ArrowShardWriter,
}


@dataclass
class ShardWork:
    """Does tasks; every process builds its own, and opens sources and storage at the first task.

    Args:
        specs: The sources as on the command line.
        options: How to read them.
        settings: Of the dataset.
        out: URI of the dataset.
        threads: That read and prepare images in each process; 1 uses none besides its own.
    """

    specs: list[str]
    options: SourceOptions
    settings: Settings
    out: str
    threads: int = 1
    _sources: list[Source] = field(default_factory=list, init=False)
    _storage: Storage | None = field(default=None, init=False)
    _columns: list[LabelColumn] = field(default_factory=list, init=False)
    _pool: tuple[int, ThreadPoolExecutor] | None = field(default=None, init=False)

    def sources(self) -> list[Source]:
        """Give the sources, built once."""
        if not self._sources:
            self._sources = [build_source(spec, self.options) for spec in self.specs]
        return self._sources

    def storage(self) -> Storage:
        """Give the store of the dataset, opened once."""
        if self._storage is None:
            self._storage = open_storage(self.out)
        return self._storage

    def pool(self) -> ThreadPoolExecutor | None:
        """Give this process's threads; None where it works alone."""
        if self.threads == 1:
            return None
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool = os.getpid(), ThreadPoolExecutor(self.threads)
        return self._pool[1]

    def warm_up(self) -> None:
        """Load what shards need; children share it, other ranks do it while inputs are listed."""
        prepare_image(encode_png(np.zeros((8, 8), np.uint8)), self.settings.image, "full")
        parquet_bytes(pa.table({"x": pa.array(["x"])}))

    def columns(self, labels_sha256: str) -> list[LabelColumn]:
        """Give the label columns, read once from the dataset: tasks need not carry all names."""
        if not self._columns:
            data = self.storage().read_bytes(LABELS_NAME)
            if sha256_hex(data) != labels_sha256:
                raise UserError(
                    f"{self.out}: {LABELS_NAME} is not the one of this plan; another job writes "
                    "to the same place"
                )
            self._columns = parse_labels(data)
        return self._columns

    def __call__(self, task: Task) -> "Done":
        """Write one shard."""
        start = time.monotonic()
        record = _Shard(task, self).write()
        pa.default_memory_pool().release_unused()
        rank = launcher_rank()
        worker = f"pid{os.getpid()}" if rank is None else f"rank{rank}"
        return Done(record, worker, time.monotonic() - start)


class Done(NamedTuple):
    """A finished task."""

    record: dict[str, Any]
    # who did it, and how long it took in seconds
    worker: str
    seconds: float


def commit_name(number: int) -> str:
    """Give the name of a shard's commit record."""
    return f"_commit/shard-{number:06d}.json"


class _Shard:
    """One shard in the making."""

    def __init__(self, task: Task, work: ShardWork) -> None:
        self.task, self.work = task, work
        self.sources, self.settings = work.sources(), work.settings
        self.columns = work.columns(task.labels_sha256)
        self.rows = Rows(self.columns)

    def write(self) -> dict[str, Any]:
        """Write and publish the shard with its index and ledger; give its commit record.

        Raises:
            DataError: An input changed or vanished since it was listed.
            VitscaleError: An input or the storage cannot be reached.
        """
        storage, name = self.work.storage(), self.task.name
        with storage.open_temp() as file:
            try:
                writer = WRITERS[self.settings.format](file, self.columns)
                try:
                    self._fill(writer)
                except BaseException:
                    writer.abandon()
                    raise
                shard = writer.close()
                if shard.offsets:
                    storage.put_file(name, file.name)
            finally:
                Path(file.name).unlink(missing_ok=True)
        index = self.rows.index_bytes(shard.offsets)
        ledger = self.rows.ledger_bytes()
        if index:
            storage.put(index_name(name), index)
        storage.put(ledger_name(name), ledger)
        record = {
            "version": COMMIT_VERSION,
            "plan_digest": self.task.plan_digest,
            "number": self.task.number,
            "name": name,
            "num_inputs": len(self.task.items),
            **self.rows.counts(),
            "num_bytes": shard.num_bytes if index else 0,
            "sha256": shard.sha256,
            "index_bytes": len(index),
            "index_sha256": sha256_hex(index),
            "ledger_bytes": len(ledger),
            "ledger_sha256": sha256_hex(ledger),
        }
        storage.put(commit_name(self.task.number), json_bytes(record))
        return record

    def _fill(self, writer: TarShardWriter | ArrowShardWriter) -> None:
        pairs = zip(self.task.items, self._ready(), strict=True)
        for position, (item, ready) in enumerate(pairs):
            key = f"{self.task.first + position:0{KEY_DIGITS}d}"
            origin = _origin(item, self.sources)
            if isinstance(ready.image, BadInputError):
                self.rows.add_failed(origin, key, ready)
            elif ready.xxh3 in self.settings.excluded:
                self.rows.add_excluded(origin, key, ready)
            else:
                writer.add(key, item.labels, ready.image.data, ready.image.image_format)
                self.rows.add_packed(origin, key, ready, ready.image)

    def _ready(self) -> Iterator[Ready]:
        """Give the inputs in their order, read and prepared by the threads, if there are any."""
        pool = self.work.pool()
        if pool is None:
            yield from map(self._prepare, self.task.items)
            return
        queue: deque[tuple[int, Future[Ready]]] = deque()
        ahead = 0
        for item in self.task.items:
            queue.append((item.entry.num_bytes, pool.submit(self._prepare, item)))
            ahead += item.entry.num_bytes
            while len(queue) > 4 * self.work.threads or (ahead > AHEAD_BYTES and len(queue) > 1):
                num_bytes, future = queue.popleft()
                ahead -= num_bytes
                yield future.result()
        while queue:
            yield queue.popleft()[1].result()

    def _prepare(self, item: Item) -> Ready:
        if item.entry.problem:
            return Ready(
                item.labels, item.entry.num_bytes, None, BadInputError(item.entry.problem), 0
            )
        data = b""
        xxh3 = None
        try:
            data = self.sources[item.source].read(item.entry)
            xxh3 = xxhash.xxh3_64_intdigest(data)
            image = prepare_image(data, self.settings.image, self.settings.check)
        except BadInputError as error:
            return Ready(item.labels, len(data) or item.entry.num_bytes, xxh3, error, 0)
        except OSError as error:
            # An outage is no verdict on an image: the shard stays undone.
            raise VitscaleError(
                f"cannot read input {_origin(item, self.sources)}: {error.strerror or error}; "
                "run the same command again to go on"
            ) from error
        same = image.data is data
        stored = xxh3 if same else xxhash.xxh3_64_intdigest(image.data)
        return Ready(item.labels, len(data), xxh3, image, stored)


def load_commit(storage: Storage, number: int, plan_digest: str) -> dict[str, Any] | None:
    """Read a shard's commit record; None when there is none that is whole and of this plan."""
    try:
        record: dict[str, Any] = json.loads(storage.read_bytes(commit_name(number)))
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("version") != COMMIT_VERSION:
        return None
    return (
        record
        if record.get("plan_digest") == plan_digest and record.get("number") == number
        else None
    )


def is_done(record: dict[str, Any], sizes: dict[str, int]) -> bool:
    """Tell whether a shard's objects are there, with the sizes that its commit record says.

    Args:
        record: The commit record.
        sizes: Size in bytes of every object of the dataset.
    """
    name = record["name"]
    wanted = {ledger_name(name): record["ledger_bytes"]}
    if record["num_samples"]:
        wanted |= {name: record["num_bytes"], index_name(name): record["index_bytes"]}
    return all(sizes.get(object_name) == size for object_name, size in wanted.items())


def _origin(item: Item, sources: list[Source]) -> str:
    number = f"{item.source}." if len(sources) > 1 else ""
    return f"{number}{sources[item.source].kind}:{printable(item.entry.name)}"
