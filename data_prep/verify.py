"""`vitscale verify`: is a dataset on storage what it was when it was packed."""

import sys

if __package__ in (None, ""):  # started by path: put the checkout, not this folder, on the path
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import pyarrow as pa
import xxhash

from data_prep import comm
from data_prep.check_tables import Damage, check_record_sums, check_tables, record_numbers
from data_prep.images import decode_fully
from data_prep.pack_arguments import add_labels
from data_prep.quarantined import merge_quarantine
from data_prep.repair import PURPOSE, make_work, read_plan, repair, restore_shard_table
from data_prep.verdict import BadInputError
from vitscale.config.errors import EXIT_DATA, EXIT_DONE, DataError, UserError, exit_code_of
from vitscale.data.lease import Lease
from vitscale.data.manifest import (
    MANIFEST_NAME,
    SHARDS_NAME,
    Manifest,
    ShardIndex,
    index_name,
    load_index,
    load_manifest,
    sha256_hex,
)
from vitscale.data.parquet_shard import ParquetShard, RowGroups
from vitscale.data.storage import Storage, open_storage
from vitscale.observe.progress import Progress

Level = Literal["head", "hash", "decode"]
SHOWN_DAMAGE = 50
EPILOG = """\
levels, each with all of the one before:
  head     manifest, tables, labels, ledger and commit records have their hashes and agree; every
           object is there with its size, and none that does not belong to the dataset
  hash     every shard and index has its sha256, every image its hash at its offset
  decode   every image decodes to the last pixel and has the width and height of the index

examples:
  vitscale verify /packed/flowers/train
  vitscale verify s3://bucket/in21k/train --level decode --workers 16 --out report.json
  mpiexec -n 32 vitscale verify s3://bucket/in21k/train
  vitscale verify /packed/flowers/train --repair --source imagefolder:/data/flowers/train
  vitscale verify s3://bucket/in21k/train --quarantine runs/b16 --merge-into exclude.parquet

exit codes: 0 sound, 3 damaged, 2 no dataset there, 1 else.
"""


class Checked(NamedTuple):
    """What a look at one shard gave."""

    shard_id: int
    damage: list[Damage]
    # of its samples, as in its commit record; 0 and empty where the index is damaged
    keys_sum64: int
    samples_sha256: str


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
    _numbers: dict[str, int] | None = None

    def storage(self) -> Storage:
        """Open the store."""
        return open_storage(self.uri)

    def opened(self) -> tuple[Storage, Manifest]:
        """Give storage and manifest, read once."""
        if self._opened is None:
            storage = self.storage()
            self._opened = storage, load_manifest(storage)
        return self._opened

    def numbers(self) -> dict[str, int]:
        """Give `record_numbers`, made once: the manifest has as many as shards."""
        if self._numbers is None:
            self._numbers = record_numbers(self.opened()[1])
        return self._numbers

    def fresh(self) -> "ShardCheck":
        """Give one that has opened nothing, for other processes."""
        return ShardCheck(self.uri, self.level)

    def __call__(self, shard_id: int) -> Checked:
        """Check one shard."""
        storage, manifest = self.opened()
        name = manifest.shards.names[shard_id]
        try:
            index = load_index(storage, manifest, shard_id)
        except DataError as error:
            return Checked(shard_id, [Damage(index_name(name), None, None, str(error))], 0, "")
        try:
            with _content(storage, name) as content:
                damage = _check_content(content, manifest, shard_id, index, self.level)
        except FileNotFoundError:
            damage = [Damage(name, None, None, "is missing")]
        keys, samples = _summary(index)
        sums = {"keys_sum64": keys, "samples_sha256": samples}
        number = self.numbers().get(name.rpartition(".")[0])
        if number is not None:
            damage += check_record_sums(storage, number, sums)
        return Checked(shard_id, damage, keys, samples)


def _summary(index: ShardIndex) -> tuple[int, str]:
    """Give the sum of the hashes of the keys and the digest of the samples of a shard."""
    digest = hashlib.sha256()
    values = zip(*(column.to_pylist() for column in index.columns.values()), strict=True)
    for key, xxh3, own in zip(index.keys, index.xxh3.tolist(), values, strict=True):
        labels = tuple(tuple(v) if isinstance(v, list) else (v,) for v in own)
        digest.update(f"{key} {xxh3:016x} {labels}\n".encode())
    keys = sum(xxhash.xxh64_intdigest(key.encode()) for key in index.keys)
    return keys % 2**64, digest.hexdigest()


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
        return [Damage(MANIFEST_NAME, None, None, str(error))]
    damage = check_tables(storage, manifest)
    # By a damaged manifest nothing else can be judged.
    if check.level == "head" or any(item.shard == MANIFEST_NAME for item in damage):
        return damage
    named = {item.shard for item in damage if item.reason == "is missing"}
    work = check.fresh()
    crew.share(work)
    results = crew.map(work, range(manifest.num_shards))
    progress = Progress(manifest.num_shards, "shards", "verify")
    shards: dict[int, Checked] = {}
    for checked in results:
        damage += [item for item in checked.damage if item.shard not in named]
        shards[checked.shard_id] = checked._replace(damage=[])
        progress.update(1, damaged=len(damage))
    progress.close()
    if not damage:
        ordered = [shards[number] for number in range(manifest.num_shards)]
        damage = _check_samples(manifest, ordered)
    return sorted(damage, key=lambda item: (item.shard, item.offset or 0))


def _check_samples(manifest: Manifest, shards: list[Checked]) -> list[Damage]:
    """Compare what the indexes hold with what the manifest says of the samples."""
    pairs = {
        "keys_sum64": sum(shard.keys_sum64 for shard in shards) % 2**64,
        "samples_sha256": sha256_hex("".join(shard.samples_sha256 for shard in shards).encode()),
    }
    return [
        Damage(MANIFEST_NAME, None, None, f"{name} is {getattr(manifest, name)}, found {value}")
        for name, value in pairs.items()
        if getattr(manifest, name) != value
    ]


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
    for row, data in enumerate(_images(content, manifest, name, index)):
        reason = data if isinstance(data, str) else _sample_reason(data, index, row, level)
        if reason:
            damage.append(Damage(name, index.keys[row], int(index.offsets[row]), reason))
    found, wanted = hashlib.sha256(content).hexdigest(), manifest.shards.sha256[shard_id]
    if found != wanted and not damage:
        reason = (
            f"sha256 is {found}, was {wanted} when it was packed; "
            "all images are whole, a header or a label is not"
        )
        damage.append(Damage(name, None, None, reason))
    return damage


def _images(
    content: memoryview, manifest: Manifest, name: str, index: ShardIndex
) -> Iterator[bytes | str]:
    """Give the images of a shard, or why one cannot be read."""
    if manifest.format != "parquet":
        for offset, num_bytes in zip(index.offsets.tolist(), index.num_bytes.tolist(), strict=True):
            yield bytes(content[offset : offset + num_bytes])
        return
    try:
        source = pa.BufferReader(pa.py_buffer(content))
        shard = ParquetShard(source, name, manifest.image["column"], RowGroups(0))
    except DataError as error:
        yield from [str(error)] * len(index)
        return
    for row in index.offsets.tolist():
        try:
            yield shard.image(row) or b""
        except DataError as error:
            yield str(error)


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
    parser.add_argument(
        "--quarantine",
        type=Path,
        metavar="RUN_DIR|FILE",
        help="look again at the samples that a run replaced, and at nothing else",
    )
    parser.add_argument(
        "--merge-into",
        metavar="FILE",
        help="with --quarantine: list those that are still bad for data.exclude; adds to a list",
    )
    add_labels(parser)
    args = parser.parse_args(argv)
    quiet = (comm.launcher_rank() or 0) > 0
    if args.merge_into and not args.quarantine:
        parser.error("--merge-into needs --quarantine")
    if args.quarantine:
        return exit_code_of(lambda: merge_quarantine(args.uri, args.quarantine, args.merge_into))
    return exit_code_of(lambda: _run(args), quiet=quiet)


def _run(args: argparse.Namespace) -> int:
    check = ShardCheck(args.uri, args.level)

    def body(crew: comm.Crew) -> int:
        if args.workers < 1:
            raise UserError(f"--workers {args.workers}: at least 1")
        if args.repair and not args.source:
            raise UserError(
                "--repair needs the sources: give --source KIND:URI, and how to read them, as for "
                f"the `vitscale pack` that made {args.uri}"
            )
        start = time.monotonic()
        damage = _verify_and_repair(crew, args, check) if args.repair else verify(crew, check)
        return _report(args, check, damage, time.monotonic() - start)

    return comm.run(body, check.fresh, args.workers)


def _verify_and_repair(
    crew: comm.Crew, args: argparse.Namespace, check: ShardCheck
) -> list[Damage]:
    """Check, make what is damaged anew, and check again; give what is damaged then."""
    if restore_shard_table(check.storage()):
        print(f"repaired {SHARDS_NAME} from the commit records")
    damage = verify(crew, check)
    if not damage:
        return damage
    storage, manifest = check.opened()
    names = {item.shard for item in damage}
    print(f"damaged: {', '.join(sorted(names)[:SHOWN_DAMAGE])}")
    work = make_work(args, read_plan(storage), frozenset(names))
    with Lease(storage, PURPOSE):
        count = repair(crew, work, storage, manifest)
    print(f"repaired {count} shards; checking again")
    return verify(crew, check.fresh())


def _report(
    args: argparse.Namespace, check: ShardCheck, damage: list[Damage], seconds: float
) -> int:
    for item in damage[:SHOWN_DAMAGE]:
        place = f" key={item.key} offset={item.offset}" if item.key is not None else ""
        print(f"damaged shard={item.shard}{place} reason={item.reason}")
    if len(damage) > SHOWN_DAMAGE:
        print(f"and {len(damage) - SHOWN_DAMAGE} more; --out FILE has them all")
    report: dict[str, object] = {
        "uri": args.uri,
        "level": args.level,
        "sound": not damage,
        "seconds": round(seconds, 2),
    }
    if not any(item.shard == MANIFEST_NAME for item in damage):
        _, manifest = check.opened()
        report |= {
            "num_shards": manifest.num_shards,
            "num_samples": manifest.num_samples,
            "num_bytes": manifest.num_bytes,
        }
        if args.level != "head":
            report["bytes_per_s"] = round(manifest.num_bytes / max(seconds, 1e-3))
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
