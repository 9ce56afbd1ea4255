"""`vitscale labels`: the label columns of a dataset, and how to add and remove one."""

import sys

if __package__ in (None, ""):  # started by path: python data_prep/labels.py
    from pathlib import Path

    sys.path[0] = str(
        Path(__file__).resolve().parents[1]
    )  # the checkout's root instead of the script's folder

import argparse
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from data_prep.label_join import Int64, Joined, by_shard, join_labels
from data_prep.label_map import load_label_map
from data_prep.label_rows import LabelList, ListOptions
from vitscale.config.errors import EXIT_DONE, UserError, exit_code_of
from vitscale.data.audit import hash_key
from vitscale.data.label_columns import NO_LABEL, LabelColumn
from vitscale.data.label_sidecar import (
    COLUMN_NAME,
    PREFIX,
    SidecarShard,
    list_sidecars,
    load_sidecar,
    sidecar_bytes,
    sidecar_name,
    sidecar_schema,
    sidecar_shard_name,
)
from vitscale.data.lease import Lease
from vitscale.data.manifest import (
    INDEX_FIELDS,
    Manifest,
    load_index,
    load_manifest,
    parquet_bytes,
    sha256_hex,
)
from vitscale.data.storage import Storage, open_storage
from vitscale.observe.progress import Progress

EPILOG = """\
The list is a CSV or TSV file (gzipped or not), JSON lines or Parquet, with one row a sample: its
key, and its label. Instead of the key it may give the `source` that the ledger has for a sample,
such as imagefolder:tench/x.jpg. Labels are names, or numbers that count the classes from 0; an
empty cell or -1 is no label. With --multi, a cell may hold a list, and a key may come in any
number of rows.

Nothing that is there is rewritten: the labels go to labels/NAME/ beside the shards, and to
labels/NAME.json when they are complete. The same command goes on after an interruption. A recipe
takes the column with data.label_column = "NAME"; samples without a label are then left out.

examples:
  vitscale labels /packed/train
  vitscale labels s3://bucket/train --add cleaned --from cleaned.parquet --names classes.txt
  vitscale labels /packed/val --add real --multi --from real.csv --label-separator ' '
  vitscale labels /packed/train --add fine --from fine.csv --key-column file --by source
  vitscale labels /packed/train --remove cleaned

exit codes: 0 done, 2 wrong input, 3 the dataset is damaged, 1 else.
"""


@dataclass
class _Written:
    """Objects of a column."""

    written: int = 0
    # were there already, with the same content
    kept: int = 0


def show_columns(storage: Storage, manifest: Manifest) -> None:
    """Print a line for every column: the stored ones, the default first, then the added ones."""
    for own in manifest.columns:
        print(_line(own["name"], "stored", own["multi"], own["num_classes"]))
    for name in list_sidecars(storage):
        sidecar = load_sidecar(storage, manifest, name)
        column = sidecar.column
        coverage = _coverage(sidecar.num_labelled, manifest.num_samples)
        print(_line(name, "added", column.multi, len(column.names)) + f" {coverage}")


def _line(name: str, kind: str, multi: bool, num_classes: int) -> str:
    return f"column={name} kind={kind} multi={str(multi).lower()} num_classes={num_classes}"


def _coverage(num_labelled: int, num_samples: int) -> str:
    share = num_labelled / max(num_samples, 1)
    return f"labelled={num_labelled} of={num_samples} coverage={share:.4f}"


def remove_column(storage: Storage, manifest: Manifest, name: str) -> int:
    """Delete the objects of an added column; give their count.

    Raises:
        UserError: There is no such column, or it is a stored one.
    """
    if name in [column["name"] for column in manifest.columns]:
        raise UserError(
            f"{storage.uri}: column {name!r} is part of the shards; only added columns can go"
        )
    parts = storage.list(f"{PREFIX}{name}/") if COLUMN_NAME.fullmatch(name) else []
    complete = storage.size(sidecar_name(name)) is not None
    if not complete and not parts:
        raise UserError(
            f"{storage.uri} has no added column {name!r}; there are: "
            f"{', '.join(list_sidecars(storage)) or 'none'}"
        )
    # First what makes it a column: one that is half gone must not look like one.
    for object_name in [sidecar_name(name), *parts]:
        storage.delete(object_name)
    return len(parts) + complete


def write_column(storage: Storage, manifest: Manifest, joined: Joined, lease: Lease) -> _Written:
    """Write an added column: its parts, then what completes it.

    Args:
        storage: The dataset.
        manifest: Its manifest.
        joined: The labels.
        lease: The right to write.

    Raises:
        UserError: The column is there already, with other labels.
    """
    column, done = joined.column, _Written()
    complete = storage.size(sidecar_name(column.name)) is not None
    shards = []
    progress = Progress(manifest.num_shards, "shards", "write")
    for shard_id, (rows, classes) in enumerate(by_shard(joined, manifest.shards.starts)):
        lease.check()
        keys = load_index(storage, manifest, shard_id).keys
        data = parquet_bytes(_part(column, keys, rows, classes))
        name = sidecar_shard_name(column.name, manifest.shards.names[shard_id])
        if _is_there(storage, name, data):
            done.kept += 1
        elif complete:
            raise _other_labels(storage, column.name)
        else:
            storage.put(name, data)
            done.written += 1
        labelled = np.unique(rows).tolist()
        keys_sum64 = sum(hash_key(keys[row]) for row in labelled) % 2**64
        shards.append(SidecarShard(sha256_hex(data), len(labelled), keys_sum64))
        progress.update()
    progress.close()
    data, name = sidecar_bytes(column, manifest, shards), sidecar_name(column.name)
    if not storage.create_once(name, data) and storage.read_bytes(name) != data:
        raise _other_labels(storage, column.name)
    return done


def _part(column: LabelColumn, keys: list[str], rows: Int64, classes: Int64) -> pa.Table:
    """Build the table of one shard; rows ascend."""
    if column.multi:
        ends = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(keys)))])
        values = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(classes))
    else:
        labels = np.full(len(keys), NO_LABEL, np.int64)
        labels[rows] = classes
        values = pa.array(labels)
    return pa.table([pa.array(keys, pa.string()), values], schema=sidecar_schema(column))


def _is_there(storage: Storage, name: str, data: bytes) -> bool:
    if storage.size(name) != len(data):
        return False
    return storage.read_bytes(name) == data


def _other_labels(storage: Storage, name: str) -> UserError:
    return UserError(
        f"{storage.uri} has a column {name!r} already, with other labels; choose another name, or "
        f"remove it first (vitscale labels {storage.uri} --remove {name})"
    )


def _add(args: argparse.Namespace, storage: Storage, manifest: Manifest) -> None:
    options = ListOptions(
        args.key_column, args.value_column, args.by, args.label_separator, args.delimiter
    )
    labels = LabelList(args.list_uri, args.add, args.multi, options)
    names = load_label_map(args.names) if args.names else None
    joined, some = join_labels(storage, manifest, labels, names)
    if joined.num_unknown and not args.ignore_unknown:
        first = load_index(storage, manifest, 0)
        like = f"; keys look like {first.keys[0]!r}" if labels.by == "key" and len(first) else ""
        raise UserError(
            f"{joined.num_unknown} rows of {args.list_uri} have a {labels.by} that no sample of "
            f"{storage.uri} has, first in row {some[0]}: "
            f"{', '.join(map(repr, labels.keys(some)))}{like}. Correct them, or leave them out "
            "with --ignore-unknown"
        )
    with Lease(storage, f"labels --add {args.add}") as lease:
        lease.start()
        done = write_column(storage, manifest, joined, lease)
    sidecar = load_sidecar(storage, manifest, args.add)
    print(
        f"added {_line(args.add, 'added', args.multi, len(joined.column.names))} "
        f"{_coverage(sidecar.num_labelled, manifest.num_samples)} unknown={joined.num_unknown} "
        f"written={done.written} kept={done.kept} uri={storage.uri}"
    )


def _check_add(args: argparse.Namespace, manifest: Manifest) -> None:
    if args.list_uri is None:
        raise UserError(f"--add {args.add} needs the labels: --from FILE")
    if not COLUMN_NAME.fullmatch(args.add):
        raise UserError(
            f"--add {args.add!r}: a column's name is a letter, then letters, digits and _, up to "
            "64 in all"
        )
    taken = {"image", *(field.name for field in INDEX_FIELDS)}
    if args.add in taken | {column["name"] for column in manifest.columns}:
        raise UserError(
            f"--add {args.add}: the dataset has a field of that name already; choose another one"
        )
    if args.label_separator is not None and not args.multi:
        raise UserError("--label-separator goes with --multi")


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments; None takes the process's own.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="vitscale labels",
        description="List the label columns of a packed dataset, add one from a list, remove one.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("uri", metavar="URI", help="the dataset: a path, file:///path or s3://bucket/prefix")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--add", metavar="NAME", help="add a column of this name")
    what.add_argument("--remove", metavar="NAME", help="delete the objects of an added column")
    add("--from", dest="list_uri", metavar="FILE", help="the list, a path or s3://bucket/name")
    add("--multi", action="store_true", help="any number of labels a sample")
    add(
        "--names",
        "--label-map",
        metavar="FILE",
        help="names of the classes in their order: one a line, JSON, or a packed dataset; default: "
        "0 to the largest number, or the names in the list, sorted",
    )
    add("--key-column", metavar="NAME", help="column with the keys; default: key, or else source")
    add("--by", choices=["key", "source"], help="what it holds; default: as the column is called")
    add(
        "--value-column",
        metavar="NAME",
        help="column with the labels; default: label, NAME of --add, or the only other one",
    )
    add("--label-separator", metavar="TEXT", help="between the labels in a cell, with --multi")
    add("--delimiter", metavar="C", help="between columns of a text; default: found")
    add("--ignore-unknown", action="store_true", help="count rows whose key no sample has")
    args = parser.parse_args(argv)
    return exit_code_of(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if args.list_uri is not None and args.add is None:
        raise UserError("--from goes with --add NAME")
    storage = open_storage(args.uri)
    manifest = load_manifest(storage)
    if args.add is not None:
        _check_add(args, manifest)
        _add(args, storage, manifest)
    elif args.remove is not None:
        with Lease(storage, f"labels --remove {args.remove}") as lease:
            lease.start()
            count = remove_column(storage, manifest, args.remove)
        print(f"removed column={args.remove} objects={count} uri={storage.uri}")
    else:
        show_columns(storage, manifest)
    return EXIT_DONE


if __name__ == "__main__":
    raise SystemExit(main())
