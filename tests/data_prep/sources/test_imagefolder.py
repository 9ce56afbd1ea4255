import os
import pickle

import pyarrow.parquet as pq
import pytest

from data_prep.pack import main
from data_prep.sources.build import Column, SourceOptions, build_source, printable
from data_prep.sources.imagefolder import ImageFolder
from data_prep.verdict import BadInputError
from tests.helpers.corpus import crop, encoded, make_folder
from tests.helpers.tars import contents
from vitscale.config.errors import DataError, UserError
from vitscale.data import open_dataset


def source(root):
    return ImageFolder(str(root), SourceOptions())


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


def test_odd_names_are_packed_and_recoverable(tmp_path):
    folder = os.fsencode(tmp_path / "in" / "n01.5 class")
    os.makedirs(folder)
    for number, name in enumerate(ODD_NAMES):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(encoded(crop(number)))
    out = tmp_path / "out"

    code = main(["--source", f"imagefolder:{tmp_path / 'in'}", "--out", str(out), "--workers", "1"])

    assert code == 0
    rows = pq.read_table(out / "ledger" / "shard-000000.parquet").to_pylist()
    prefix = b"imagefolder:n01.5 class/"
    assert sorted(recovered(row["source"]) for row in rows) == sorted(
        prefix + name for name in ODD_NAMES
    )
    assert len(open_dataset(out)) == len(ODD_NAMES)


@pytest.mark.parametrize(
    "name", ["plain.jpg", "a\\b", "a\\xff", os.fsdecode(b"a\xff"), "\u732b", "tab\t"]
)
def test_printable_is_reversible_text(name):
    assert recovered(printable(name)) == os.fsencode(name)
    printable(name).encode()


def test_classes_are_folders_by_bytes_and_litter_is_left_out(tmp_path):
    root = make_folder(tmp_path / "in", {"b": 1, "B2": 1, "a": 1, "empty": 0})
    (root / "a" / "deep").mkdir()
    for place in (
        "a/deep/x", "a/.hidden", "a/._x.jpg", "a/Thumbs.db", "a/desktop.ini", "stray.jpg",
    ):  # fmt: skip
        (root / place).write_bytes(b"x")
    (root / ".git").mkdir()
    (root / "__MACOSX").mkdir()
    folder = source(root)

    labels = {name: labels for name, (labels, _) in contents(folder).items()}

    assert folder.columns() == [Column("label", names=("B2", "a", "b", "empty"))]
    assert labels == {
        "B2/img_00000.jpg": (0,),
        "a/deep/x": (1,),
        "a/img_00000.jpg": (1,),
        "b/img_00000.jpg": (2,),
    }


def test_images_of_caltech_lie_in_nested_folders_with_a_background_class(tmp_path):
    root = tmp_path / "101_ObjectCategories"
    for name in ("BACKGROUND_Google/image_0001.jpg", "Faces/image_0001.jpg", "ant/a/b/1.jpg"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_bytes(name.encode())
    (root / "BACKGROUND_Google" / "tmp").write_bytes(b"a file that was published with them")
    folder = source(root)

    found = contents(folder)

    assert folder.columns()[0].names == ("BACKGROUND_Google", "Faces", "ant")
    assert found["ant/a/b/1.jpg"] == ((2,), b"ant/a/b/1.jpg")
    assert found.keys() == {
        "BACKGROUND_Google/image_0001.jpg", "BACKGROUND_Google/tmp", "Faces/image_0001.jpg",
        "ant/a/b/1.jpg",
    }  # fmt: skip


def test_links_are_followed_but_not_in_circles(tmp_path):
    root = make_folder(tmp_path / "in", {"a": 1})
    other = make_folder(tmp_path / "other", {"x": 2})
    (root / "a" / "linked").symlink_to(other / "x")
    (root / "a" / "circle").symlink_to(root)
    (root / "a" / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(root / "a" / "pipe")

    entries = list(source(root).entries())

    problems = {entry.name: entry.problem for entry in entries if entry.problem}
    assert len(entries) == 6
    assert problems.keys() == {"a/circle", "a/pipe", "a/dangling"}
    assert problems["a/circle"].startswith("loop:")
    assert problems["a/pipe"].startswith("unreadable: not a regular file")
    assert problems["a/dangling"].startswith("unreadable: No such file")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "cannot list .*: No such file"),
        (["x.jpg"], "has no sub-folders"),
        (["a/.hidden"], "has 1 class folders and no files in them"),
    ],
)
def test_folders_without_inputs_are_refused(tmp_path, names, said):
    root = tmp_path / "in"
    for name in names:
        (root / name).parent.mkdir(parents=True)
        (root / name).write_bytes(b"x")

    with pytest.raises(UserError, match=said):
        list(source(root).entries())


@pytest.fixture
def listed(tmp_path):
    """A source as another process gets it, the entry of its only file, and the file."""
    root = make_folder(tmp_path / "in", {"a": 1})
    entry = next(source(root).entries())
    return pickle.loads(pickle.dumps(source(root))), entry, root / entry.name


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda path: path.unlink(), DataError, r"img_00000\.jpg' was listed but is gone"),
        (lambda path: path.write_bytes(b"ab"), DataError, r"has 2 bytes, it had \d+ when"),
        (lambda path: (path.unlink(), path.mkdir()), BadInputError, "unreadable: Is a directory"),
        # A link to itself opens with ELOOP, which says nothing about the image: no verdict.
        (lambda path: (path.unlink(), path.symlink_to(path)), OSError, "Too many levels"),
    ],
)
def test_files_that_change_after_listing_are_told_from_outages(listed, change, error, said):
    folder, entry, path = listed
    assert folder.read(entry) == path.read_bytes()

    change(path)

    with pytest.raises(error, match=said):
        folder.read(entry)


def test_the_command_line_names_it(tmp_path):
    assert isinstance(build_source(f"imagefolder:{tmp_path}", SourceOptions()), ImageFolder)
