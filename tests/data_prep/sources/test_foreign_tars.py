import gzip
import json
import pickle
import tarfile

import pytest

from data_prep.sources.build import Column, SourceOptions
from data_prep.sources.files import RandomFile
from data_prep.sources.foreign_tars import ForeignTars, scan_samples
from tests.helpers.tars import contents, header, write_tar
from vitscale.config.errors import DataError
from vitscale.data.storage import open_storage


def foreign(path, members, mode="w", **options):
    return ForeignTars(str(write_tar(path, members, mode)), SourceOptions(**options))


def sample(key, label, image=None):
    return [(f"{key}.cls", str(label).encode()), (f"{key}.jpg", image or key.encode())]


GOOD = [member for key, label in [("a", 3), ("b", 0), ("c", 3)] for member in sample(key, label)]
WANTED = {"a": ((3,), b"a"), "b": ((0,), b"b"), "c": ((3,), b"c")}


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_samples_have_the_label_of_their_cls(tmp_path, mode):
    source = foreign(tmp_path / "a.tar", GOOD, mode)

    assert contents(source) == WANTED
    assert source.columns() == [Column("label")]
    copy = pickle.loads(pickle.dumps(source))
    assert contents(copy) == WANTED
    blocks = {entry.block for entry in source.entries()}
    assert blocks == {"" if mode == "w" else str(tmp_path / "a.tar")}


def test_no_order_of_the_members_is_needed(tmp_path):
    members = sorted(GOOD, key=lambda member: member[0][-3:])

    assert contents(foreign(tmp_path / "a.tar", members)) == WANTED


def test_folders_litter_and_own_members_of_webdataset_are_left_out(tmp_path):
    members = [header("p q", tarfile.DIRTYPE), ("__meta__/x.json", b"{}"), ("p q/._a.jpg", b"mac")]
    members += [(f"./p q/{name}", content) for name, content in GOOD]

    assert contents(foreign(tmp_path / "a.tar", members)) == {
        f"p q/{key}": value for key, value in WANTED.items()
    }


def test_folders_may_hold_dots(tmp_path):
    assert contents(foreign(tmp_path / "a.tar", sample("v2.0/b", 1, b"x"))) == {
        "v2.0/b": ((1,), b"x")
    }


def test_dots_in_keys_keep_samples_apart(tmp_path):
    members = [*sample("a.1", 5), *sample("a.2", 6)]
    found = contents(foreign(tmp_path / "a.tar", members))

    assert found == {"a.1": ((5,), b"a.1"), "a.2": ((6,), b"a.2")}

    found = contents(foreign(tmp_path / "b.tar", [*members, ("a.3.cls", b"7")]))

    assert found["a.3"] == ((7,), "incomplete_sample: no image, only 1.cls, 1.jpg, 2.cls, 2.jpg, "
                            "3.cls")  # fmt: skip


@pytest.mark.parametrize(
    ("names", "image"),
    [
        (["PNG", "JPG", "cls"], b"JPG"),
        (["seg.png", "jpeg", "cls"], b"jpeg"),
        (["0.webp", "cls"], b"0.webp"),
        (["1.jpg", "1.png", "1.cls"], b"1.jpg"),
        (["0.jpg", "1.jpg", "cls"], "incomplete_sample: several images, 0.jpg, 1.jpg; which"),
        (["cls", "txt"], "incomplete_sample: no image, only cls, txt"),
    ],
)
def test_the_image_is_the_preferred_one(tmp_path, names, image):
    members = [(f"k.{name}", b"1" if "cls" in name else name.encode()) for name in names]

    ((key, (labels, found)),) = contents(foreign(tmp_path / "a.tar", members)).items()

    assert (key, labels) == ("k", (1,))
    assert found == image if isinstance(image, bytes) else found.startswith(image)


@pytest.mark.parametrize(
    ("members", "label"),
    [
        ({"cls": b" 7\n"}, 7),
        ({"cls": b"n01440764"}, "n01440764"),
        ({"txt": b"12"}, 12),
        ({"json": b'{"label": 4, "caption": "x"}'}, 4),
        ({"json": b'{"label": "cat"}'}, "cat"),
        ({"json": b'{"label": [2, 1]}'}, (2, 1)),
        ({"cls": b"1", "txt": b"2", "json": b'{"label": 3}'}, 1),
        ({"txt": b"a caption", "json": b'{"label": 3}'}, 3),
        ({"cls": b"-1"}, "bad_label: 'label' is -1"),
        ({"json": b'{"label": true}'}, "bad_label: 'label' is True"),
        ({"json": b'{"label": 1.5}'}, "bad_label: 'label' is 1.5"),
        ({"json": b'{"label": [1, null]}'}, "bad_label: 'label' is [1, None]"),
        ({"json": b'{"label": 4'}, "bad_label: 'label' is {'no valid JSON': None}"),
        ({"json": b"[4]"}, "bad_label: 'label' is {'no JSON object': None}"),
        ({"json": b'{"label": null}'}, "incomplete_sample: no label 'label'"),
        ({"txt": b"a caption"}, "incomplete_sample: no label 'label'"),
        ({"cls": b""}, "incomplete_sample: no label 'label'"),
        ({}, "incomplete_sample: no label 'label'"),
    ],
)
def test_the_label_is_found_or_its_lack_is_told(tmp_path, members, label):
    members = {"jpg": b"image"} | members
    source = foreign(tmp_path / "a.tar", [(f"k.{name}", data) for name, data in members.items()])

    ((labels, content),) = contents(source).values()

    is_problem = isinstance(label, str) and ":" in label
    assert (labels, content) == (((),), label) if is_problem else ((label,), b"image")
    assert source.columns() == [Column("label", multi=isinstance(label, tuple))]


def test_several_label_columns_come_from_members_and_fields(tmp_path):
    members = [
        ("a.jpg", b"1"),
        ("a.cls", b"5"),
        ("a.json", json.dumps({"tags": ["x", "y"], "other": 0}).encode()),
        ("b.jpg", b"2"),
        ("b.cls", b"6"),
        ("b.json", b'{"tags": []}'),
    ]
    source = foreign(tmp_path / "a.tar", members, label_columns=("cls", "tags"))

    assert contents(source) == {"a": ((5, ("x", "y")), b"1"), "b": ((6, ()), b"2")}
    assert source.columns() == [Column("cls"), Column("tags", multi=True)]


def test_a_key_that_comes_again_has_a_row_for_each_picture(tmp_path):
    source = foreign(tmp_path / "a.tar", [*GOOD, *sample("a", 9, b"other")])

    problem = "duplicate: key a has more than one cls, jpg"
    assert contents(source) == {**WANTED, "a": ((3,), problem), "a#2": (((),), problem)}


def test_members_that_belong_to_no_image_have_a_row(tmp_path):
    members = [*GOOD, ("README", b"text"), ("d.jpg", b"image"), ("e.cls", b"1")]

    assert contents(foreign(tmp_path / "a.tar", members)) == {
        **WANTED,
        "README": (((),), "incomplete_sample: no image, only a name without extension"),
        "d": (((),), "incomplete_sample: no label 'label'"),
        "e": ((1,), "incomplete_sample: no image, only cls"),
    }


def test_keys_are_told_apart_by_their_tar_where_there_are_several(tmp_path):
    write_tar(tmp_path / "0.tar", sample("a", 1, b"x"))
    write_tar(tmp_path / "1.tar", sample("a", 2, b"y"))

    found = contents(ForeignTars(f"{tmp_path}/{{0..1}}.tar", SourceOptions()))

    assert found == {"0.tar/a": ((1,), b"x"), "1.tar/a": ((2,), b"y")}


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_damage_is_named_with_the_samples_before_it(tmp_path, mode):
    path = tmp_path / "bad.tar"
    source = foreign(path, GOOD)
    whole = path.read_bytes()
    # in the third picture's header, behind five members of two blocks each
    path.write_bytes(whole[:5500])
    if mode == "w:gz":
        path.write_bytes(gzip.compress(whole[:5500]))

    with pytest.raises(DataError, match=r"bad\.tar.*offset 5120.*whole samples before that: 2"):
        contents(source)


def test_links_between_members_are_followed(tmp_path):
    members = [*sample("a", 1), header("b.jpg", tarfile.LNKTYPE, "a.jpg"),
               header("b.cls", tarfile.LNKTYPE, "a.cls"), ("c.cls", b"2"),
               header("c.jpg", tarfile.SYMTYPE, "a.jpg")]  # fmt: skip

    assert contents(foreign(tmp_path / "a.tar", members)) == {
        "a": ((1,), b"a"),
        "b": ((1,), b"a"),
        "c": ((2,), "unsupported: symbolic link"),
    }


@pytest.mark.s3
def test_shards_in_a_store_are_read_in_place(s3_uri, tmp_path):
    storage = open_storage(s3_uri)
    storage.put_file("x-0.tar", write_tar(tmp_path / "a", GOOD))
    storage.put_file("x-1.tar", write_tar(tmp_path / "b", sample("a", 1, b"x"), "w:gz"))

    found = contents(ForeignTars(f"{s3_uri}/x-*.tar", SourceOptions()))

    first = {f"x-0.tar/{key}": value for key, value in WANTED.items()}
    assert found == {**first, "x-1.tar/a": ((1,), b"x")}


def test_scanned_samples_say_where_the_image_lies(tmp_path):
    file = RandomFile(str(write_tar(tmp_path / "a.tar", GOOD)))

    samples = list(scan_samples(file))

    assert [(s.key, s.extension, s.labels, s.problem) for s in samples] == [
        ("a", "jpg", (3,), ""), ("b", "jpg", (0,), ""), ("c", "jpg", (3,), ""),
    ]  # fmt: skip
    assert [file.read(s.image.offset, s.image.num_bytes) for s in samples] == [b"a", b"b", b"c"]
