"""What others' readers see in our shards: the labels and pixels of the source."""

import hashlib
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep.pack import main
from tests.helpers.corpus import crop, encoded, make_folder
from vitscale.data import open_dataset

# Each prints one JSON list a sample: class name, sha256 of the RGB pixels. In a process of its own:
# these libraries leave files open and warn.
HEAD = """
import hashlib, io, json, sys
import numpy as np
from PIL import Image
def show(name, image):
    digest = hashlib.sha256(np.asarray(image.convert("RGB")).tobytes()).hexdigest()
    print(json.dumps([name, digest]))
names = json.loads(sys.argv[1])
"""
READERS = {
    "webdataset": (
        "tar",
        """
import webdataset
for sample in webdataset.WebDataset(sys.argv[2:], shardshuffle=False).decode("pil"):
    (image,) = (sample[kind] for kind in ("jpg", "png") if kind in sample)
    show(names[sample["cls"]], image)
""",
    ),
    "tarfile": (
        "tar",
        """
import tarfile
for path in sys.argv[2:]:
    with tarfile.open(path) as tar:
        members = {m.name: tar.extractfile(m).read() for m in tar}
    for name, data in members.items():
        if not name.endswith(".cls"):
            label = int(members[name.partition(".")[0] + ".cls"])
            show(names[label], Image.open(io.BytesIO(data)))
""",
    ),
    "torchvision": (
        "tar",
        """
import tarfile, torch, torchvision
for path in sys.argv[2:]:
    with tarfile.open(path) as tar:
        members = {m.name: tar.extractfile(m).read() for m in tar}
    for name, data in members.items():
        if not name.endswith(".cls"):
            label = int(members[name.partition(".")[0] + ".cls"])
            pixels = torchvision.io.decode_image(
                torch.frombuffer(bytearray(data), dtype=torch.uint8), "RGB")
            show(names[label], Image.fromarray(pixels.permute(1, 2, 0).numpy()))
""",
    ),
    "pyarrow": (
        "arrow",
        """
import pyarrow as pa
for path in sys.argv[2:]:
    for row in pa.ipc.open_file(pa.memory_map(path)).read_all().to_pylist():
        show(names[row["label"]], Image.open(io.BytesIO(row["image"]["bytes"])))
""",
    ),
    "datasets": (
        "arrow",
        """
import datasets
found = datasets.load_dataset("arrow", data_files=sys.argv[2:], split="train")
assert found.features["label"].names == names
for row in found:
    show(found.features["label"].int2str(row["label"]), row["image"])
""",
    ),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Images that readers show differently as they are, and plain ones."""
    root = make_folder(tmp_path_factory.mktemp("corpus") / "in", {"ant": 12, "bee": 9, "cow": 3})
    pixels = crop(5, 40)
    (root / "bee" / "turned.jpg").write_bytes(turned(pixels))
    rgba = np.dstack([pixels, np.full(pixels.shape[:2], 128, np.uint8)])
    (root / "bee" / "clear.png").write_bytes(encoded(rgba, "PNG"))
    Image.fromarray(pixels).convert("CMYK").save(root / "cow" / "ink.jpg", quality=95)
    Image.fromarray(pixels).save(root / "cow" / "frames.gif")
    return root


def turned(pixels: np.ndarray) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(pixels, "JPEG", quality=95, exif=exif.tobytes())


@pytest.fixture(scope="module")
def packed(corpus, tmp_path_factory) -> dict[str, Path]:
    outs = {kind: tmp_path_factory.mktemp(kind) / "out" for kind in ("tar", "arrow")}
    for kind, out in outs.items():
        words = ["--source", f"imagefolder:{corpus}", "--out", str(out), "--format", kind]
        assert main([*words, "--workers", "1", "--shard-bytes", "30KB"]) == 0
    return outs


@pytest.mark.parametrize("reader", READERS)
def test_stock_reader_sees_labels_and_pixels(corpus, packed, tmp_path, monkeypatch, reader):
    kind, code = READERS[reader]
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shards = [str(path) for path in sorted(packed[kind].glob(f"shard-*.{kind}"))]
    assert len(shards) > 1

    done = subprocess.run(
        [sys.executable, "-c", HEAD + code, json.dumps(["ant", "bee", "cow"]), *shards],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    seen = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    assert sorted(seen) == sorted(plain_samples(corpus) + changed_samples(packed["tar"]))


def digest(image: Image.Image) -> str:
    return hashlib.sha256(np.asarray(image.convert("RGB")).tobytes()).hexdigest()


CHANGED = ("turned.jpg", "clear.png", "ink.jpg", "frames.gif")


def plain_samples(corpus: Path) -> list[tuple[str, str]]:
    paths = [path for path in corpus.rglob("*.*") if path.name not in CHANGED]
    return [(path.parent.name, digest(Image.open(path))) for path in paths]


def changed_samples(out: Path) -> list[tuple[str, str]]:
    """What the packer made of the others, after a look at whether it is right."""
    rows = [row for path in (out / "ledger").iterdir() for row in pq.read_table(path).to_pylist()]
    reasons = {row["source"].rpartition("/")[2]: row for row in rows if row["reason"]}
    assert {name: row["reason"] for name, row in reasons.items()} == {
        "turned.jpg": "turned", "clear.png": "alpha", "ink.jpg": "cmyk", "frames.gif": "format",
    }  # fmt: skip
    samples = {sample.key: sample for sample in open_dataset(out)}
    images = {
        name: Image.open(io.BytesIO(samples[row["key"]].image)) for name, row in reasons.items()
    }
    upright = np.rot90(crop(5, 40), -1).astype(int)
    assert np.abs(np.asarray(images["turned.jpg"]).astype(int) - upright).mean() < 3
    return [
        (["ant", "bee", "cow"][samples[row["key"]].label], digest(images[name]))
        for name, row in reasons.items()
    ]
