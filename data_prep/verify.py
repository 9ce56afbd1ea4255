"""`vitscale verify`: is a dataset on storage what it was when it was packed."""

import sys

if __package__ in (None, ""):  # started by path: python data_prep/verify.py
    from pathlib import Path

    sys.path[0] = str(
        Path(__file__).resolve().parents[1]
    )  # the checkout's root instead of the script's folder

import argparse
import contextlib
import hashlib
import io
import json
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

import pyarrow.parquet as pq
import xxhash

from data_prep import comm
from data_prep.images import decode_fully
from data_prep.pack_arguments import add_labels
from data_prep.repair import make_work, read_plan, repair, restore_shard_table
from data_prep.verdict import BadInputError
from vitscale.config.errors import EXIT_DATA, EXIT_DONE, DataError, UserError, exit_code_of
from vitscale.data.lease import Lease
from vitscale.data.manifest import (
    MANIFEST_NAME,
    SHARDS_NAME,
    Manifest,
    ShardIndex,
    index_name,
    load_class_names,
    load_index,
    load_manifest,
    sha256_hex,
)
from vitscale.data.storage import Storage, open_storage
from vitscale.observe.progress import Progress

Level = Literal["head", "hash", "decode"]
SHOWN_DAMAGE = 50
EPILOG = """\
levels, each with all of the one before:
  head     manifest, tables, labels, ledger have their hashes; every object is there with its size
  hash     every shard and index has its sha256, every image its hash at its offset
  decode   every image decodes to the last pixel and has the width and height of the index

examples:
  vitscale verify /packed/flowers/train
  vitscale verify s3://bucket/in21k/train --level decode --workers 16 --out report.json
  mpiexec -n 32 vitscale verify s3://bucket/in21k/train
  vitscale verify /packed/flowers/train --repair --source imagefolder:/data/flowers/train

exit codes: 0 sound, 3 damaged, 2 no dataset there, 1 else.
"""


@dataclass(frozen=True)
class Damage:
    """One thing that is not as it was."""

    # object of the dataset
    shard: str
    # sample, and where its image bytes start, if the damage is in one
    key: str | None
    offset: int | None
    reason: str


@dataclass
class ShardCheck:
    """Checks single shards; every process opens the dataset itself.

    Args:
        uri: The dataset.
        level: How deep.
    """

    uri: str
    level: Level
    _opened: tuple[Storage, Manifest] | None = None

    def forget(self) -> None:
        """Read the dataset anew at the next look."""
        self._opened = None

    def opened(self) -> tuple[Storage, Manifest]:
        """Give storage and manifest, read once."""
        if self._opened is None:
            storage = open_storage(self.uri)
            self._opened = storage, load_manifest(storage)
        return self._opened

    def __call__(self, shard_id: int) -> tuple[list[Damage], int]:
        """Give one shard's damage and the sum of the hashes of its keys."""
        storage, manifest = self.opened()
        name = manifest.shards.names[shard_id]
        try:
            index = load_index(storage, manifest, shard_id)
        except DataError as error:
            return [Damage(index_name(name), None, None, _reason(error))], 0
        keys_sum64 = sum(xxhash.xxh64_intdigest(key.encode()) for key in index.keys) % 2**64
        try:
            with _content(storage, name) as content:
                return _check_content(content, manifest, shard_id, index, self.level), keys_sum64
        except FileNotFoundError:
            return [Damage(name, None, None, "is missing")], keys_sum64


def verify(crew: comm.Crew, check: ShardCheck) -> list[Damage]:
    """Check a dataset.

    Args:
        crew: Who reads the shards.
        check: The dataset and the level.

    Returns:
        Everything that is damaged; empty for a sound dataset.

    Raises:
        UserError: There is no finished dataset.
    """
    try:
        storage, manifest = check.opened()
    except DataError as error:
        return [Damage(MANIFEST_NAME, None, None, _reason(error))]
    damage = _check_head(storage, manifest)
    if check.level == "head":
        return damage
    missing = {item.shard for item in damage if item.reason == "is missing"}
    crew.share(check)
    results = crew.map(check, range(manifest.num_shards))
    progress = Progress(manifest.num_shards, "shards", "verify")
    keys_sum64 = 0
    for found, keys in results:
        damage += [item for item in found if item.shard not in missing]
        keys_sum64 = (keys_sum64 + keys) % 2**64
        progress.update(1, damaged=len(damage))
    progress.close()
    if keys_sum64 != manifest.keys_sum64 and not damage:
        damage.append(
            Damage(
                MANIFEST_NAME, None, None, f"keys_sum64 is {keys_sum64}, was {manifest.keys_sum64}"
            )
        )
    return sorted(damage, key=lambda item: (item.shard, item.offset or 0))


def _check_head(storage: Storage, manifest: Manifest) -> list[Damage]:
    damage = []
    try:
        names = load_class_names(storage, manifest)
        if len(names) != manifest.num_classes:
            reason = f"has {len(names)} names, the manifest says {manifest.num_classes}"
            damage.append(Damage("labels.json", None, None, reason))
    except DataError as error:
        damage.append(Damage("labels.json", None, None, _reason(error)))
    sizes = storage.sizes()
    for name, wanted in zip(manifest.shards.names, manifest.shards.num_bytes.tolist(), strict=True):
        for object_name in (name, index_name(name)):
            if object_name not in sizes:
                damage.append(Damage(object_name, None, None, "is missing"))
        if name in sizes and sizes[name] != wanted:
            damage.append(
                Damage(
                    name, None, None, f"has {sizes[name]} bytes, had {wanted} when it was packed"
                )
            )
    rows = 0
    for entry in manifest.ledger:
        if entry["name"] not in sizes:
            damage.append(Damage(entry["name"], None, None, "is missing"))
            continue
        data = storage.read_bytes(entry["name"])
        found = sha256_hex(data)
        rows += pq.read_metadata(io.BytesIO(data)).num_rows if found == entry["sha256"] else 0
        if found != entry["sha256"]:
            reason = f"sha256 is {found}, was {entry['sha256']} when it was packed"
            damage.append(Damage(entry["name"], None, None, reason))
    inputs = manifest.num_samples + manifest.num_failed + manifest.num_excluded
    if rows != inputs and not damage:
        reason = f"the ledger has {rows} rows, {inputs} inputs were packed, failed or excluded"
        damage.append(Damage(MANIFEST_NAME, None, None, reason))
    return damage


@contextlib.contextmanager
def _content(storage: Storage, name: str) -> Iterator[memoryview]:
    """Give a shard's bytes: mapped where it is a file, in memory where it is not."""
    path = storage.local_path(name)
    if path is None or not os.path.exists(path) or not os.path.getsize(path):
        yield memoryview(storage.read_bytes(name))
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = memoryview(mapped)
        try:
            yield view
        finally:
            view.release()


def _check_content(
    content: memoryview, manifest: Manifest, shard_id: int, index: ShardIndex, level: Level
) -> list[Damage]:
    name = manifest.shards.names[shard_id]
    damage = []
    for row, key in enumerate(index.keys):
        offset, num_bytes = int(index.offsets[row]), int(index.num_bytes[row])
        reason = _sample_reason(bytes(content[offset : offset + num_bytes]), index, row, level)
        if reason:
            damage.append(Damage(name, key, offset, reason))
    found, wanted = hashlib.sha256(content).hexdigest(), manifest.shards.sha256[shard_id]
    if found != wanted and not damage:
        reason = (
            f"sha256 is {found}, was {wanted} when it was packed; "
            "all images are whole, a header or a label is not"
        )
        damage.append(Damage(name, None, None, reason))
    return damage


def _sample_reason(data: bytes, index: ShardIndex, row: int, level: Level) -> str:
    """Say what is wrong with a sample; empty when nothing is."""
    if len(data) != index.num_bytes[row]:
        return (
            f"{len(data)} bytes are there, {index.num_bytes[row]} were packed: the shard is cut off"
        )
    found, wanted = xxhash.xxh3_64_intdigest(data), int(index.xxh3[row])
    if found != wanted:
        return f"xxh3 is {found:016x}, was {wanted:016x} when it was packed"
    if level != "decode":
        return ""
    try:
        decoded = decode_fully(data)
    except BadInputError as error:
        return f"does not decode: {error}"
    indexed = (index.image_formats[row], int(index.widths[row]), int(index.heights[row]))
    return "" if decoded == indexed else f"decodes to {decoded}, the index says {indexed}"


def _reason(error: DataError) -> str:
    return str(error)


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments; None takes the process's own.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="vitscale verify",
        description="Check a packed dataset against the hashes that were written at packing.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    cpus = len(os.sched_getaffinity(0))
    parser.add_argument(
        "uri", metavar="URI", help="the dataset: a path, file:///path or s3://bucket/prefix"
    )
    parser.add_argument(
        "--level",
        default="hash",
        choices=["head", "hash", "decode"],
        help="how deep (default: hash)",
    )
    parser.add_argument("--out", metavar="FILE", help="write a report as JSON")
    parser.add_argument(
        "--workers", type=int, default=cpus, help=f"local processes (default: {cpus}, the CPUs)"
    )
    parser.add_argument(
        "--repair",
        action="store_true",
        help="make what is damaged anew from --source, given as for `vitscale pack`",
    )
    parser.add_argument("--source", action="append", default=[], metavar="KIND:URI")
    parser.add_argument("--exclude", metavar="FILE", help="the list that was given to pack")
    add_labels(parser)
    args = parser.parse_args(argv)
    return exit_code_of(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if args.workers < 1:
        raise UserError(f"--workers {args.workers}: at least 1")
    if args.repair and not args.source:
        raise UserError("--repair needs the sources: --source KIND:URI as for `vitscale pack`")
    check = ShardCheck(args.uri, args.level)

    def body(crew: comm.Crew) -> int:
        start = time.monotonic()
        if args.repair and restore_shard_table(open_storage(args.uri)):
            print(f"repaired {SHARDS_NAME} from the commit records")
        damage = verify(crew, check)
        if args.repair and damage:
            _repair(crew, args, check, damage)
            check.forget()
            damage = verify(crew, check)
        return _report(args, check, damage, time.monotonic() - start)

    return comm.run(body, lambda: check, args.workers)


def _repair(
    crew: comm.Crew, args: argparse.Namespace, check: ShardCheck, damage: list[Damage]
) -> None:
    storage, manifest = check.opened()
    names = {item.shard for item in damage}
    print(f"damaged: {', '.join(sorted(names)[:SHOWN_DAMAGE])}")
    work = make_work(args, read_plan(storage))
    with Lease(storage, "vitscale verify --repair"):
        count = repair(crew, work, storage, manifest, names)
    print(f"repaired {count} shards; checking again")


def _report(
    args: argparse.Namespace, check: ShardCheck, damage: list[Damage], seconds: float
) -> int:
    for item in damage[:SHOWN_DAMAGE]:
        place = f" key={item.key} offset={item.offset}" if item.key is not None else ""
        print(f"damaged shard={item.shard}{place} reason={item.reason}")
    if len(damage) > SHOWN_DAMAGE:
        print(f"and {len(damage) - SHOWN_DAMAGE} more; --out FILE has them all")
    report: dict[str, object] = {"uri": args.uri, "level": args.level, "sound": not damage}
    if not any(item.shard == MANIFEST_NAME for item in damage):
        _, manifest = check.opened()
        report |= {
            "num_shards": manifest.num_shards,
            "num_samples": manifest.num_samples,
            "num_bytes": manifest.num_bytes,
            "seconds": round(seconds, 2),
        }
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump({**report, "damage": [asdict(item) for item in damage]}, file, indent=2)
            file.write("\n")
    fields = " ".join(
        f"{key}={value}" for key, value in report.items() if key not in ("uri", "sound")
    )
    print(f"{'sound' if not damage else f'DAMAGED ({len(damage)})'} {args.uri} {fields}")
    return EXIT_DATA if damage else EXIT_DONE


if __name__ == "__main__":
    raise SystemExit(main())
