import numpy as np
import pytest
from scipy.io import savemat

from data_prep.sources.build import Column, SourceOptions, build_source
from data_prep.sources.flowers import Flowers
from tests.helpers.tars import contents
from vitscale.config.errors import DataError, UserError

LABELS = [77, 77, 1, 102, 5, 77]
SPLITS = {"trnid": [4, 1], "valid": [2], "tstid": [3, 5, 6]}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "jpg").mkdir()
    for number in range(1, 7):
        (tmp_path / "jpg" / f"image_{number:05d}.jpg").write_bytes(b"flower %d" % number)
    savemat(tmp_path / "imagelabels.mat", {"labels": np.asarray([LABELS], np.uint8)})
    ids = {name: np.asarray([numbers], np.uint16) for name, numbers in SPLITS.items()}
    savemat(tmp_path / "setid.mat", ids)
    return tmp_path


@pytest.mark.parametrize(
    ("split", "numbers"), [("train", [4, 1]), ("val", [2]), ("test", [3, 5, 6])]
)
def test_split_chooses_the_images(folder, split, numbers):
    source = build_source(f"flowers:{folder}", SourceOptions(split=split))

    assert contents(source) == {
        f"jpg/image_{number:05d}.jpg": ((LABELS[number - 1] - 1,), b"flower %d" % number)
        for number in numbers
    }
    assert source.columns() == [Column("label", names=tuple(map(str, range(1, 103))))]


def test_missing_images_have_a_problem(folder):
    (folder / "jpg" / "image_00001.jpg").unlink()

    problems = [entry.problem for entry in Flowers(str(folder), SourceOptions()).entries()]

    assert problems == ["", "missing_file: jpg/image_00001.jpg"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("setid.mat", {"trnid": [7]}, "names image 7, imagelabels.mat has 6 labels"),
        ("setid.mat", {"other": [1]}, "setid.mat is damaged: KeyError"),
        ("setid.mat", {"trnid": [0, 1]}, "'trnid' holds no numbers from 1"),
        ("imagelabels.mat", {"labels": [0.5]}, "'labels' holds no numbers from 1"),
        ("imagelabels.mat", b"MATLAB 5.0 cut", "imagelabels.mat is damaged"),
    ],
)
def test_damage_is_named(folder, name, content, said):
    if isinstance(content, bytes):
        (folder / name).write_bytes(content)
    else:
        savemat(folder / name, {key: np.asarray(value) for key, value in content.items()})

    with pytest.raises(DataError, match=said):
        list(Flowers(str(folder), SourceOptions()).entries())


def test_missing_files_and_splits_are_named(tmp_path):
    with pytest.raises(UserError, match=r"imagelabels\.mat is missing; give the folder"):
        list(Flowers(str(tmp_path), SourceOptions()).entries())
    with pytest.raises(UserError, match="'dev' is not one of train, val, test"):
        list(Flowers(str(tmp_path), SourceOptions(split="dev")).entries())
