import json
import pickle
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.sources.build import Column, SourceOptions, build_source
from data_prep.sources.parquet import ParquetFiles
from data_prep.verdict import BadInputError
from vitscale.config.errors import DataError, UserError
from vitscale.data.storage import open_storage

NAMES = ["zebra", "ant", "moose"]
CLASS_LABEL = {"names": NAMES, "_type": "ClassLabel"}


def image(number):
    return f"image {number} ".encode() * (1 + number % 5)


def structs(count, **other):
    return [{"bytes": image(n), "path": f"{n}.jpg", **other} for n in range(count)]


def write(path, columns, features=None, rows_in_group=4):
    table = pa.table(columns)
    if features:
        info = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": info})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows_in_group)
    return path


def source(uri, **options):
    return ParquetFiles(str(uri), SourceOptions(**options))


def read_all(parquet):
    other = pickle.loads(pickle.dumps(parquet))
    return [other.read(entry) for entry in parquet.entries()]


def test_hugging_face_files_keep_the_order_of_their_classes(tmp_path):
    columns = {"image": structs(10), "label": [n % 3 for n in range(10)]}
    path = write(tmp_path / "a.parquet", columns, {"image": {}, "label": CLASS_LABEL})
    parquet = source(path)

    entries = list(parquet.entries())

    assert parquet.columns() == [Column("label", names=tuple(NAMES))]
    assert [entry.labels for entry in entries] == [(n % 3,) for n in range(10)]
    assert [entry.name for entry in entries] == [str(n) for n in range(10)]
    assert [entry.block for entry in entries] == ["#0"] * 4 + ["#1"] * 4 + ["#2"] * 2
    assert read_all(parquet) == [image(n) for n in range(10)]


def test_sizes_add_up_to_those_of_the_images(tmp_path):
    rng = np.random.default_rng(0)
    columns = {"image": [rng.bytes(10_000 + 50 * n) for n in range(100)], "label": ["a"] * 100}
    parquet = source(write(tmp_path / "a.parquet", columns, rows_in_group=25))

    total = sum(entry.num_bytes for entry in parquet.entries())

    assert total == pytest.approx(sum(map(len, read_all(parquet))), rel=0.02)


@pytest.mark.parametrize(
    ("labels", "features", "column", "wanted"),
    [
        ([2, 0, -1], None, Column("label"), [(2,), (0,), (-1,)]),
        (pa.array([2, 0, None], pa.uint8()), None, Column("label"), [(2,), (0,), ((),)]),
        (["dog", "cat", "dog"], None, Column("label"), [("dog",), ("cat",), ("dog",)]),
        (pa.array(["b", "a"]).dictionary_encode().take([0, 1, 0]), None, Column("label"),
         [("b",), ("a",), ("b",)]),
        ([True, False, True], None, Column("label"), [(1,), (0,), (1,)]),
        ([[0, 2], [], None], {"feature": CLASS_LABEL, "_type": "Sequence"},
         Column("label", True, tuple(NAMES)), [((0, 2),), ((),), ((),)]),
        ([["x", "y"], [], ["x"]], None, Column("label", True), [(("x", "y"),), ((),), (("x",),)]),
    ],
)  # fmt: skip
def test_kinds_of_label(tmp_path, labels, features, column, wanted):
    columns = {"note": [0.5] * 3, "jpg": [b"1", b"2", b"3"], "label": labels}
    parquet = source(write(tmp_path / "a.parquet", columns, features and {"label": features}))

    assert [entry.labels for entry in parquet.entries()] == wanted
    assert parquet.columns() == [column]


def test_several_label_columns(tmp_path):
    columns = {"img": structs(3), "fine label": [5, 6, 7], "coarse": ["a", "b", "a"]}
    parquet = source(write(tmp_path / "a.parquet", columns), label_columns=("fine label", "coarse"))

    assert [entry.labels for entry in parquet.entries()] == [(5, "a"), (6, "b"), (7, "a")]
    assert parquet.columns() == [Column("fine_label"), Column("coarse")]


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ({"a": [b"1"], "b": [b"2"], "label": [1]}, {}, "--image-column must say which one: a, b;"),
        ({"text": ["x"], "label": [1]}, {}, "--image-column must say which one: none fits"),
        ({"image": [b"1"], "label": [1]}, {"image_column": "x"}, "x: there is no such column; the"),
        ({"image": [b"1"], "label": [1]}, {"image_column": "label"}, "label: holds other things"),
        ({"image": [b"1"], "x": [1], "y": [1]}, {}, "--label-column must say which one: x, y"),
        ({"image": [b"1"], "x": [0.5]}, {}, "--label-column must say which one: none fits"),
        ({"image": [b"1"], "x": [1]}, {"label_columns": ("z",)}, "z: there is no such column"),
        ({"image": pa.array([], pa.binary()), "label": pa.array([], pa.int64())}, {}, "no rows"),
    ],
)  # fmt: skip
def test_columns_that_are_not_clear_are_refused(tmp_path, columns, options, said):
    path = write(tmp_path / "a.parquet", columns)

    with pytest.raises(UserError, match=said):
        list(source(path, **options).entries())


def test_files_of_one_set_are_read_by_name(tmp_path, capsys):
    for number in (2, 0):
        columns = {"image": [image(number)], "label": [number]}
        write(tmp_path / f"train-{number:05d}-of-00004.parquet", columns)
    parquet = source(tmp_path / "train-*.parquet")

    entries = list(parquet.entries())

    assert [(entry.name, entry.labels) for entry in entries] == [
        ("train-00000-of-00004.parquet/0", (0,)),
        ("train-00002-of-00004.parquet/0", (2,)),
    ]
    assert len({entry.block for entry in entries}) == 2
    assert read_all(parquet) == [image(0), image(2)]
    said = capsys.readouterr().err
    assert "warning: parquet: 2 of 4 files are not there" in said
    assert "train-00001-of-00004.parquet, " in said
    assert "train-00003-of-00004.parquet" in said


def test_files_with_other_classes_are_refused(tmp_path):
    for name, names in (("a", NAMES), ("b", NAMES[::-1])):
        features = {"label": {"names": names, "_type": "ClassLabel"}}
        write(tmp_path / f"{name}.parquet", {"image": [b"1"], "label": [0]}, features)

    with pytest.raises(UserError, match=r"b\.parquet' has other columns .*3 classes moose, "):
        list(source(tmp_path).entries())


def test_images_without_bytes_are_looked_for_beside_the_file(tmp_path):
    (tmp_path / "in" / "pictures").mkdir(parents=True)
    (tmp_path / "in" / "pictures" / "1.jpg").write_bytes(b"beside")
    (tmp_path / "secret.jpg").write_bytes(b"outside")
    outside = ["../secret.jpg", f"{tmp_path}/secret.jpg"]
    paths = ["pictures/1.jpg", *outside, "gone.jpg", "pictures", None]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = [*({"bytes": None, "path": path} for path in paths), None]
    columns = {"image": pa.array(images, kind), "label": [0] * len(images)}
    parquet = source(write(tmp_path / "in" / "a.parquet", columns))
    entries = list(parquet.entries())

    assert parquet.read(entries[0]) == b"beside"
    for entry in entries[1:]:
        with pytest.raises(BadInputError, match=r"^incomplete_sample: "):
            parquet.read(entry)


@pytest.mark.parametrize("change", ["other images", "fewer groups", "gone", "cut", "broken"])
def test_files_that_change_after_listing_end_the_run(tmp_path, change):
    columns = {"image": structs(20), "label": [0] * 20}
    path = write(tmp_path / "a.parquet", columns)
    parquet = source(path)
    entry = list(parquet.entries())[-1]
    data = bytearray(path.read_bytes())
    if change == "other images":
        columns["image"] = [{"bytes": b"y" * 1000, "path": "y"}] * 20
        write(path, columns)
    elif change == "fewer groups":
        write(path, {"image": structs(8), "label": [0] * 8})
    elif change == "gone":
        path.unlink()
    elif change == "cut":
        path.write_bytes(data[:-100])
    else:
        footer = int.from_bytes(data[-8:-4], "little") + 8
        data[4:-footer] = bytes(len(data) - footer - 4)
        path.write_bytes(data)

    with pytest.raises(DataError, match=r"a\.parquet'"):
        parquet.read(entry)


def test_threads_share_the_row_groups(tmp_path):
    count = 200
    columns = {"image": structs(count), "label": [0] * count}
    parquet = source(write(tmp_path / "a.parquet", columns, rows_in_group=10))
    entries = list(parquet.entries())
    found = [[] for _ in range(4)]

    def work(number):
        order = np.random.default_rng(number).permutation(count)
        found[number] = [(at, parquet.read(entries[at])) for at in order.tolist()]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all(sorted(own) == [(n, image(n)) for n in range(count)] for own in found)


def test_listing_does_not_read_images(tmp_path):
    columns = {"label": [0] * 64, "image": [bytes([n]) * 1000 for n in range(64)]}
    path = write(tmp_path / "a.parquet", columns, rows_in_group=64)
    data = bytearray(path.read_bytes())
    images = pq.read_metadata(path).row_group(0).column(1)
    start = images.dictionary_page_offset or images.data_page_offset
    data[start : start + images.total_compressed_size] = bytes(images.total_compressed_size)
    path.write_bytes(data)
    parquet = source(path)

    entries = list(parquet.entries())

    assert len(entries) == 64
    with pytest.raises(DataError, match="row group 0 cannot be read"):
        parquet.read(entries[0])


def test_what_is_no_parquet_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")

    with pytest.raises(DataError, match=r"a\.parquet' is no sound Parquet file"):
        list(source(tmp_path / "a.parquet").entries())
    with pytest.raises(UserError, match="no such file"):
        list(source(tmp_path / "*.parq").entries())


@pytest.mark.s3
def test_files_in_a_store(tmp_path, s3_uri):
    storage = open_storage(s3_uri)
    for number in range(2):
        columns = {"image": structs(6), "label": [number] * 6}
        path = write(tmp_path / f"{number}.parquet", columns)
        storage.put(f"set/{number}.parquet", path.read_bytes())
    parquet = build_source(f"parquet:{s3_uri}/set", SourceOptions())

    assert [entry.labels for entry in parquet.entries()] == [(0,)] * 6 + [(1,)] * 6
    assert read_all(parquet) == [image(n) for n in range(6)] * 2
