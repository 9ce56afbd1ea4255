"""A corpus of 2,000 files, a fifth of them hard: each ends as it should, no other suffers."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep.pack import main
from tests.helpers.corpus import crop, encoded
from tests.helpers.odd_images import (
    exif,
    four_corners,
    icc_profile,
    is_like,
    made_png,
    oriented,
    saved,
    with_segment,
)
from vitscale.data import open_dataset
from vitscale.data.decode import decode_rgb

PICTURE = four_corners()
IMAGE = Image.fromarray(PICTURE)
JPEG, PNG = saved(PICTURE), saved(PICTURE, "PNG")
CLEAR = np.dstack([PICTURE, np.full(PICTURE.shape[:2], 255, np.uint8)])
CLEAR[28:36, 44:52, 3] = 0
DEEP = b"".join(b"\0" + (row.astype(">u2") * 257).astype(">u2").tobytes() for row in PICTURE)
LAID_DOWN = saved(IMAGE.transpose(Image.Transpose.ROTATE_90), exif=exif(oriented(6)))
# kind -> file, and what the ledger says: the change, or the word of the reason
SHOWN = {
    "plain.jpg": (JPEG, ""),
    "png.jpg": (PNG, ""),
    "progressive": (saved(PICTURE, progressive=True), ""),
    "trailing.jpg": (JPEG + b"rubbish" * 10, ""),
    "cmyk": (saved(IMAGE.convert("CMYK")), "cmyk"),
    "alpha.png": (saved(CLEAR, "PNG"), "alpha"),
    "deep.png": (made_png(96, 64, 16, 2, DEEP), "16bit"),
    "palette.gif": (saved(IMAGE, "GIF"), "format"),
    "flat.bmp": (saved(IMAGE, "BMP"), "format"),
    "sheet.tif": (saved(IMAGE, "TIFF"), "format"),
    "turned.jpg": (LAID_DOWN, "turned"),
}
FAILED = {
    "zero.jpg": (b"", "empty"),
    "page.jpg": (b"<!DOCTYPE html><title>404</title>", "not_an_image"),
    "cut.jpg": (JPEG[:-200], "truncated"),
    "cut.png": (PNG[:-60], "truncated"),
    "flipped.png": (PNG[:60] + bytes([PNG[60] ^ 1]) + PNG[61:], "corrupt"),
    "bomb.png": (made_png(60_000, 60_000, 8, 2, b""), "too_large"),
    "layers.psd": (b"8BPS" + bytes(100), "unsupported"),
    "noise": (np.random.default_rng(0).bytes(500), "not_an_image"),
    "wide.jpg": (with_segment(JPEG, 0xE2, b"ICC_PROFILE\0\1\1" + icc_profile()), "icc"),
}
HARD = {**SHOWN, **FAILED}
NUM_FILES, EACH = 2000, 20


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    root = tmp_path_factory.mktemp("hard")
    for number in range(EACH):
        for kind, (data, _) in HARD.items():
            path = root / "in" / f"class{number % 4}" / f"{number:02d}-{kind}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    for number in range(NUM_FILES - EACH * len(HARD)):
        path = root / "in" / f"class{number % 4}" / f"{number:04d}.jpg"
        path.write_bytes(encoded(crop(number, 24)))
    words = ["--source", f"imagefolder:{root / 'in'}", "--out", str(root / "out")]
    assert main([*words, "--shard-bytes", "300KB", "--workers", "2"]) == 0
    return root / "out"


def ledger(out) -> list[dict]:
    return [r for path in (out / "ledger").iterdir() for r in pq.read_table(path).to_pylist()]


def test_hard_corpus_has_a_ledger_row_for_every_file(packed):
    rows = ledger(packed)

    assert len(HARD) * EACH == 400
    assert len(rows) == len({row["source"] for row in rows}) == NUM_FILES
    packed_rows = sum(row["status"] == "packed" for row in rows)
    assert len(open_dataset(packed)) == packed_rows == NUM_FILES - EACH * (len(FAILED) - 1)


@pytest.mark.parametrize("kind", HARD)
def test_hard_file_ends_as_it_should(packed, kind):
    rows = [row for row in ledger(packed) if row["source"].endswith(f"-{kind}")]
    word = HARD[kind][1]

    assert len(rows) == EACH
    assert {row["reason"].partition(":")[0] for row in rows} == {word}
    is_packed = kind in SHOWN or word == "icc"
    assert {row["status"] for row in rows} == {"packed" if is_packed else "failed"}


@pytest.mark.parametrize("kind", SHOWN)
def test_hard_file_shows_the_same_picture(packed, kind):
    keys = {row["key"] for row in ledger(packed) if row["source"].endswith(f"-{kind}")}
    samples = [sample for sample in open_dataset(packed) if sample.key in keys]

    assert len(samples) == EACH
    assert all(is_like(sample.image, tolerance=12) for sample in samples)
    shown = decode_rgb(samples[0].image, 3).astype(int)
    wanted = PICTURE.astype(int)
    if kind == "alpha.png":
        wanted[28:36, 44:52] = 255
    assert np.abs(shown - wanted).mean() < (6 if kind == "palette.gif" else 3)
