"""The arguments of `vitscale pack`, with their help."""

import argparse
import os
import re

from data_prep.engine import Limit
from data_prep.images import ImagePolicy
from data_prep.sources.build import SourceOptions

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
DESCRIPTION = """\
Pack labelled images into WebDataset tar or Arrow shards with indexes, a ledger of every input and a
manifest.

The same inputs and settings give the same bytes, whoever does the work. A run that was stopped,
also by kill -9, goes on when the same command is given again. The manifest is written last: it says
that the dataset is complete.
"""
EPILOG = """\
sources (local paths; tar, webdataset, parquet and list also take s3://bucket/...; where several
files are possible: a folder, a pattern with * or {000..146}):
  imagefolder:DIR     one sub-folder a class; files at any depth, formats found from the content
  list:FILE           CSV, TSV, JSON lines or Parquet of paths (also s3://, https://) and labels
  tar:FILES zip:FILES archives; classes from --label-rule
  tartar:FILE|DIR     ImageNet: a tar of one tar for each class, or a folder of class tars
  imagenet_val:FILE   ILSVRC2012_img_val.tar or its folder, labels from --devkit (and --real)
  webdataset:FILES    WebDataset tars of anybody
  parquet:FILES       Hugging Face image datasets
  vitscale:URI        a dataset of ours, to be packed anew: other format, size, list of exclusions
  cifar10:DIR cifar100:DIR pets:DIR flowers:DIR idx:DIR     the official files; --split chooses
  digits:PART         scikit-learn's 1,797 digits; PART is train, test (every fifth) or all

examples:
  vitscale pack --source imagefolder:/data/flowers/train --out /packed/flowers/train
  vitscale pack --source list:s3://bucket/train.csv --out s3://bucket/train --dry-run
  vitscale pack --source tartar:/data/ILSVRC2012_img_train.tar --out s3://bucket/in1k/train \\
      --image resize --side 512 --workers 32
  mpiexec -n 64 vitscale pack --source tartar:/data/in21k --out s3://bucket/in21k --max-bad 1%
  vitscale pack --source vitscale:/packed/in1k --out /packed/in1k-arrow --format arrow

exit codes: 0 done, 2 wrong input, 3 more inputs failed than --max-bad allows, 1 else.
"""


def make_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(
        prog="vitscale pack",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--source",
        action="append",
        required=True,
        metavar="KIND:URI",
        help="what to pack; may be repeated",
    )
    add(
        "--out",
        required=True,
        metavar="URI",
        help="where to: a path, file:///path or s3://bucket/prefix",
    )
    add("--split", default="train", help="name of the split (default: train)")
    _add_layout(parser)
    add_labels(parser)
    _add_images(parser)
    _add_work(parser)
    return parser


def _add_layout(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("layout").add_argument
    add(
        "--format",
        default="tar",
        choices=["tar", "arrow"],
        help="kind of shard (default: tar); samples, keys and order are the same in both",
    )
    add(
        "--shard-bytes",
        type=num_bytes,
        default=256_000_000,
        metavar="SIZE",
        help="size to aim at (default: 256MB)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="seed of the shuffle that decides the stored order (default: 0)",
    )
    add(
        "--stratify",
        action="store_true",
        help="give every shard nearly the same share of every class",
    )
    add(
        "--spread",
        action="store_true",
        help="put shards below 256 prefixes, for stores that divide load by prefix",
    )
    add("--exclude", metavar="FILE", help="leave out the images in this list of `vitscale dedup`")


def add_labels(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how sources are read."""
    add = parser.add_argument_group("labels").add_argument
    add(
        "--label-map",
        metavar="FILE|URI",
        help="order of the classes: one name a line, a JSON list, or a packed dataset whose map is "
        "taken; other labels fail (default: the source's, or sorted names)",
    )
    add(
        "--allow-case-twins",
        action="store_true",
        help="accept classes whose names differ in case alone",
    )
    add(
        "--label-rule",
        default="parent",
        metavar="RULE",
        help="tar, zip: parent (folder of the member, default), top (its outermost folder), none, "
        "or a regular expression whose group is the class",
    )
    add(
        "--label-column",
        action="append",
        default=[],
        metavar="NAME",
        help="list, parquet, webdataset: column or JSON field with the label; may be repeated, the "
        "first is the one that is trained on",
    )
    add("--image-column", metavar="NAME", help="list, parquet: column with the path or image")
    add("--label-separator", metavar="TEXT", help="list: makes several labels of one, as in a;b")
    add("--delimiter", metavar="TEXT", help="list: between columns (default: found)")
    add("--image-root", metavar="URI", help="list: what paths are relative to (default: its place)")
    add("--devkit", metavar="PATH", help="imagenet_val: ILSVRC2012_devkit_t12, folder or .tar.gz")
    add("--real", metavar="FILE", help="imagenet_val: real.json as a second, multi-label column")


def _add_images(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("images").add_argument
    add(
        "--image",
        default="keep",
        choices=["keep", "resize"],
        help="keep: the input's bytes, where every decoder shows them alike, else what a viewer "
        "shows (default); resize: at most --side px, only down",
    )
    add("--side", type=int, default=512, help="px for --image resize (default: 512)")
    add(
        "--edge",
        default="short",
        choices=["short", "long"],
        help="the side that --side limits (default: short)",
    )
    add("--quality", type=int, default=90, help="of --image resize, 1 to 100 (default: 90)")
    add(
        "--encoding",
        default="jpeg",
        choices=["jpeg", "webp"],
        help="of resized images (default: jpeg)",
    )
    add(
        "--background",
        default="white",
        metavar="COLOUR",
        help="behind transparency: white (default), black, gray or #rrggbb",
    )
    add(
        "--animated",
        default="first",
        choices=["first", "refuse"],
        help="of animations, keep the first frame (default) or nothing",
    )
    add("--min-side", type=int, default=1, metavar="PX", help="smaller images fail (default: 1)")
    add(
        "--max-aspect",
        type=float,
        default=0.0,
        metavar="RATIO",
        help="images that are longer fail (default: 0, none)",
    )
    add(
        "--max-pixels",
        type=int,
        default=ImagePolicy.max_pixels,
        metavar="N",
        help=f"larger images fail, undecoded (default: {ImagePolicy.max_pixels})",
    )
    add(
        "--max-bytes",
        type=num_bytes,
        default=ImagePolicy.max_bytes,
        metavar="SIZE",
        help=f"larger inputs fail (default: {ImagePolicy.max_bytes})",
    )
    add(
        "--check",
        default="header",
        choices=["none", "header", "full"],
        help="none: format and size; header: also the end of the data and PNG checksums (default); "
        "full: decode",
    )


def _add_work(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("work").add_argument
    cpus = len(os.sched_getaffinity(0))
    add(
        "--workers",
        type=int,
        default=cpus,
        help=f"local processes (default: {cpus}, the CPUs); ranks do it under MPI",
    )
    add(
        "--threads",
        type=int,
        default=0,
        help="that read and prepare images in each process (default: 1, for remote sources 8)",
    )
    add(
        "--max-bad",
        type=limit,
        default=Limit(),
        metavar="N|P%",
        help="failed inputs to accept (default: any)",
    )
    add(
        "--retry-failed",
        action="store_true",
        help="write shards with failed inputs anew (before completion)",
    )
    add("--dry-run", action="store_true", help="list the inputs and show the plan, write nothing")


def source_options(args: argparse.Namespace, split: str) -> SourceOptions:
    """Give the options that the flags of `add_labels` say."""
    return SourceOptions(
        split=split,
        label_rule=args.label_rule,
        image_column=args.image_column,
        label_columns=tuple(args.label_column),
        label_separator=args.label_separator,
        delimiter=args.delimiter,
        image_root=args.image_root,
        devkit=args.devkit,
        real=args.real,
    )


def num_bytes(text: str) -> int:
    """Parse a size such as 256MB, 1GiB or 1000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?|)B?", text.strip().upper())
    if not match or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 256MB, 1GiB or 1000000")
    return int(float(match[1]) * UNITS[match[2]])


def limit(text: str) -> Limit:
    """Parse a number of inputs, or a share such as 1%."""
    match = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)%", text.strip())
    if not match or (match[2] and float(match[2]) > 100):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of inputs nor a share such as 1%"
        )
    return Limit(count=int(match[1])) if match[1] else Limit(share=float(match[2]) / 100)
