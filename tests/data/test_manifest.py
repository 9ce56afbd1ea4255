import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from data_prep.pack import main as pack
from tests.helpers.corpus import make_folder
from vitscale.config.errors import DataError, UserError
from vitscale.data.manifest import (
    index_schema,
    json_bytes,
    load_class_names,
    load_index,
    load_manifest,
    parquet_bytes,
    sha256_hex,
)
from vitscale.data.storage import open_storage


@pytest.fixture
def storage(tmp_path):
    source = make_folder(tmp_path / "in", {"a": 6, "b": 6})
    args = ["--source", f"imagefolder:{source}", "--out", str(tmp_path / "out"), "--split", "val"]
    assert pack([*args, "--shard-bytes", "8KB", "--workers", "1"]) == 0
    return open_storage(tmp_path / "out")


def change_manifest(storage, **values) -> None:
    manifest = json.loads(storage.read_bytes("manifest.json"))
    manifest.update(values)
    storage.put("manifest.json", json_bytes(manifest))


def test_load_manifest_has_totals_and_digest(storage):
    manifest = load_manifest(storage)

    assert (manifest.version, manifest.format, manifest.split) == (2, "tar", "val")
    assert (manifest.num_samples, manifest.num_classes, manifest.num_failed) == (12, 2, 0)
    assert manifest.num_shards == len(manifest.shards) > 1
    assert manifest.num_bytes == sum(storage.size(name) for name in manifest.shards.names)
    assert manifest.digest == sha256_hex(storage.read_bytes("manifest.json"))
    assert manifest.image["policy"] == "keep"
    assert (
        manifest.keys_sum64 == sum(xxhash.xxh64_intdigest(b"%09d" % n) for n in range(12)) % 2**64
    )
    assert load_class_names(storage, manifest) == ["a", "b"]


def test_shard_table_starts_count_samples(storage):
    shards = load_manifest(storage).shards

    assert shards.starts.tolist() == [0, *np.cumsum(shards.num_samples).tolist()]


def test_load_manifest_missing_says_how_to_make_one(tmp_path):
    with pytest.raises(UserError, match=f"no dataset at {tmp_path}: .*vitscale pack"):
        load_manifest(open_storage(tmp_path))


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        ({"version": 1}, UserError, "manifest version 1, this program reads version 2"),
        ({"format": "zip"}, UserError, "format 'zip' cannot be read"),
        ({"num_samples": 13}, DataError, "says 13 samples, shards.parquet has 12"),
        ({"num_shards": 1}, DataError, "the manifest says 1"),
        ({"shards_sha256": "0"}, DataError, "shard shards.parquet: sha256 is"),
        ({"colour": "red"}, DataError, "fields are missing or unknown"),
        ({"view": None}, DataError, "fields are missing or unknown"),
    ],
)
def test_load_manifest_refuses_what_does_not_fit(storage, values, error, said):
    change_manifest(storage, **values)

    with pytest.raises(error, match=said):
        load_manifest(storage)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b"\xff"])
def test_load_manifest_broken_json_is_named(storage, data):
    storage.put("manifest.json", data)

    with pytest.raises(DataError, match=r"manifest\.json"):
        load_manifest(storage)


def test_load_index_types_and_order(storage):
    manifest = load_manifest(storage)

    index = load_index(storage, manifest, 1)

    assert len(index) == manifest.shards.num_samples[1] == len(index.image_formats)
    assert index.keys == sorted(index.keys)
    assert (np.diff(index.offsets) > 0).all()
    assert index.xxh3.dtype == np.uint64
    assert index.offsets.dtype == index.num_bytes.dtype == index.labels.dtype == np.int64
    assert index.widths.min() >= 16


def test_load_index_damage_is_named(storage):
    manifest = load_manifest(storage)
    storage.put("shard-000001.index.parquet", b"PAR1 not really PAR1")

    with pytest.raises(DataError, match=r"shard shard-000001\.index\.parquet: sha256 is"):
        load_index(storage, manifest, 1)
    storage.delete("shard-000001.index.parquet")
    with pytest.raises(DataError, match=r"shard-000001\.index\.parquet: is missing"):
        load_index(storage, manifest, 1)


def test_load_class_names_damage_is_named(storage):
    manifest = load_manifest(storage)
    storage.put("labels.json", json_bytes({"version": 1, "names": ["a", "c"]}))

    with pytest.raises(DataError, match=r"labels\.json: sha256 is"):
        load_class_names(storage, manifest)


PARQUET_HASH = (
    "import pyarrow as pa; from vitscale.data.manifest import *;"
    "rows = [{'key': str(i), 'offset': i} for i in range(5000)];"
    "t = pa.Table.from_pylist(rows, index_schema([]));"
    "print(sha256_hex(parquet_bytes(t)))"
)


def test_parquet_bytes_are_the_same_in_another_process():
    table = pa.Table.from_pylist(
        [{"key": str(i), "offset": i} for i in range(5000)], index_schema([])
    )

    done = subprocess.run(
        [sys.executable, "-c", PARQUET_HASH], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == sha256_hex(parquet_bytes(table))
