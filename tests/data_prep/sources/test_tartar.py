import pytest

from data_prep.sources.build import Column, SourceOptions
from data_prep.sources.tartar import ClassTars
from tests.helpers.tars import contents, write_tar
from vitscale.config.errors import DataError, UserError

CLASSES = {
    "n03": [("n03_1.JPEG", b"a" * 700), ("n03_2.JPEG", b"b")],
    "n01": [("n01_1.JPEG", b"c")],
    "n02": [],
}
WANTED = {
    "n03/n03_1.JPEG": (("n03",), b"a" * 700),
    "n03/n03_2.JPEG": (("n03",), b"b"),
    "n01/n01_1.JPEG": (("n01",), b"c"),
}
COLUMNS = [Column("label", names=("n01", "n02", "n03"))]


def class_tars(folder, mode="w", ending="tar"):
    return [
        write_tar(folder / f"{name}.{ending}", members, mode) for name, members in CLASSES.items()
    ]


def outer_tar(path, tmp_path, mode="w", more=()):
    members = [(tar.name, tar.read_bytes()) for tar in class_tars(tmp_path / "inner")]
    return ClassTars(str(write_tar(path, [*members, *more], mode)), SourceOptions())


def test_images_in_a_tar_of_class_tars_have_their_class(tmp_path):
    source = outer_tar(tmp_path / "train.tar", tmp_path)

    assert contents(source) == WANTED
    assert source.columns() == COLUMNS


@pytest.mark.parametrize(("mode", "ending"), [("w", "tar"), ("w:gz", "tar.gz")])
def test_images_in_a_folder_of_class_tars_have_their_class(tmp_path, mode, ending):
    tars = class_tars(tmp_path, mode, ending)

    for uri in (tmp_path, tmp_path / "n*"):
        source = ClassTars(str(uri), SourceOptions())
        assert contents(source) == WANTED
        assert source.columns() == COLUMNS
    blocks = {entry.block for entry in source.entries()}
    assert blocks == ({""} if ending == "tar" else {str(tar) for tar in tars[:2]})


def test_a_class_in_several_tars_keeps_all_its_images(tmp_path):
    write_tar(tmp_path / "a" / "n01.tar", [("x.JPEG", b"1"), ("x.JPEG", b"2")])
    write_tar(tmp_path / "b" / "n01.tar", [("x.JPEG", b"3")])
    source = ClassTars(str(tmp_path), SourceOptions())

    assert contents(source) == {
        "n01/x.JPEG": (("n01",), b"1"),
        "n01/x.JPEG#2": (("n01",), b"2"),
        "n01#2/x.JPEG": (("n01",), b"3"),
    }
    assert source.columns() == [Column("label", names=("n01",))]


def test_what_lies_beside_the_class_tars_has_no_label(tmp_path):
    source = outer_tar(tmp_path / "train.tar", tmp_path, more=[("readme", b"1")])

    assert contents(source) == {
        **WANTED,
        "readme": (((),), "no_label: not in the tar of a class"),
    }


def test_damage_in_an_inner_tar_is_named_with_its_place_in_the_outer_one(tmp_path):
    source = outer_tar(tmp_path / "train.tar", tmp_path)
    data = bytearray((tmp_path / "train.tar").read_bytes())
    place = data.index(b"n03_2.JPEG")
    data[place] ^= 1
    (tmp_path / "train.tar").write_bytes(data)

    with pytest.raises(DataError, match=rf"train\.tar'?: offset {place}: damaged header"):
        contents(source)


def test_an_inner_tar_does_not_reach_into_the_next_one(tmp_path):
    inner = write_tar(tmp_path / "n01.tar", [("x", b"1" * 600), ("y", b"2" * 600)]).read_bytes()
    members = [("n01.tar", inner[:2560]), ("n02.tar", inner)]
    path = write_tar(tmp_path / "train.tar", members)

    with pytest.raises(DataError, match="the file ends inside member 'y' of 600 bytes"):
        contents(ClassTars(str(path), SourceOptions()))


def test_a_compressed_tar_of_tars_is_refused(tmp_path):
    source = outer_tar(tmp_path / "train.tar.gz", tmp_path, "w:gz")

    with pytest.raises(UserError, match="unpack it first"):
        contents(source)
