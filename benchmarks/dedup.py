"""How many planted copies `vitscale dedup` finds, and how many others it takes for copies.

    python benchmarks/dedup.py [--images 5000] [--near 6] [--work DIR]

The set holds patchworks of two photographs, all different; of a part of them a test set holds
copies of five kinds. Prints found / planted for every kind, and precision over near matches.
"""

import argparse
import contextlib
import io
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pyarrow.parquet as pq

from data_prep.dedup import main as dedup
from data_prep.pack import main as pack
from tests.helpers.collages import collage, copies, saved

KINDS = ("exact", "encoded", "resized", "flipped", "cropped")


def make_sets(root: Path, images: int, planted: int) -> None:
    """Write the folders: train with all pictures, one test folder a kind, one of strangers."""
    for number in range(images):
        data = saved(collage(number), quality=92)
        folder = root / "train" / "all"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:06d}.jpg").write_bytes(data)
        if number >= planted:
            continue
        for kind, copy in copies(data, number).items():
            (root / kind / "all").mkdir(parents=True, exist_ok=True)
            (root / kind / "all" / f"{number:06d}").write_bytes(copy)


def origins(out: Path) -> dict[str, str]:
    """Give key -> file name of a packed folder."""
    rows = (row for path in (out / "ledger").iterdir() for row in pq.read_table(path).to_pylist())
    return {row["key"]: row["source"].rpartition("/")[2].partition(".")[0] for row in rows}


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--near", type=int, default=6)
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    planted = args.images // 10
    with contextlib.ExitStack() as stack:
        root = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_sets(root, args.images, planted)
        for name in ("train", *KINDS):
            words = ["--source", f"imagefolder:{root / name}", "--out", str(root / f"{name}-out")]
            with contextlib.redirect_stderr(io.StringIO()):
                assert pack([*words, "--shard-bytes", "8MB"]) == 0
        train = origins(root / "train-out")
        for kind in KINDS:
            out = root / f"{kind}.parquet"
            start = time.monotonic()
            words = ["--train", str(root / "train-out"), "--against", str(root / f"{kind}-out")]
            with contextlib.redirect_stderr(io.StringIO()):
                assert dedup([*words, "--out", str(out), "--near", str(args.near)]) == 0
            seconds = time.monotonic() - start
            test = origins(root / f"{kind}-out")
            rows = pq.read_table(out).to_pylist()
            right = sum(train[row["key"]] == test[row["against_key"]] for row in rows)
            reasons = dict(Counter(row["reason"] for row in rows))
            print(
                f"{kind:8} recall={right / planted:.4f} precision={right / max(len(rows), 1):.4f} "
                f"planted={planted} found={reasons} pictures_per_s="
                f"{(args.images + planted) / seconds:.0f}"
            )


if __name__ == "__main__":
    main()
