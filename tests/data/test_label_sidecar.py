import json

import pytest

from data_prep.labels import main as labels
from tests.helpers.small_dataset import local_dataset
from vitscale.config.errors import DataError, UserError
from vitscale.data.label_sidecar import (
    list_sidecars,
    load_sidecar,
    load_sidecar_shard,
    sidecar_shard_name,
)
from vitscale.data.manifest import MANIFEST_NAME, json_bytes, load_manifest


@pytest.fixture
def dataset(tmp_path):
    """Two shards, whose samples but the last have a class in the added column."""
    storage, manifest = local_dataset(tmp_path / "out", [3, 0, 4])
    rows = "".join(f"{number:09d},{'xy'[number % 2]}\n" for number in range(6))
    (tmp_path / "list.csv").write_text("key,label\n" + rows)
    assert labels([storage.uri, "--add", "kind", "--from", str(tmp_path / "list.csv")]) == 0
    return storage, manifest


def change(storage, **values) -> None:
    content = json.loads(storage.read_bytes("labels/kind.json"))
    storage.put("labels/kind.json", json_bytes({**content, **values}))


def test_sidecar_says_what_it_is_without_its_parts(dataset):
    storage, manifest = dataset

    sidecar = load_sidecar(storage, manifest, "kind")

    assert (sidecar.column.name, sidecar.column.multi) == ("kind", False)
    assert sidecar.column.names == ("x", "y")
    assert [shard.num_labelled for shard in sidecar.shards] == [3, 0, 3]
    assert sidecar.num_labelled == 6
    assert sum(shard.keys_sum64 for shard in sidecar.shards) != manifest.keys_sum64
    assert sidecar.samples_sha256 == manifest.samples_sha256


def test_sidecar_parts_are_in_the_order_of_the_index(dataset):
    storage, manifest = dataset
    sidecar = load_sidecar(storage, manifest, "kind")

    tables = [load_sidecar_shard(storage, manifest, sidecar, n).to_pydict() for n in range(3)]

    assert tables[1] == {"key": [], "kind": []}
    assert tables[2]["key"] == [f"{number:09d}" for number in range(3, 7)]
    assert tables[2]["kind"] == [1, 0, 1, -1]


def test_a_column_without_its_json_is_none(dataset):
    storage, manifest = dataset
    assert list_sidecars(storage) == ["kind"]

    storage.delete("labels/kind.json")

    assert list_sidecars(storage) == []
    with pytest.raises(UserError, match=r"no label column 'kind'; it has label.*vitscale labels"):
        load_sidecar(storage, manifest, "kind")


def test_names_of_parts_keep_the_folders_of_shards():
    assert sidecar_shard_name("kind", "shard-000001.tar") == "labels/kind/shard-000001.parquet"
    assert sidecar_shard_name("k", "7f/shard-000001.arrow") == "labels/k/7f/shard-000001.parquet"


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        ({"version": 2}, UserError, "version 2, this program reads version 1"),
        ({"manifest_digest": "0"}, UserError, "was made for another dataset"),
        ({"shards": []}, DataError, "of 0 shards, the dataset has 3"),
        ({"shards": [{"sha": ""}]}, DataError, "fields are missing or unknown"),
        ({"column": {"name": "x", "multi": False, "names": []}}, DataError, "is column 'x' of 3"),
    ],
)  # fmt: skip
def test_load_sidecar_refuses_what_does_not_fit(dataset, values, error, said):
    storage, manifest = dataset
    change(storage, **values)

    with pytest.raises(error, match=said):
        load_sidecar(storage, manifest, "kind")


def test_sidecar_of_a_dataset_that_was_packed_anew_is_refused(dataset):
    storage, _ = dataset
    content = json.loads(storage.read_bytes(MANIFEST_NAME))
    storage.put(MANIFEST_NAME, json_bytes({**content, "split": "val"}))

    with pytest.raises(UserError, match=r"was made for another dataset: .*--remove kind"):
        load_sidecar(storage, load_manifest(storage), "kind")


def test_damaged_parts_are_named(dataset):
    storage, manifest = dataset
    sidecar = load_sidecar(storage, manifest, "kind")
    name = "labels/kind/shard-000002.parquet"
    storage.put(name, storage.read_bytes("labels/kind/shard-000000.parquet"))

    with pytest.raises(DataError, match=f"shard {name}: sha256 is"):
        load_sidecar_shard(storage, manifest, sidecar, 2)
    storage.delete(name)
    with pytest.raises(DataError, match=f"shard {name}: is missing"):
        load_sidecar_shard(storage, manifest, sidecar, 2)
