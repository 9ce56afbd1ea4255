import hashlib
import json

import pyarrow as pa
import pytest

from vitscale.data.arrow_shard import ArrowShardWriter
from vitscale.data.label_columns import LabelColumn

COLUMNS = [LabelColumn("label", False, ("ant", "bee")), LabelColumn("real", True, ("x", "y", "z"))]
IMAGES = [b"", b"x", b"y" * 513, b"z" * 70_000]
LABELS = [[(0,), ()], [(1,), (0, 2)], [(), (1,)], [(1,), (2,)]]


@pytest.fixture
def shard(tmp_path):
    """Path and closing of a shard with batches of at most two samples."""
    path = tmp_path / "shard.arrow"
    with open(path, "wb") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitscale.data.arrow_shard.BATCH_ROWS", 2)
        writer = ArrowShardWriter(file, COLUMNS)
        for number, (image, labels) in enumerate(zip(IMAGES, LABELS, strict=True)):
            writer.add(f"{number:09d}", labels, image, "png")
        closed = writer.close()
    return path, closed


def test_arrow_shard_stock_pyarrow_reads_it(shard):
    with pa.memory_map(str(shard[0])) as file:
        reader = pa.ipc.open_file(file)
        rows = reader.read_all().to_pylist()

    assert reader.num_record_batches == 2
    assert [row["image"] for row in rows] == [
        {"bytes": image, "path": f"{number:09d}.png"} for number, image in enumerate(IMAGES)
    ]
    assert [row["label"] for row in rows] == [0, 1, -1, 1]
    assert [row["real"] for row in rows] == [[], [0, 2], [1], [2]]


def test_arrow_shard_offsets_point_to_the_images(shard):
    path, closed = shard
    data = path.read_bytes()

    for image, offset in zip(IMAGES, closed.offsets, strict=True):
        assert data[offset : offset + len(image)] == image


def test_arrow_shard_hash_is_that_of_the_file(shard):
    path, closed = shard

    assert closed.num_bytes == path.stat().st_size
    assert closed.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_arrow_shard_describes_itself_to_datasets(shard):
    with pa.memory_map(str(shard[0])) as file:
        described = json.loads(pa.ipc.open_file(file).schema.metadata[b"huggingface"])

    features = described["info"]["features"]
    assert features["image"] == {"_type": "Image"}
    assert features["label"] == {"names": ["ant", "bee"], "_type": "ClassLabel"}
    assert features["real"]["feature"]["names"] == ["x", "y", "z"]


def test_arrow_shard_without_samples_is_an_empty_table(tmp_path):
    with open(tmp_path / "empty", "wb") as file:
        closed = ArrowShardWriter(file, COLUMNS).close()

    with pa.memory_map(str(tmp_path / "empty")) as file:
        assert pa.ipc.open_file(file).read_all().num_rows == 0
    assert closed.offsets == []
