import gzip
import io
import os
import struct

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep.images import ImagePolicy
from data_prep.pack import main
from data_prep.plan import Settings, make_plan
from data_prep.sources.build import build_source, printable
from data_prep.sources.digits import Digits
from data_prep.sources.idx import IdxFolder
from data_prep.sources.imagefolder import ImageFolder
from data_prep.writer import write_shard
from tests.helpers.corpus import crop, encoded, make_folder
from vitscale.config.errors import DataError, UserError, VitscaleError
from vitscale.data import open_dataset
from vitscale.data.storage import open_storage


def recovered(text: str) -> bytes:
    """Undo `printable`, independently of it."""
    out, position = b"", 0
    while position < len(text):
        if text[position] != "\\":
            out += text[position].encode()
            position += 1
        elif text[position + 1] == "\\":
            out += b"\\"
            position += 2
        else:
            out += bytes([int(text[position + 2 : position + 4], 16)])
            position += 4
    return out


ODD_NAMES = [
    b"img.1.jpg", b"img.2.jpg", b"22.05.png", b"shot.png.jpg", b"A.JPG", b"noextension", b"dot.",
    b" lead.jpg", b"trail .jpg", b"new\nline.jpg", b"back\\slash.jpg", b"back\\xff.jpg",
    "caf\u00e9.jpg".encode(), "cafe\u0301.jpg".encode(), "\u732b_01.jpg".encode(),
    b"bad\xff\xfe.jpg",
    b"x" * 140 + b"1.jpg", b"x" * 140 + b"2.jpg",
]  # fmt: skip


def test_imagefolder_odd_names_are_packed_and_recoverable(tmp_path):
    folder = os.fsencode(tmp_path / "in" / "n01.5 class")
    os.makedirs(folder)
    for number, name in enumerate(ODD_NAMES):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(encoded(crop(number)))

    code = main(
        [
            "--source",
            f"imagefolder:{tmp_path / 'in'}",
            "--out",
            str(tmp_path / "out"),
            "--workers",
            "1",
        ]
    )

    assert code == 0
    rows = pq.read_table(tmp_path / "out" / "ledger" / "shard-000000.parquet").to_pylist()
    prefix = b"imagefolder:n01.5 class/"
    assert sorted(recovered(row["source"]) for row in rows) == sorted(
        prefix + name for name in ODD_NAMES
    )
    assert len(open_dataset(tmp_path / "out")) == len(ODD_NAMES)


@pytest.mark.parametrize(
    "name", ["plain.jpg", "a\\b", "a\\xff", os.fsdecode(b"a\xff"), "\u732b", "tab\t"]
)
def test_printable_is_reversible_text(name):
    assert recovered(printable(name)) == os.fsencode(name)
    printable(name).encode()


def test_imagefolder_lists_by_bytes_and_ignores_litter(tmp_path):
    root = make_folder(tmp_path / "in", {"b": 1, "B2": 1, "a": 1, "empty": 0})
    (root / "a" / "deep").mkdir()
    for place in (
        "a/deep/x",
        "a/.hidden",
        "a/._x.jpg",
        "a/Thumbs.db",
        "a/desktop.ini",
        "stray.jpg",
    ):
        (root / place).write_bytes(b"x")
    (root / ".git").mkdir()
    (root / "__MACOSX").mkdir()

    listing = ImageFolder(str(root)).listing()

    assert listing.classes == ["B2", "a", "b", "empty"]
    assert listing.names == ["B2/img_00000.jpg", "a/deep/x", "a/img_00000.jpg", "b/img_00000.jpg"]
    assert listing.labels == [0, 1, 1, 2]


def test_imagefolder_follows_links_but_not_in_circles(tmp_path):
    root = make_folder(tmp_path / "in", {"a": 1})
    other = make_folder(tmp_path / "other", {"x": 2})
    (root / "a" / "linked").symlink_to(other / "x")
    (root / "a" / "circle").symlink_to(root)
    os.mkfifo(root / "a" / "pipe")

    listing = ImageFolder(str(root)).listing()

    problems = {listing.names[row]: text for row, text in listing.problems.items()}
    assert len(listing.names) == 5
    assert problems.keys() == {"a/circle", "a/pipe"}
    assert problems["a/circle"].startswith("loop:")
    assert problems["a/pipe"].startswith("unreadable: not a regular file")


def test_imagefolder_refuses_classes_that_differ_in_case(tmp_path):
    root = make_folder(tmp_path / "in", {"cat": 1, "Cat": 1})

    with pytest.raises(UserError, match="'Cat' and 'cat' differ in case alone"):
        ImageFolder(str(root)).listing()


def one_shard(source):
    settings = Settings("train", 0, 10**9, "header", ImagePolicy("keep"))
    return make_plan([source], settings).task(0), settings


@pytest.mark.parametrize("change", ["remove", "grow"])
def test_write_shard_stops_at_a_changed_input(tmp_path, change):
    root = make_folder(tmp_path / "in", {"a": 3})
    source = ImageFolder(str(root))
    task, settings = one_shard(source)
    victim = root / "a" / "img_00001.jpg"
    if change == "remove":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes() + b"more")
    storage = open_storage(tmp_path / "out")

    with pytest.raises(
        DataError, match=r"img_00001\.jpg' (was listed but is gone|has \d+ bytes, it had \d+)"
    ):
        write_shard(task, [source], storage, settings)

    assert list((tmp_path / "out").iterdir()) == []


def test_write_shard_takes_an_outage_for_no_verdict(tmp_path):
    # A link to itself opens with ELOOP: an error that says nothing about the image.
    root = make_folder(tmp_path / "in", {"a": 3})
    source = ImageFolder(str(root))
    task, settings = one_shard(source)
    victim = root / "a" / "img_00001.jpg"
    victim.unlink()
    victim.symlink_to(victim)

    with pytest.raises(VitscaleError, match=r"cannot read input imagefolder:a/img_00001\.jpg"):
        write_shard(task, [source], open_storage(tmp_path / "out"), settings)


def idx_bytes(array: np.ndarray) -> bytes:
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


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
def test_idx_split_chooses_the_files(idx_folder, split, stem):
    folder, arrays = idx_folder
    images, labels = arrays[stem]
    source = IdxFolder(str(folder), split)

    listing = source.listing()

    assert listing.classes == [str(label) for label in range(10)]
    assert listing.labels == labels.tolist()
    for name, wanted in zip(listing.names, images, strict=True):
        with Image.open(io.BytesIO(source.read(name, 30))) as image:
            assert (np.asarray(image) == wanted).all()


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("train-labels-idx1-ubyte", b"\0\0\x08\x03", "expected 00000801"),
        ("train-labels-idx1-ubyte", idx_bytes(np.zeros(19, np.uint8)), "20 images and 19 labels"),
        (
            "train-labels-idx1-ubyte",
            idx_bytes(np.zeros(20, np.uint8))[:-1],
            "its header announces 28",
        ),
        ("train-images-idx3-ubyte.gz", b"\x1f\x8b\x08cut", "cannot read"),
    ],
)
def test_idx_damage_is_named(idx_folder, name, data, said):
    folder, _ = idx_folder
    (folder / name).write_bytes(data)

    with pytest.raises(DataError, match=said):
        IdxFolder(str(folder), "train").listing()


def test_idx_missing_files_and_splits_are_named(tmp_path):
    with pytest.raises(UserError, match=r"neither train-labels-idx1-ubyte\.gz nor"):
        IdxFolder(str(tmp_path), "train").listing()
    with pytest.raises(UserError, match="'dev' is not one of train, val, test"):
        IdxFolder(str(tmp_path), "dev").listing()


def test_digits_parts_divide_the_images():
    parts = {part: Digits(part).listing() for part in ("train", "test", "all")}

    assert len(parts["all"].names) == 1797
    assert len(parts["test"].names) == 359
    assert all(int(name) % 5 == 4 for name in parts["test"].names)
    assert sorted(parts["train"].names + parts["test"].names) == parts["all"].names


def test_digits_images_are_those_of_sklearn():
    from sklearn.datasets import load_digits

    data = load_digits()
    source = Digits("all")
    listing = source.listing()

    assert listing.labels == data.target.tolist()
    with Image.open(io.BytesIO(source.read("0007", 64))) as image:
        assert np.abs(np.asarray(image) - data.images[7] * 255 / 16).max() <= 0.5


def test_digits_unknown_part_is_named():
    with pytest.raises(
        UserError, match="digits:val is not one of digits:train, digits:test, digits:all"
    ):
        build_source("digits:val", "train").listing()
