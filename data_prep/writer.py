"""One shard, from its task to its commit record.

Shard, index and ledger are published first, the record last: it says what they must look like, and
so whether the shard is done. Everything is read once and hashed while it is written.
"""

import io
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from data_prep.images import BadImageError, Prepared, prepare_image
from data_prep.plan import KEY_DIGITS, Item, Settings, Task
from data_prep.sources.build import Source, build_source, printable
from vitscale.config.errors import VitscaleError
from vitscale.data.manifest import (
    INDEX_SCHEMA,
    index_name,
    json_bytes,
    ledger_name,
    parquet_bytes,
    sha256_hex,
)
from vitscale.data.storage import Storage, open_storage
from vitscale.data.tar_shard import TarShardWriter

COMMIT_VERSION = 1
SHOWN_FAILURES = 3
# source: KIND:NAME of the input, as data_prep.sources.build.printable writes names (N.KIND:NAME
# with several sources)
LEDGER_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("key", pa.string()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("label", pa.int64()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("image_format", pa.string()),
        ("num_bytes", pa.int64()),
        ("xxh3_64", pa.uint64()),
    ]
)


@dataclass
class ShardWork:
    """Does tasks; every process builds its own, and opens sources and storage at the first task.

    Args:
        specs: The sources as on the command line.
        settings: Of the dataset.
        out: URI of the dataset.
    """

    specs: list[str]
    settings: Settings
    out: str
    _sources: list[Source] = field(default_factory=list, init=False)
    _storage: Storage | None = field(default=None, init=False)

    def sources(self) -> list[Source]:
        """Give the sources, built once."""
        if not self._sources:
            self._sources = [build_source(spec, self.settings.split) for spec in self.specs]
        return self._sources

    def storage(self) -> Storage:
        """Give the store of the dataset, opened once."""
        if self._storage is None:
            self._storage = open_storage(self.out)
        return self._storage

    def warm_up(self) -> None:
        """Load what shards need; children share it, other ranks do it while inputs are listed."""
        TarShardWriter(io.BytesIO())

    def __call__(self, task: Task) -> dict[str, Any]:
        """Write one shard; give its commit record."""
        return write_shard(task, self.sources(), self.storage(), self.settings)


def commit_name(number: int) -> str:
    """Give the name of a shard's commit record."""
    return f"_commit/shard-{number:06d}.json"


def write_shard(
    task: Task, sources: list[Source], storage: Storage, settings: Settings
) -> dict[str, Any]:
    """Write and publish one shard with its index and ledger.

    Returns:
        The commit record, which is published too.

    Raises:
        DataError: An input changed or vanished since it was listed.
        VitscaleError: An input or the storage cannot be reached.
    """
    rows = _Rows()
    with storage.open_temp() as file:
        try:
            tar = TarShardWriter(file)
            for position, item in enumerate(task.items):
                key = f"{task.first + position:0{KEY_DIGITS}d}"
                try:
                    image = _prepare(item, sources, settings)
                except BadImageError as error:
                    rows.add_failed(_origin(item, sources), key, item.label, str(error))
                    continue
                offset = tar.add(key, item.label, image.data, image.image_format)
                rows.add_packed(_origin(item, sources), key, item.label, image, offset)
            num_bytes, sha256 = tar.close()
            file.flush()
            if rows.index:
                storage.put_file(task.name, file.name)
        finally:
            Path(file.name).unlink(missing_ok=True)
    index = parquet_bytes(pa.Table.from_pylist(rows.index, INDEX_SCHEMA)) if rows.index else b""
    ledger = parquet_bytes(pa.Table.from_pylist(rows.ledger, LEDGER_SCHEMA))
    if index:
        storage.put(index_name(task.name), index)
    storage.put(ledger_name(task.name), ledger)
    record = {
        "version": COMMIT_VERSION,
        "plan_digest": task.plan_digest,
        "number": task.number,
        "name": task.name,
        "num_inputs": len(task.items),
        "num_samples": len(rows.index),
        "num_failed": len(task.items) - len(rows.index),
        "failed": dict(rows.failed),
        "examples": rows.examples,
        "num_bytes": num_bytes if rows.index else 0,
        "sha256": sha256,
        "index_bytes": len(index),
        "index_sha256": sha256_hex(index),
        "ledger_bytes": len(ledger),
        "ledger_sha256": sha256_hex(ledger),
        "keys_sum64": rows.keys_sum64,
    }
    storage.put(commit_name(task.number), json_bytes(record))
    return record


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


class _Rows:
    """The rows of a shard's index and ledger as they grow, and what is counted over them."""

    def __init__(self) -> None:
        self.index: list[dict[str, Any]] = []
        self.ledger: list[dict[str, Any]] = []
        self.failed: Counter[str] = Counter()
        self.examples: list[str] = []
        self.keys_sum64 = 0

    def add_packed(self, origin: str, key: str, label: int, image: Prepared, offset: int) -> None:
        row = {
            "key": key,
            "label": label,
            "num_bytes": len(image.data),
            "width": image.width,
            "height": image.height,
            "image_format": image.image_format,
            "xxh3_64": xxhash.xxh3_64_intdigest(image.data),
        }
        self.index.append({**row, "offset": offset})
        self.ledger.append({**row, "source": origin, "status": "packed", "reason": ""})
        self.keys_sum64 = (self.keys_sum64 + xxhash.xxh64_intdigest(key.encode())) % 2**64

    def add_failed(self, origin: str, key: str, label: int, reason: str) -> None:
        row = {"source": origin, "key": key, "status": "failed", "reason": reason, "label": label}
        self.ledger.append(row)
        self.failed[reason.partition(":")[0]] += 1
        if len(self.examples) < SHOWN_FAILURES:
            self.examples.append(f"{origin}: {reason}")


def _prepare(item: Item, sources: list[Source], settings: Settings) -> Prepared:
    if item.problem:
        raise BadImageError(item.problem)
    try:
        data = sources[item.source].read(item.name, item.num_bytes)
    except (PermissionError, IsADirectoryError) as error:
        raise BadImageError(f"unreadable: {error.strerror}") from error
    except OSError as error:
        # An outage is no verdict on an image: the shard stays undone.
        raise VitscaleError(
            f"cannot read input {_origin(item, sources)}: {error.strerror}; run the same command "
            "again to go on"
        ) from error
    return prepare_image(data, settings.image, settings.check)


def _origin(item: Item, sources: list[Source]) -> str:
    number = f"{item.source}." if len(sources) > 1 else ""
    return f"{number}{sources[item.source].kind}:{printable(item.name)}"
