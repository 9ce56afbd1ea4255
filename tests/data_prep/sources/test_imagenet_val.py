import json
import pickle

import numpy as np
import pytest
import scipy.io

from data_prep.sources.build import Column, SourceOptions
from data_prep.sources.imagenet_val import META_NAME, TRUTH_NAME, ImageNetVal
from tests.helpers.tars import contents, write_tar
from vitscale.config.errors import DataError, UserError

# By id 1 to 4; the last one stands for a class with others below it.
WNIDS = ["n03", "n01", "n02", "n99"]
TRUTH = [2, 1, 1, 3, 2]
REAL = [[0], [1, 2], [], [2], [0, 1, 2]]
NAMES = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, 6)]
IMAGES = {name: name.encode() * 100 for name in NAMES}


@pytest.fixture
def devkit(tmp_path):
    kind = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    rows = [(number, wnid, "a word", 3 * (wnid == "n99")) for number, wnid in enumerate(WNIDS, 1)]
    folder = tmp_path / "ILSVRC2012_devkit_t12"
    (folder / "data").mkdir(parents=True)
    scipy.io.savemat(folder / META_NAME, {"synsets": np.array(rows, kind)[:, None]})
    (folder / TRUTH_NAME).write_text("".join(f"{label}\n" for label in TRUTH))
    return folder


def val_tar(tmp_path, names=NAMES):
    # not in the order of the numbers
    return str(write_tar(tmp_path / "val.tar", [(n, n.encode() * 100) for n in reversed(names)]))


def test_images_get_their_wordnet_ids_from_the_development_kit(tmp_path, devkit):
    source = ImageNetVal(val_tar(tmp_path), SourceOptions(devkit=str(devkit)))

    wnids = ["n01", "n03", "n03", "n02", "n01"]
    assert contents(source) == {
        name: ((wnid,), IMAGES[name]) for name, wnid in zip(NAMES, wnids, strict=True)
    }
    assert source.columns() == [Column("label", names=("n01", "n02", "n03"))]


def test_a_folder_and_a_packed_development_kit_give_the_same(tmp_path, devkit):
    folder = tmp_path / "val"
    folder.mkdir()
    for name, content in IMAGES.items():
        (folder / name).write_bytes(content)
    kit = write_tar(
        tmp_path / "devkit.tar.gz",
        [
            (f"ILSVRC2012_devkit_t12/{n}", (devkit / n).read_bytes())
            for n in (TRUTH_NAME, META_NAME)
        ],
        "w:gz",
    )
    from_folder = pickle.loads(
        pickle.dumps(ImageNetVal(str(folder), SourceOptions(devkit=str(kit))))
    )

    assert contents(from_folder) == contents(
        ImageNetVal(val_tar(tmp_path), SourceOptions(devkit=str(devkit)))
    )


@pytest.mark.parametrize("by_name", [False, True])
def test_real_labels_are_a_second_column(tmp_path, devkit, by_name):
    pairs = list(zip(NAMES, REAL, strict=True))
    value = dict(reversed(pairs)) if by_name else REAL
    (tmp_path / "real.json").write_text(json.dumps(value))
    options = SourceOptions(devkit=str(devkit), real=str(tmp_path / "real.json"))
    source = ImageNetVal(val_tar(tmp_path), options)

    labels = {entry.name: entry.labels[1] for entry in source.entries()}

    assert labels == {name: tuple(real) for name, real in pairs}
    names = ("n01", "n02", "n03")
    assert source.columns() == [Column("label", names=names), Column("real", True, names)]


@pytest.mark.parametrize(
    ("real", "message"),
    [
        (REAL[:4], "has 4 lists of labels, expected one for each of the 5 images"),
        ([*REAL[:4], [3]], r"labels of image 5 are \[3\], expected a list of numbers 0 to 2"),
        ([*REAL[:4], 1], "labels of image 5 are 1"),
        (dict(zip([*NAMES[1:], "x.JPEG"], REAL, strict=True)), "labels for 'x.JPEG'"),
        (dict(zip([*NAMES[1:], NAMES[4][:-5] + ".jpg"], REAL, strict=True)), "not numbered 1 to 5"),
        ("text", "has no lists"),
    ],
)
def test_real_labels_that_do_not_fit_are_refused(tmp_path, devkit, real, message):
    (tmp_path / "real.json").write_text(json.dumps(real))
    options = SourceOptions(devkit=str(devkit), real=str(tmp_path / "real.json"))

    with pytest.raises(DataError, match=rf"real\.json.*{message}"):
        contents(ImageNetVal(val_tar(tmp_path), options))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (NAMES[:3] + NAMES[4:], "has 4 images.* labels for 5; the first one missing is number 4"),
        ([*NAMES, "ILSVRC2012_val_00000006.JPEG"], "'ILSVRC2012_val_00000006.JPEG' is none of the"),
        ([*NAMES, "cat.JPEG"], "'cat.JPEG' is none of the 5 images"),
        ([*NAMES, f"again/{NAMES[0]}"], "image 1 is there twice"),
    ],
)
def test_images_that_do_not_fit_the_development_kit_are_refused(tmp_path, devkit, names, message):
    source = ImageNetVal(val_tar(tmp_path, names), SourceOptions(devkit=str(devkit)))

    with pytest.raises(DataError, match=message):
        contents(source)


def test_without_a_development_kit_the_error_says_where_to_get_it(tmp_path):
    with pytest.raises(UserError, match=r"download ILSVRC2012_devkit_t12\.tar\.gz"):
        contents(ImageNetVal(val_tar(tmp_path), SourceOptions()))


def test_a_development_kit_without_its_files_is_refused(tmp_path, devkit):
    empty = write_tar(tmp_path / "kit.tar", [("data/other", b"")])
    for kit in (empty, tmp_path / "gone.tar.gz"):
        with pytest.raises(UserError, match=r"holds no data/ILSVRC2012|no such file"):
            contents(ImageNetVal(val_tar(tmp_path), SourceOptions(devkit=str(kit))))
    (devkit / TRUTH_NAME).write_text("1\n4\n")
    with pytest.raises(DataError, match="line 2 is '4', which is the id of no class"):
        contents(ImageNetVal(val_tar(tmp_path), SourceOptions(devkit=str(devkit))))
    (devkit / META_NAME).write_bytes(b"junk" * 100)
    with pytest.raises(DataError, match=r"meta\.mat cannot be read"):
        contents(ImageNetVal(val_tar(tmp_path), SourceOptions(devkit=str(devkit))))
