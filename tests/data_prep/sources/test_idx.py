import gzip
import io
import struct

import numpy as np
import pytest
from PIL import Image

from data_prep.sources.build import Column, SourceOptions
from data_prep.sources.idx import IdxFolder
from vitscale.config.errors import DataError, UserError


def source(folder, split="train"):
    return IdxFolder(str(folder), SourceOptions(split=split))


def idx_bytes(array: np.ndarray) -> bytes:
    shape = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, 8, array.ndim]) + shape + array.tobytes()


@pytest.fixture
def idx_folder(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {}
    for stem, count in (("train", 20), ("t10k", 10)):
        images = rng.integers(0, 256, (count, 6, 5), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        arrays[stem] = images, labels
        (tmp_path / f"{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(images)))
        (tmp_path / f"{stem}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    return tmp_path, arrays


@pytest.mark.parametrize(("split", "stem"), [("train", "train"), ("val", "t10k"), ("test", "t10k")])
def test_split_chooses_the_files(idx_folder, split, stem):
    folder, arrays = idx_folder
    images, labels = arrays[stem]
    idx = source(folder, split)

    entries = list(idx.entries())

    assert idx.columns() == [Column("label", names=tuple("0123456789"))]
    assert [entry.labels for entry in entries] == [(label,) for label in labels.tolist()]
    reader = source(folder, split)  # as in another process
    for entry, wanted in zip(entries, images, strict=True):
        with Image.open(io.BytesIO(reader.read(entry))) as image:
            assert (np.asarray(image) == wanted).all()


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("train-labels-idx1-ubyte", b"\0\0\x08\x03", "expected 00000801"),
        ("train-labels-idx1-ubyte", idx_bytes(np.zeros(19, np.uint8)), "20 images and 19 labels"),
        ("train-labels-idx1-ubyte", idx_bytes(np.zeros(20, np.uint8))[:-1], "announces 28"),
        ("train-images-idx3-ubyte.gz", b"\x1f\x8b\x08cut", "cannot read"),
    ],
)
def test_damage_is_named(idx_folder, name, data, said):
    folder, _ = idx_folder
    (folder / name).write_bytes(data)

    with pytest.raises(DataError, match=said):
        list(source(folder).entries())


def test_missing_files_and_splits_are_named(tmp_path):
    with pytest.raises(UserError, match=r"neither train-labels-idx1-ubyte\.gz nor"):
        list(source(tmp_path).entries())
    with pytest.raises(UserError, match="'dev' is not one of train, val, test"):
        list(source(tmp_path, "dev").entries())
