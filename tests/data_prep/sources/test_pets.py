import pytest

from data_prep.sources.build import Column, SourceOptions, build_source
from data_prep.sources.pets import Pets
from tests.helpers.tars import contents
from vitscale.config.errors import DataError, UserError

TRAINVAL = """\
#Image CLASS-ID SPECIES BREED ID
Abyssinian_100 1 1 1
american_bulldog_7 2 2 1
yorkshire_terrier_9 3 2 2
"""
TEST = "Abyssinian_2 1 1 1\nyorkshire_terrier_1 3 2 2\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "annotations").mkdir()
    (tmp_path / "images").mkdir()
    (tmp_path / "annotations" / "trainval.txt").write_text(TRAINVAL)
    (tmp_path / "annotations" / "test.txt").write_text(TEST)
    for line in (TRAINVAL + TEST).splitlines():
        if not line.startswith("#"):
            name = line.split()[0]
            (tmp_path / "images" / f"{name}.jpg").write_bytes(name.encode())
    return tmp_path


@pytest.mark.parametrize(
    ("split", "wanted"),
    [
        (
            "train",
            {
                "Abyssinian_100": (0, 0),
                "american_bulldog_7": (1, 1),
                "yorkshire_terrier_9": (2, 1),
            },
        ),
        ("val", {"Abyssinian_2": (0, 0), "yorkshire_terrier_1": (2, 1)}),
        ("test", {"Abyssinian_2": (0, 0), "yorkshire_terrier_1": (2, 1)}),
    ],
)
def test_split_chooses_the_list(folder, split, wanted):
    source = build_source(f"pets:{folder}", SourceOptions(split=split))

    assert contents(source) == {
        f"images/{name}.jpg": (labels, name.encode()) for name, labels in wanted.items()
    }
    assert source.columns() == [
        Column("label", names=("Abyssinian", "american_bulldog", "yorkshire_terrier")),
        Column("species", names=("cat", "dog")),
    ]


def test_missing_images_have_a_problem(folder):
    (folder / "images" / "american_bulldog_7.jpg").unlink()

    problems = [entry.problem for entry in Pets(str(folder), SourceOptions()).entries()]

    assert problems == ["", "missing_file: images/american_bulldog_7.jpg", ""]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Abyssinian_100 1 1\n", "line 1 is 'Abyssinian_100 1 1', expected such as"),
        ("Abyssinian_100 1 3 1\n", "line 1 is 'Abyssinian_100 1 3 1'"),
        ("../Abyssinian_100 1 1 1\n", "line 1 is"),
        ("Bengal_100 1 1 1\n", "Bengal_100 is of class 1, which is|Abyssinian_2 is of class 1"),
        ("Bengal_100 5 1 1\n", r"the classes are \[1, 3, 5\], expected 1 to 37"),
    ],
)
def test_damaged_lists_are_named(folder, text, said):
    (folder / "annotations" / "trainval.txt").write_text(text)

    with pytest.raises(DataError, match=said):
        list(Pets(str(folder), SourceOptions()).entries())


def test_missing_lists_and_splits_are_named(tmp_path):
    with pytest.raises(UserError, match=r"trainval\.txt is missing; give the folder that holds"):
        list(Pets(str(tmp_path), SourceOptions()).entries())
    with pytest.raises(UserError, match="'dev' is not one of train, val, test"):
        list(Pets(str(tmp_path), SourceOptions(split="dev")).entries())
