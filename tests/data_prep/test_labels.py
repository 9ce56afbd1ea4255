import gzip
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.keyed_sort import HIGH, LOW
from data_prep.label_join import by_shard, join_labels, positions
from data_prep.label_rows import LabelList, ListOptions
from data_prep.labels import main
from data_prep.pack import main as pack
from tests.helpers.corpus import make_folder, object_hashes
from vitscale.config.errors import UserError
from vitscale.data import open_dataset

NUM_SAMPLES = 24


@pytest.fixture
def packed(tmp_path):
    """Two dozen samples in several shards."""
    source = make_folder(tmp_path / "in", {"a": 12, "b": 12})
    words = ["--source", f"imagefolder:{source}", "--out", str(tmp_path / "out")]
    assert pack([*words, "--shard-bytes", "8KB", "--workers", "1"]) == 0
    return tmp_path / "out"


def write(path, text: str) -> str:
    path.write_text(text)
    return str(path)


def key(number: int) -> str:
    return f"{number:09d}"


def column_of(out, name: str) -> dict[str, int | list[int]]:
    """Key -> labels of an added column, read without our reader, but for the order of the parts."""
    parts = [pq.read_table(path) for path in sorted((out / "labels" / name).iterdir())]
    pairs = [(row["key"], row[name]) for part in parts for row in part.to_pylist()]
    keys = [own for own, _ in pairs]
    assert keys == [key(number) for number in range(NUM_SAMPLES)]
    return dict(pairs)


ROWS = [(key(n), f"c{n % 3}") for n in range(NUM_SAMPLES)]
TABLES = {
    "csv": "key,label\n" + "".join(f"{k},{v}\n" for k, v in ROWS),
    "no-header.csv": "".join(f"{k},{v}\n" for k, v in ROWS),
    "tsv": "key\tlabel\n" + "".join(f"{k}\t{v}\n" for k, v in reversed(ROWS)),
    "jsonl": "".join(json.dumps({"label": v, "key": k}) + "\n" for k, v in ROWS),
}


@pytest.mark.parametrize("kind", [*TABLES, "csv.gz", "parquet"])
def test_labels_adds_a_column_from_every_kind_of_list(packed, tmp_path, capsys, kind):
    place = tmp_path / f"list.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table(list(zip(*ROWS, strict=True)), names=["key", "label"]), place)
    elif kind == "csv.gz":
        place.write_bytes(gzip.compress(TABLES["csv"].encode()))
    else:
        write(place, TABLES[kind])
    before = object_hashes(packed)

    assert main([str(packed), "--add", "kind", "--from", str(place)]) == 0

    assert column_of(packed, "kind") == {key(n): n % 3 for n in range(NUM_SAMPLES)}
    about = json.loads((packed / "labels" / "kind.json").read_text())
    assert about["column"] == {"name": "kind", "multi": False, "names": ["c0", "c1", "c2"]}
    assert "num_classes=3 labelled=24 of=24 coverage=1.0000" in capsys.readouterr().out
    after = object_hashes(packed)
    assert {name: after[name] for name in before} == before
    assert all(name.startswith("labels/kind") for name in after.keys() - before.keys())


def test_labels_of_sources_reach_their_samples(packed, tmp_path):
    tables = [pq.read_table(path).to_pylist() for path in (packed / "ledger").iterdir()]
    ledger = [row for table in tables for row in table]
    number_of = {row["key"]: int(row["source"].partition("img_")[2][:5]) for row in ledger}
    rows = "".join(f"{row['source']},{number_of[row['key']]}\n" for row in ledger)
    named = write(tmp_path / "s.csv", "source,n\n" + rows)
    other = write(tmp_path / "f", "f,n\n" + rows)

    assert main([str(packed), "--add", "n", "--from", named]) == 0
    words = ["--key-column", "f", "--value-column", "n", "--by", "source"]
    assert main([str(packed), "--add", "m", "--from", other, *words]) == 0

    assert column_of(packed, "n") == column_of(packed, "m") == number_of
    names = json.loads((packed / "labels" / "n.json").read_text())["column"]["names"]
    assert names == [str(number) for number in range(12)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"key,label\n{key(3)},b a b\n{key(1)},\n{key(5)},a\n", ["--label-separator", " "]),
        (f"key,label\n{key(3)},b\n{key(5)},a\n{key(3)},a\n{key(3)},b\n", []),
        (
            f'{{"key": "{key(5)}", "label": ["a"]}}\n{{"key": "{key(1)}", "label": []}}\n'
            f'{{"key": "{key(3)}", "label": ["b", "a"]}}\n{{"key": "{key(2)}", "label": null}}\n',
            [],
        ),
    ],
    ids=["separator", "rows", "lists"],
)
def test_labels_multi_keeps_all_labels_in_their_order(packed, tmp_path, capsys, text, words):
    place = write(tmp_path / "list", text)

    assert main([str(packed), "--add", "many", "--multi", "--from", place, *words]) == 0

    found = column_of(packed, "many")
    assert {k: v for k, v in found.items() if v} == {key(3): [1, 0], key(5): [0]}
    assert "multi=true num_classes=2 labelled=2 of=24" in capsys.readouterr().out


@pytest.mark.parametrize("empty", ["", "-1"])
def test_labels_that_are_missing_are_minus_one(packed, tmp_path, capsys, empty):
    place = write(tmp_path / "list", f"key,label\n{key(2)},1\n{key(4)},{empty}\n{key(6)},0\n")

    assert main([str(packed), "--add", "kind", "--from", place]) == 0

    found = column_of(packed, "kind")
    assert {k: v for k, v in found.items() if v >= 0} == {key(2): 1, key(6): 0}
    assert set(found.values()) == {-1, 0, 1}
    assert "labelled=2 of=24 coverage=0.0833" in capsys.readouterr().out


def test_labels_names_give_the_order_of_classes(packed, tmp_path):
    names = write(tmp_path / "names.txt", "z\ny\nx\n")
    place = write(tmp_path / "list", f"key,label\n{key(0)},x\n{key(1)},0\n{key(2)},y\n")

    assert main([str(packed), "--add", "kind", "--from", place, "--names", names]) == 0

    found = column_of(packed, "kind")
    assert [found[key(n)] for n in range(4)] == [2, 0, 1, -1]
    dataset = open_dataset(packed, label_column="kind")
    assert [dataset.class_names[sample.label] for sample in dataset] == ["x", "z", "y"]


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        (f"key,label\n{key(0)},a\nnobody,b\n{key(99)},b\n", [],
         "2 rows of .* have a key that no sample .* first in row 3: 'nobody', '000000099'; keys "
         "look like '000000000'"),
        (f"key,label\n{key(0)},a\n{key(1)},a\n{key(0)},b\n", [],
         "several classes to one sample, first in row 4: '000000000'"),
        (f"key,label\n{key(0)},a\n{key(1)}\n", [], "row 3: 1 fields, expected 2"),
        (f"key,label\n{key(0)},a\n,b\n", [], "row 3: has no key"),
        (f"key,label\n{key(0)},-7\n", [], "row 2: label -7: classes count from 0"),
        (f"key,label\n{key(0)},99999999\n", [], "label 99999999: numbers count classes from 0"),
        (f"key,label\n{key(0)},\n", [], "all labels are empty"),
        (f"name,label\n{key(0)},a\n", [], "no column 'key' or 'source'; it has name, label"),
        (f"key,x,y\n{key(0)},a,b\n", [], "no column 'label' or 'kind'; it has key, x, y"),
        (f"key,label\n{key(0)},a\n", ["--value-column", "z"], "no column 'z'; it has key, label"),
        (f"key,label\n{key(0)},a\n", ["--value-column", "key"], "would both be column 'key'"),
        (f"source,label\n{key(0)},a\n", [], "have a source that no sample"),
        (f'{{"key": "{key(0)}", "label": ["a", "b"]}}\n', [], "several labels in a cell.*--multi"),
        (f'{{"key": "{key(0)}", "label": {{"a": 1}}}}\n', [], "row 1: label .* neither an integer"),
        ("key,label\n", [], "holds no rows"),
        ("key,label\n", ["--label-separator", ";"], "goes with --multi"),
    ],
)  # fmt: skip
def test_labels_refuses_a_wrong_list(packed, tmp_path, capsys, text, words, said):
    place = write(tmp_path / "list", text)
    before = object_hashes(packed)

    assert main([str(packed), "--add", "kind", "--from", place, *words]) == 2

    error = capsys.readouterr().err.partition("error: ")[2]
    assert re.search(said, error), error
    assert object_hashes(packed) == before


def test_labels_ignores_unknown_keys_when_told_to(packed, tmp_path, capsys):
    place = write(tmp_path / "list", f"key,label\nnobody,a\n{key(7)},b\nnobody,b\n")

    assert main([str(packed), "--add", "kind", "--from", place, "--ignore-unknown"]) == 0

    assert column_of(packed, "kind")[key(7)] == 1
    assert "labelled=1 of=24 coverage=0.0417 unknown=2" in capsys.readouterr().out


def test_labels_names_that_lack_a_label_are_refused(packed, tmp_path, capsys):
    place = write(tmp_path / "list", f"key,label\n{key(0)},a\n{key(1)},b\n{key(2)},7\n")
    names = write(tmp_path / "names.txt", "a\nc\n")

    assert main([str(packed), "--add", "kind", "--from", place, "--names", names]) == 2

    assert "2 labels are not among the 2 classes of --names: 'b', 7" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["label", "key", "image", "a-b", "../x", "1st", "", "a/b"])
def test_labels_refuses_names_that_cannot_be_a_column(packed, tmp_path, name):
    place = write(tmp_path / "list", TABLES["csv"])

    assert main([str(packed), "--add", name, "--from", place]) == 2
    assert not (packed / "labels").exists()


@pytest.mark.parametrize("words", [["--from", "x"], ["--add", "kind"], ["--remove", "kind"]])
def test_labels_refuses_half_a_command(packed, words):
    assert main([str(packed), *words]) == 2


def test_labels_goes_on_after_an_interruption(packed, tmp_path, capsys):
    place = write(tmp_path / "list", TABLES["csv"])
    words = [str(packed), "--add", "kind", "--from", place]
    assert main(words) == 0
    whole = object_hashes(packed)
    parts = sorted((packed / "labels" / "kind").iterdir())
    # As a killed one leaves it: without the JSON, a part missing, one of another list.
    (packed / "labels" / "kind.json").unlink()
    parts[0].unlink()
    parts[1].write_bytes(parts[2].read_bytes())
    capsys.readouterr()

    assert main(words) == 0

    assert f"written=2 kept={len(parts) - 2}" in capsys.readouterr().out
    assert object_hashes(packed) == whole


def test_labels_once_more_changes_nothing_and_others_are_refused(packed, tmp_path, capsys):
    words = [str(packed), "--add", "kind", "--from"]
    assert main([*words, write(tmp_path / "list", TABLES["csv"])]) == 0
    whole = object_hashes(packed)

    assert main([*words, write(tmp_path / "tsv", TABLES["tsv"])]) == 0
    assert "written=0" in capsys.readouterr().out
    for text in (TABLES["csv"].replace("c2", "c1"), TABLES["csv"].replace("c", "d")):
        assert main([*words, write(tmp_path / "other", text)]) == 2
        assert "has a column 'kind' already, with other labels" in capsys.readouterr().err
    assert object_hashes(packed) == whole


def test_labels_lists_and_removes_columns(packed, tmp_path, capsys):
    before = object_hashes(packed)
    place = write(tmp_path / "list", f"key,label\n{key(0)},a\n")
    for name in ("one", "two"):
        assert main([str(packed), "--add", name, "--from", place]) == 0
    capsys.readouterr()

    assert main([str(packed)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "column=label kind=stored multi=false num_classes=2",
        "column=one kind=added multi=false num_classes=1 labelled=1 of=24 coverage=0.0417",
        "column=two kind=added multi=false num_classes=1 labelled=1 of=24 coverage=0.0417",
    ]
    for name in ("one", "two"):
        assert main([str(packed), "--remove", name]) == 0
    assert object_hashes(packed) == before
    assert main([str(packed), "--remove", "label"]) == 2
    assert "part of the shards" in capsys.readouterr().err


def test_labels_of_a_missing_dataset_or_list(tmp_path, packed, capsys):
    assert main([str(tmp_path / "none")]) == 2
    assert main([str(packed), "--add", "kind", "--from", str(tmp_path / "none")]) == 2
    assert "none': no such file" in capsys.readouterr().err
    assert main([str(packed), "--add", "kind", "--from", str(tmp_path / "in/*/*")]) == 2
    assert "stands for 24 files; give one" in capsys.readouterr().err


@pytest.mark.parametrize("held_rows", [1, 7, 1 << 20])
@pytest.mark.parametrize("multi", [False, True])
def test_join_gives_the_same_however_little_fits_in_memory(packed, tmp_path, held_rows, multi):
    rng = np.random.default_rng(5)
    wanted: dict[int, list[int]] = {n: [] for n in range(NUM_SAMPLES)}
    rows = []
    for number in rng.permutation(NUM_SAMPLES)[:20].tolist():
        for label in rng.permutation(9)[: 3 if multi else 1].tolist():
            wanted[number].append(label)
            rows.append(f"{key(number)},{label}\n")
    place = write(tmp_path / "list", "".join([*rows, "unknown,8\n"]))
    dataset = open_dataset(packed)
    labels = LabelList(place, "kind", multi, ListOptions())

    joined, unknown = join_labels(dataset.storage, dataset.manifest, labels, None, held_rows)

    starts = dataset.manifest.shards.starts
    found: dict[int, list[int]] = {n: [] for n in range(NUM_SAMPLES)}
    for start, (places, classes) in zip(starts, by_shard(joined, starts), strict=False):
        for row, label in zip(places.tolist(), classes.tolist(), strict=True):
            found[int(start) + row].append(label)
    assert found == wanted
    assert (joined.num_unknown, unknown) == (1, [len(rows) + 1])
    assert labels.keys(unknown) == ["unknown"]


def test_positions_tell_hashes_with_equal_halves_apart():
    def table(pairs):
        high, low = zip(*pairs, strict=True)
        return pa.table([pa.array(high, pa.uint64()), pa.array(low, pa.uint64())], [HIGH, LOW])

    own = table([(1, 1), (2, 5), (2, 7), (2, 9), (2**64 - 1, 0)])
    other = table([(0, 1), (2, 4), (2, 5), (2, 9), (2, 9), (2, 10), (3, 0), (2**64 - 1, 0)])

    assert positions(own, other).tolist() == [-1, -1, 1, 3, 3, -1, -1, 4]
    assert positions(own.slice(0, 0), other).tolist() == [-1] * 8


@pytest.mark.s3
def test_labels_on_a_store(tmp_path, s3_uri):
    source = make_folder(tmp_path / "in", {"a": 4})
    assert pack(["--source", f"imagefolder:{source}", "--out", s3_uri, "--workers", "1"]) == 0
    place = write(tmp_path / "list", f"key,label\n{key(1)},x\n{key(2)},y\n")

    assert main([s3_uri, "--add", "kind", "--from", place]) == 0

    assert [sample.label for sample in open_dataset(s3_uri, label_column="kind")] == [0, 1]
    assert main([s3_uri, "--remove", "kind"]) == 0
    with pytest.raises(UserError, match="no label column 'kind'"):
        open_dataset(s3_uri, label_column="kind")
