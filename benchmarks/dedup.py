"""How many planted copies `vitscale dedup` finds, how many others it takes for copies, how fast.

    python benchmarks/dedup.py [--samples 5000] [--images DIR] [--seed 0] [--near 8]
    python benchmarks/dedup.py --speed

The training set holds pictures that are all different: those of --images, or patchworks of
photographs and simple scenes (a sky and a few shapes, which are much alike). A tenth of them has
copies of five kinds in test sets, one set a kind. Prints found / planted of every kind and the
precision, by the command itself and by fingerprints for other numbers of bits. --speed measures the
matching alone, of random hashes.
"""

import argparse
import contextlib
import io
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pyarrow.parquet as pq
from PIL import Image, ImageDraw, UnidentifiedImageError

from data_prep.dedup import main as dedup
from data_prep.fingerprint import Fingerprints, FingerprintWork
from data_prep.near import NearIndex
from data_prep.pack import main as pack
from tests.helpers.collages import collage, copies, saved
from vitscale.data import open_dataset

KINDS = ("exact", "encoded", "resized", "flipped", "cropped")
SWEEP = (2, 4, 6, 8, 10, 12, 14)
# Rows of the training set and of the other, random hashes.
SPEED_SIZES = ((5_000, 5_000), (1_000_000, 50_000))


def scene(seed: int, width: int = 200, height: int = 150) -> Image.Image:
    """Draw a sky over a ground, with one to four shapes and a little noise."""
    rng = np.random.default_rng(seed)
    horizon = int(height * rng.uniform(0.3, 0.8))
    sky = rng.uniform((120, 160, 200), (180, 220, 255))
    ground = rng.uniform((60, 90, 30), (120, 150, 90))
    light = np.linspace(1.0, rng.uniform(0.5, 1.0), height)[:, None, None]
    pixels = np.where(np.arange(height)[:, None, None] < horizon, sky, ground) * light
    pixels = np.broadcast_to(pixels, (height, width, 3)) + rng.normal(0, 4, (height, width, 3))
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(rng.integers(1, 5)):
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        w, h = rng.uniform(10, 70, 2)
        shape = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        shape((x, y, x + w, y + h), fill=tuple(rng.integers(0, 256, 3).tolist()))
    return image


def found_in(folder: Path) -> Iterator[Image.Image]:
    """Give the pictures below a folder, each once."""
    seen = set()
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        try:
            with Image.open(path) as file:
                picture = file.convert("RGB")
        except (UnidentifiedImageError, OSError):
            continue
        picture.thumbnail((500, 500))
        if picture.tobytes() not in seen:
            seen.add(picture.tobytes())
            yield picture


def drawn(seed: int) -> Iterator[Image.Image]:
    """Give patchworks and scenes in turn."""
    number = seed * 1_000_000
    while True:
        yield collage(number) if number % 2 == 0 else scene(number)
        number += 1


def make_sets(root: Path, samples: int, images: Path | None, seed: int) -> tuple[int, int]:
    """Write the folders: train with all pictures, one test folder a kind.

    Returns:
        How many pictures there are, and of how many there are copies.
    """
    pictures = found_in(images) if images else drawn(seed)
    count = planted = 0
    for number, picture in enumerate(islice(pictures, samples)):
        data = saved(picture, quality=92)
        write(root / "train", number, data)
        count += 1
        # Neither all patchworks nor all scenes.
        if number % 20 in (0, 7):
            planted += 1
            for kind, copy in copies(data, number).items():
                write(root / kind, number, copy)
    return count, planted


def write(root: Path, number: int, data: bytes) -> None:
    """Write one picture of a set."""
    (root / "all").mkdir(parents=True, exist_ok=True)
    (root / "all" / f"{number:06d}").write_bytes(data)


def origins(out: Path) -> dict[str, int]:
    """Give key -> number of the picture, of a packed folder."""
    rows = (row for path in (out / "ledger").iterdir() for row in pq.read_table(path).to_pylist())
    return {row["key"]: int(row["source"].rpartition("/")[2]) for row in rows}


def fingerprints(out: Path) -> tuple[Fingerprints, np.ndarray, float]:
    """Give the fingerprints of a set, the numbers of its pictures, and the seconds it took."""
    work, data = FingerprintWork(str(out)), open_dataset(out)
    numbers = origins(out)
    start = time.monotonic()
    parts = [work(shard_id)[1] for shard_id in range(data.manifest.num_shards)]
    seconds = time.monotonic() - start
    keys = (sample.key for sample in data)
    return (
        Fingerprints.from_array(np.concatenate(parts)),
        np.asarray([numbers[key] for key in keys]),
        seconds,
    )


def measure_command(root: Path, kind: str, planted: int, near: int) -> None:
    """Run the command and count what it finds."""
    out = root / f"{kind}.parquet"
    words = ["--train", str(root / "train-out"), "--against", str(root / f"{kind}-out")]
    start = time.monotonic()
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        assert dedup([*words, "--out", str(out), "--near", str(near)]) == 0
    seconds = time.monotonic() - start
    train, test = origins(root / "train-out"), origins(root / f"{kind}-out")
    rows = pq.read_table(out).to_pylist()
    right = sum(train[row["key"]] == test[row["against_key"]] for row in rows)
    print(
        f"{kind:8} recall={right / planted:.4f} precision={right / max(len(rows), 1):.4f} "
        f"found={dict(Counter(row['reason'] for row in rows))} "
        f"samples_per_s={(len(train) + planted) / seconds:.0f}"
    )


def measure_bits(root: Path, planted: int) -> None:
    """Print recall and precision by near matches alone, for several numbers of bits."""
    own, numbers, seconds = fingerprints(root / "train-out")
    print(f"fingerprints: {len(own) / seconds:.0f} samples/s in one process")
    for kind in KINDS:
        others, other_numbers, _ = fingerprints(root / f"{kind}-out")
        texts = []
        for bits in SWEEP:
            pairs = NearIndex(others, bits).closest(own)
            right = int((numbers[pairs.row] == other_numbers[pairs.other]).sum())
            share = right / max(len(pairs.row), 1)
            texts.append(f"{bits}: {right / planted:.3f} / {share:.3f}")
        print(f"{kind:8} bits: recall / precision   {'   '.join(texts)}")


def measure_speed(rows: int, others: int, near: int) -> None:
    """Match random hashes in this process."""
    rng = np.random.default_rng(0)
    own, other = (
        Fingerprints.from_array(rng.integers(0, 2**64, (count, 7), np.uint64))
        for count in (rows, others)
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    index = NearIndex(other, near)
    built = time.monotonic()
    found = index.closest(own)
    end = time.monotonic()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"{rows} x {others} bits={near}: index {built - start:.2f} s, search {end - built:.2f} s, "
        f"{len(found.row)} matches, {(peak - before) / 1024:.0f} MB beside the fingerprints, "
        f"{peak / 1024:.0f} MB in all"
    )


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--images", type=Path, metavar="DIR", help="pictures to use")
    parser.add_argument("--seed", type=int, default=0, help="other seeds draw other pictures")
    parser.add_argument("--near", type=int, default=8)
    parser.add_argument("--work", type=Path, help="folder for the sets; empty or new")
    parser.add_argument("--speed", action="store_true", help="measure the matching alone")
    parser.add_argument("--size", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.size:
        measure_speed(*args.size, args.near)
        return
    if args.speed:
        for size in SPEED_SIZES:  # each in its own process, for the memory
            words = [sys.executable, __file__, "--size", *map(str, size), "--near", str(args.near)]
            subprocess.run(words, check=True)
        return
    with contextlib.ExitStack() as stack:
        root = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        count, planted = make_sets(root, args.samples, args.images, args.seed)
        print(f"{count} pictures, copies of {planted}")
        for name in ("train", *KINDS):
            words = ["--source", f"imagefolder:{root / name}", "--out", str(root / f"{name}-out")]
            with contextlib.redirect_stderr(io.StringIO()):
                assert pack([*words, "--shard-bytes", "8MB"]) == 0
        for kind in KINDS:
            measure_command(root, kind, planted, args.near)
        measure_bits(root, planted)


if __name__ == "__main__":
    main()
