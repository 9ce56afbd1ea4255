import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.index import main
from data_prep.show import main as show
from data_prep.stats import main as stats
from data_prep.verify import main as verify
from tests.helpers.corpus import crop, encoded
from tests.helpers.small_dataset import RemoteFiles, flip_byte
from vitscale.config.errors import DataError
from vitscale.data import open_dataset
from vitscale.data.cache import ShardCache
from vitscale.data.manifest import load_manifest
from vitscale.data.parquet_shard import ParquetShard, RowGroups
from vitscale.data.reader import ShardReader
from vitscale.data.storage import open_storage

CLASSES = ["ant", "bee", "cow"]
NUM_FILES, NUM_ROWS, GROUP_ROWS = 2, 25, 10


def image(number: int) -> bytes:
    return encoded(crop(number), "PNG" if number % 3 == 2 else "JPEG")


def write_file(path: Path, numbers: range, images: dict[int, bytes | None] | None = None) -> None:
    """Write a file as Hugging Face's library does."""
    features = {"image": {"_type": "Image"}, "label": {"names": CLASSES, "_type": "ClassLabel"}}
    rows = [{"bytes": (images or {}).get(n, image(n)), "path": f"{n}.jpg"} for n in numbers]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    labels = pa.array([n % 3 for n in numbers], pa.int64())
    table = pa.table({"image": pa.array(rows, kind), "label": labels})
    table = table.replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, path, row_group_size=GROUP_ROWS)


@pytest.fixture
def files(tmp_path) -> Path:
    for file in range(NUM_FILES):
        first = file * NUM_ROWS
        write_file(tmp_path / "hf" / f"train-{file:05d}.parquet", range(first, first + NUM_ROWS))
    return tmp_path / "hf"


def index(files: Path, *more: str) -> int:
    return main([str(files), "--workers", "1", *more])


def reader_of(storage, tmp_path) -> ShardReader:
    manifest = load_manifest(storage)
    return ShardReader(storage, manifest, ShardCache(storage, manifest, tmp_path, 1 << 30), 4)


def test_index_makes_a_dataset_of_parquet_files(files):
    before = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files.iterdir()}

    assert index(files) == 0

    after = {name: hashlib.sha256((files / name).read_bytes()).hexdigest() for name in before}
    assert after == before
    dataset = open_dataset(files)
    assert dataset.class_names == CLASSES
    samples = list(dataset)
    assert [s.image for s in samples] == [image(n) for n in range(50)]
    assert [s.label for s in samples] == [n % 3 for n in range(50)]
    assert samples[26].key == "train-00001/000001"
    assert dataset[-1].image == image(49)
    assert verify([str(files), "--level", "decode", "--workers", "1"]) == 0


@pytest.mark.parametrize("store", ["local", "remote"])
def test_training_reads_rows_in_any_order(files, tmp_path, store):
    assert index(files) == 0
    storage = open_storage(files) if store == "local" else RemoteFiles(files)
    reader = reader_of(storage, tmp_path / "cache")

    for number in (49, 0, 12, 26, 3, 24, 25):
        record = reader.read(number // NUM_ROWS, number % NUM_ROWS)
        assert (record.image, record.label) == (image(number), number % 3)

    reader.close()


def test_parquet_rows_without_an_image_are_in_the_ledger(files):
    bad = {50: None, 51: b"", 53: b"<html>"}
    write_file(files / "train-00002.parquet", range(50, 55), bad)

    assert index(files) == 0

    rows = pq.read_table(files / "ledger" / "train-00002.parquet").to_pylist()
    failed = {r["source"]: r["reason"].partition(":")[0] for r in rows if r["status"] == "failed"}
    assert failed == {
        "parquet:train-00002.parquet/0": "incomplete_sample",
        "parquet:train-00002.parquet/1": "empty",
        "parquet:train-00002.parquet/3": "not_an_image",
    }
    samples = list(open_dataset(files))[50:]
    assert [(s.key, s.image, s.offset) for s in samples] == [
        ("train-00002/000002", image(52), 2),
        ("train-00002/000004", image(54), 4),
    ]


def test_damage_in_a_parquet_file_is_found_and_not_served(files, tmp_path, capsys):
    assert index(files) == 0
    path = files / "train-00001.parquet"
    flip_byte(path, path.read_bytes().index(image(31)[200:260]) + 20)

    assert verify([str(files), "--workers", "1"]) == 3
    assert "shard=train-00001.parquet key=train-00001/000006" in capsys.readouterr().out
    with pytest.raises(DataError, match="train-00001/000006"):
        open_dataset(files)[31]
    with pytest.raises(DataError, match="train-00001/000006"):
        reader_of(open_storage(files), tmp_path).read(1, 6)
    assert open_dataset(files)[45].image == image(45)


@pytest.mark.parametrize("cut", [0, 4, 3000, -1])
def test_index_refuses_a_damaged_parquet_file(files, capsys, cut):
    path = files / "train-00001.parquet"
    path.write_bytes(path.read_bytes()[:cut])

    assert index(files) == 3

    assert "train-00001.parquet" in capsys.readouterr().err
    assert not (files / "manifest.json").exists()


def test_index_asks_for_the_image_column_where_several_could_be_it(tmp_path, capsys):
    (tmp_path / "hf").mkdir()
    data = [image(0), image(1)]
    table = pa.table({"left": data, "right": data[::-1], "label": ["x", "y"]})
    pq.write_table(table, tmp_path / "hf" / "a.parquet")

    assert index(tmp_path / "hf") == 2
    assert "--image-column must name" in capsys.readouterr().err
    assert index(tmp_path / "hf", "--image-column", "right") == 0

    assert [s.image for s in open_dataset(tmp_path / "hf")] == data[::-1]


def test_index_asks_which_kind_of_shard_where_there_are_both(files, capsys):
    (files / "x.tar").write_bytes(bytes(10240))

    assert index(files) == 2

    assert "say which with --format" in capsys.readouterr().err
    assert index(files, "--format", "parquet") == 0


def test_show_and_stats_take_parquet_files(files, tmp_path, capsys):
    assert index(files) == 0

    assert show([str(files), "--key", "train-00001/000003", "--save", str(tmp_path / "look")]) == 0
    assert stats([str(files)]) == 0

    path = tmp_path / "look" / "train-00001/000003.jpg"
    assert path.read_bytes() == image(28)
    assert "classes of label: 3, of these 0 empty" in capsys.readouterr().out


def test_row_groups_are_kept_up_to_a_limit(files):
    groups = RowGroups(limit_bytes=1)
    shard = ParquetShard(files / "train-00000.parquet", "a", "image", groups)

    assert [shard.image(row) for row in (0, 24, 1)] == [image(0), image(24), image(1)]

    assert groups.get("a", 0) is not None
    assert groups.get("a", 2) is None
    groups.drop("a")
    assert groups.get("a", 0) is None
    with pytest.raises(DataError, match="has 25 rows, row 25 is not there"):
        shard.image(25)
