"""`vitscale show`: look at a dataset and at single samples of it."""

import sys

if __package__ in (None, ""):  # started by path: python data_prep/show.py
    from pathlib import Path

    sys.path[0] = str(
        Path(__file__).resolve().parents[1]
    )  # the checkout's root instead of the script's folder

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from vitscale.config.errors import EXIT_DONE, UserError, exit_code_of
from vitscale.data.dataset import Dataset, Sample, open_dataset
from vitscale.data.manifest import load_index

EPILOG = """\
examples:
  vitscale show /packed/flowers/train
  vitscale show s3://bucket/flowers/train --num 8 --save /tmp/look
  vitscale show /packed/flowers/train --key 000000042
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments; None takes the process's own.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="vitscale show",
        description="Show what a packed dataset is, and some of its samples.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "uri", metavar="URI", help="the dataset: a path, file:///path or s3://bucket/prefix"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--key", metavar="K", help="show the sample with this key")
    which.add_argument("--num", type=int, default=4, help="show the first N samples (default: 4)")
    parser.add_argument(
        "--save", metavar="DIR", help="also write the shown images there, as KEY.jpg and so on"
    )
    args = parser.parse_args(argv)
    return exit_code_of(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if args.num < 0:
        raise UserError(f"--num {args.num}: 0 or more")
    dataset = open_dataset(args.uri)
    names = dataset.class_names
    manifest = dataset.manifest
    print(
        f"{args.uri} split={manifest.split} format={manifest.format} "
        f"num_samples={manifest.num_samples} "
        f"num_classes={manifest.num_classes} num_shards={manifest.num_shards} "
        f"mb={manifest.num_bytes / 1e6:.1f} "
        f"num_failed={manifest.num_failed} image={manifest.image['policy']} "
        f"digest={manifest.digest[:16]}"
    )
    samples = (
        iter([_find(dataset, args.key)]) if args.key is not None else _first(dataset, args.num)
    )
    for sample in samples:
        print(
            f"key={sample.key} label={sample.label} class={names[sample.label]!r} "
            f"shard={sample.shard} "
            f"offset={sample.offset} format={sample.image_format} num_bytes={len(sample.image)}"
        )
        if args.save:
            _save(sample, Path(args.save))
    return EXIT_DONE


def _first(dataset: Dataset, num: int) -> Iterator[Sample]:
    return islice(dataset, num) if num > 0 else iter(())


def _find(dataset: Dataset, key: str) -> Sample:
    start = 0
    for shard_id in range(dataset.manifest.num_shards):
        keys = load_index(dataset.storage, dataset.manifest, shard_id).keys
        if key in keys:
            return dataset[start + keys.index(key)]
        start += len(keys)
    raise UserError(
        f"{dataset.storage.uri} has no sample {key!r}; keys look like {dataset[0].key!r}, and an "
        "input that failed "
        "has a row in the ledger only"
    )


def _save(sample: Sample, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{sample.key}.{sample.image_format}").write_bytes(sample.image)


if __name__ == "__main__":
    raise SystemExit(main())
