"""What a source is, and which one a `KIND:URI` on the command line means."""

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from vitscale.config.errors import UserError

# The label of one input in one column: the name of a class, its index where the column has names or
# numbers its classes, several of these where the column is multi-label.
LabelValue = str | int | tuple[str | int, ...]


class Entry(NamedTuple):
    """One input of a source."""

    # unique in the source; may hold lone surrogates for bytes that are not UTF-8
    name: str
    # expected size, for balancing shards and as a part of the plan
    num_bytes: int
    # one for each of the source's columns
    labels: tuple[LabelValue, ...]
    # why an input that was listed cannot even be read, "WORD: detail"; else empty
    problem: str = ""
    # how `read` finds it, if the name does not say; no part of the plan
    where: str = ""
    # inputs that are cheap to read only together share a block, and stay together in the order;
    # empty where every input can be read by itself
    block: str = ""


@dataclass(frozen=True)
class Column:
    """One kind of label that a source gives to its inputs."""

    # identifier; "label" where there is only one
    name: str
    # any number of classes an input, also none
    multi: bool = False
    # index -> class, where the source knows all classes and their order; else the classes are those
    # that occur, in the order of the bytes of their names, or by number where all are numbers
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class SourceOptions:
    """How sources are to be read; each source looks at what concerns it.

    Args:
        split: The split that is packed; sources that hold several choose by it.
        label_rule: tar, zip: "parent" (folder of the member), "top" (its outermost folder), "none",
            or a regular expression whose group `label`, or first group, is the class.
        image_column: list, parquet: column of the paths or images; None finds it.
        label_columns: list, parquet, arrow, webdataset: columns (or JSON fields) with labels; empty
            finds the one there is.
        label_separator: list: splits a label into several; None: each input has one.
        delimiter: list: between the columns; None finds it.
        image_root: list: what relative paths are relative to; None: the list's own folder.
        devkit: imagenet_val: ILSVRC2012 development kit (folder or .tar.gz) with the labels.
        real: imagenet_val: real.json, a second multi-label column.
    """

    split: str = "train"
    label_rule: str = "parent"
    image_column: str | None = None
    label_columns: tuple[str, ...] = ()
    label_separator: str | None = None
    delimiter: str | None = None
    image_root: str | None = None
    devkit: str | None = None
    real: str | None = None


class Source(Protocol):
    """Where labelled images come from. Objects are small: every rank builds its own."""

    kind: str

    def entries(self) -> Iterator[Entry]:
        """List all inputs, in any order, without holding them in memory."""

    def columns(self) -> list[Column]:
        """Give the kinds of label; called when `entries` has been used up."""

    def read(self, entry: Entry) -> bytes:
        """Give the encoded image of an input; called by several threads, also in other processes.

        Raises:
            DataError: It is gone or has changed since it was listed: the plan no longer holds.
            BadInputError: It alone cannot be read, for a reason that will not pass.
            OSError, StorageError: It cannot be reached now.
        """


# kind -> module, class, example of what follows the colon
KINDS = {
    "imagefolder": ("imagefolder", "ImageFolder", "/data/flowers/train"),
    "list": ("listfile", "ListFile", "/data/train.csv"),
    "tar": ("archives", "TarMembers", "/data/train.tar"),
    "zip": ("archives", "ZipMembers", "/data/train.zip"),
    "tartar": ("tartar", "ClassTars", "/data/ILSVRC2012_img_train.tar"),
    "imagenet_val": ("imagenet_val", "ImageNetVal", "/data/ILSVRC2012_img_val.tar"),
    "webdataset": ("foreign_tars", "ForeignTars", "'s3://bucket/train-*.tar'"),
    "parquet": ("parquet", "ParquetFiles", "'/data/train-*.parquet'"),
    "vitscale": ("packed", "PackedDataset", "s3://bucket/in21k/train"),
    "cifar10": ("cifar", "Cifar10", "/data/cifar-10-batches-py"),
    "cifar100": ("cifar", "Cifar100", "/data/cifar-100-python"),
    "pets": ("pets", "Pets", "/data/oxford-iiit-pet"),
    "flowers": ("flowers", "Flowers", "/data/flowers-102"),
    "idx": ("idx", "IdxFolder", "/data/fashion-mnist"),
    "digits": ("digits", "Digits", "train"),
}


def build_source(spec: str, options: SourceOptions) -> Source:
    """Make the source behind a command-line argument.

    Args:
        spec: KIND:URI, see `vitscale pack --help`.
        options: How to read it.

    Raises:
        UserError: The kind is unknown or the URI does not fit it.
    """
    kind, mark, uri = spec.partition(":")
    if kind not in KINDS or not mark:
        raise UserError(f"source {spec!r}: write KIND:URI with KIND one of {', '.join(KINDS)}")
    module, name, example = KINDS[kind]
    if not uri:
        raise UserError(
            f"source {spec!r}: nothing after the colon; write for example {kind}:{example}"
        )
    if "://" not in uri or uri.startswith("file://"):
        uri = os.path.expanduser(uri.removeprefix("file://"))
    made = getattr(importlib.import_module(f"data_prep.sources.{module}"), name)(uri, options)
    source: Source = made
    return source


def printable(name: str) -> str:
    r"""Write a file name as valid text from which its bytes can be recovered.

    Bytes that are not UTF-8 become \xNN, and a backslash becomes two; all else stays.
    """
    if "\\" not in name and name.isprintable():
        return name
    doubled = name.replace("\\", "\\\\")
    return os.fsencode(doubled).decode("utf-8", "backslashreplace")
