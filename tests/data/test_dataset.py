import subprocess
import sys

import pytest

from data_prep.pack import main as pack
from tests.helpers.corpus import make_folder
from vitscale.config.errors import DataError
from vitscale.data import dataset as module
from vitscale.data import open_dataset


@pytest.fixture
def dataset(tmp_path):
    source = make_folder(tmp_path / "in", {"a": 7, "b": 6})
    args = ["--source", f"imagefolder:{source}", "--out", str(tmp_path / "out")]
    assert pack([*args, "--shard-bytes", "8KB", "--workers", "1"]) == 0
    return open_dataset(tmp_path / "out")


def test_dataset_indexing_and_iteration_agree(dataset, tmp_path):
    samples = list(dataset)

    assert len(dataset) == len(samples) == 13
    assert [dataset[i] for i in range(13)] == samples
    assert dataset[-1] == samples[-1]
    assert [sample.key for sample in samples] == [f"{number:09d}" for number in range(13)]
    originals = {path.read_bytes(): path.parent.name for path in (tmp_path / "in").rglob("*.*")}
    assert {s.image: dataset.class_names[s.label] for s in samples} == originals


def test_dataset_iteration_in_small_spans_is_the_same(dataset, monkeypatch):
    whole = list(dataset)
    monkeypatch.setattr(module, "SPAN_BYTES", 1500)

    assert list(dataset) == whole


@pytest.mark.parametrize("index", [13, -14])
def test_dataset_index_out_of_range(dataset, index):
    with pytest.raises(IndexError, match=f"sample {index} of 13"):
        dataset[index]


def test_dataset_damaged_sample_is_named(dataset):
    sample = dataset[5]
    path = dataset.storage.local_path(sample.shard)
    data = bytearray(path.read_bytes())
    data[sample.offset + 3] ^= 0x40
    path.write_bytes(data)
    place = f"shard {sample.shard}, key {sample.key}, offset {sample.offset}: xxh3"

    with pytest.raises(DataError, match=place):
        dataset[5]
    with pytest.raises(DataError, match=place):
        list(dataset)
    assert dataset[4].key == "000000004"


def test_dataset_truncated_or_missing_shard_is_named(dataset):
    sample = dataset[12]
    path = dataset.storage.local_path(sample.shard)
    path.write_bytes(path.read_bytes()[: sample.offset + 5])

    with pytest.raises(
        DataError, match=rf"key {sample.key}, offset {sample.offset}: xxh3 of 5 bytes"
    ):
        dataset[12]
    path.unlink()
    with pytest.raises(DataError, match=f"shard {sample.shard}: is missing"):
        dataset[12]


@pytest.mark.s3
def test_dataset_reads_from_s3(tmp_path, s3_uri):
    source = make_folder(tmp_path / "in", {"a": 3})
    assert pack(["--source", f"imagefolder:{source}", "--out", s3_uri, "--workers", "1"]) == 0

    dataset = open_dataset(s3_uri)

    assert {sample.image for sample in dataset} == {
        path.read_bytes() for path in source.rglob("*.*")
    }
    assert dataset[1] == list(dataset)[1]


@pytest.mark.parametrize("extra", ["", "import torch;"], ids=["ours", "twin-that-fails"])
def test_data_package_imports_without_torch(extra):
    code = (
        f"import sys; sys.modules['torch'] = None; {extra} from vitscale.data import open_dataset"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert (done.returncode == 0) == (not extra), done.stderr
