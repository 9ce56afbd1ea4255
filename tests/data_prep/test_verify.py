import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.pack import main as pack
from data_prep.verify import main as verify
from tests.helpers.corpus import crop, encoded, make_folder
from vitscale.data import open_dataset

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def dataset(tmp_path):
    source = make_folder(tmp_path / "in", {"a": 6, "b": 6})
    args = ["--source", f"imagefolder:{source}", "--out", str(tmp_path / "out")]
    assert pack([*args, "--shard-bytes", "8KB", "--workers", "1"]) == 0
    return open_dataset(tmp_path / "out")


def root_of(dataset) -> Path:
    return dataset.storage.root


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def run(dataset, level, *args):
    return verify([str(root_of(dataset)), "--level", level, "--workers", "1", *args])


@pytest.mark.parametrize("level", ["head", "hash", "decode"])
def test_verify_sound_dataset(dataset, level, capsys, tmp_path):
    assert run(dataset, level, "--out", str(tmp_path / "r.json")) == 0

    report = json.loads((tmp_path / "r.json").read_text())
    assert report["sound"] is True
    assert report["damage"] == []
    assert report["num_samples"] == 12
    assert report["seconds"] >= 0
    assert level == "head" or report["bytes_per_s"] > 0
    assert capsys.readouterr().out.startswith("sound ")


def test_verify_flipped_image_byte_is_found_by_hash(dataset, capsys, tmp_path):
    sample = dataset[7]
    flip(root_of(dataset) / sample.shard, sample.offset + 40)

    assert run(dataset, "head") == 0
    assert run(dataset, "hash", "--out", str(tmp_path / "r.json")) == 3

    (damage,) = json.loads((tmp_path / "r.json").read_text())["damage"]
    assert (damage["shard"], damage["key"], damage["offset"]) == (
        sample.shard,
        sample.key,
        sample.offset,
    )
    assert "xxh3 is" in damage["reason"]
    assert (
        f"damaged shard={sample.shard} key={sample.key} offset={sample.offset}"
        in capsys.readouterr().out
    )


def test_verify_flipped_header_byte_is_found_by_hash(dataset, capsys):
    flip(root_of(dataset) / dataset[0].shard, 3)

    assert run(dataset, "hash") == 3

    assert "all images are whole, a header or a label is not" in capsys.readouterr().out


def test_verify_truncation_is_found_by_head_and_names_keys_by_hash(dataset, capsys):
    sample = dataset[0]
    path = root_of(dataset) / sample.shard
    path.write_bytes(path.read_bytes()[: sample.offset + 10])

    assert run(dataset, "head") == 3
    assert f"shard={sample.shard} reason=has {sample.offset + 10} bytes" in capsys.readouterr().out
    assert run(dataset, "hash") == 3
    assert (
        f"key={sample.key} offset={sample.offset} reason=10 bytes are there"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("manifest.json", "manifest.json"),
        ("shards.parquet", "shard shards.parquet: sha256 is"),
        ("labels.json", "shard labels.json: sha256 is"),
        ("ledger/shard-000001.parquet", "shard=ledger/shard-000001.parquet reason=sha256 is"),
    ],
)
def test_verify_damaged_tables_are_found_by_head(dataset, capsys, name, said):
    flip(root_of(dataset) / name, 0)

    assert run(dataset, "head") == 3

    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        "labels.json",
        "ledger/shard-000000.parquet",
        "shard-000001.tar",
        "shard-000001.index.parquet",
    ],
)
@pytest.mark.parametrize("level", ["head", "hash"])
def test_verify_missing_object_is_named_once(dataset, capsys, name, level):
    (root_of(dataset) / name).unlink()

    assert run(dataset, level) == 3

    out = capsys.readouterr().out
    assert out.count(f"damaged shard={name} ") == 1
    assert "is missing" in out


def test_verify_damaged_index_is_found_by_hash(dataset, capsys):
    flip(root_of(dataset) / "shard-000001.index.parquet", 50)

    assert run(dataset, "head") == 0
    assert run(dataset, "hash") == 3
    assert "damaged shard=shard-000001.index.parquet" in capsys.readouterr().out


@pytest.mark.parametrize("shard_format", ["tar", "arrow"])
def test_verify_finds_any_flipped_byte(tmp_path, shard_format):
    source = make_folder(tmp_path / "in", {"a": 5, "b": 3})
    (source / "b" / "bad").write_bytes(b"no image")
    out = tmp_path / "out"
    words = ["--source", f"imagefolder:{source}", "--out", str(out), "--shard-bytes", "10KB"]
    assert pack([*words, "--format", shard_format, "--workers", "1"]) == 0
    missed = []
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        size = path.stat().st_size
        for offset in {0, size // 3, size // 2, size - 2, size - 1}:
            flip(path, offset)
            if verify([str(out), "--workers", "1"]) not in (2, 3):
                missed.append((path.name, offset))
            flip(path, offset)

    assert not missed
    assert verify([str(out), "--workers", "1"]) == 0


def test_verify_finds_every_changed_value_of_the_manifest(dataset, capsys):
    path = root_of(dataset) / "manifest.json"
    whole = path.read_text()
    values = json.loads(whole)
    for name, value in values.items():
        other = value + 1 if isinstance(value, int) else f"{value}x"
        path.write_text(json.dumps({**values, name: other}, sort_keys=True, indent=2) + "\n")
        assert run(dataset, "hash") in (2, 3), name
    path.write_text(whole)

    assert run(dataset, "hash") == 0


@pytest.mark.parametrize(
    "name", ["shard-000099.tar", "shard-000007.index.parquet", "ledger/shard-000099.parquet"]
)
def test_verify_names_what_does_not_belong(dataset, capsys, name):
    (root_of(dataset) / name).write_bytes(b"of an older run")

    assert run(dataset, "head") == 3

    assert f"damaged shard={name} reason=is not in the manifest" in capsys.readouterr().out


def test_verify_swapped_objects_are_named(dataset, capsys):
    first, second = (root_of(dataset) / f"shard-00000{n}.tar" for n in (0, 1))
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    second.write_bytes(data[0])

    assert run(dataset, "hash") == 3

    out = capsys.readouterr().out
    assert "shard=shard-000000.tar" in out
    assert "shard=shard-000001.tar" in out


def test_verify_takes_a_copy_without_what_is_for_the_packer(dataset):
    shutil.rmtree(root_of(dataset) / "_commit")

    assert run(dataset, "hash") == 0


def test_verify_undecodable_image_is_found_by_decode(tmp_path, capsys):
    source = make_folder(tmp_path / "in", {"a": 3})
    victim = source / "a" / "img_00001.jpg"
    victim.write_bytes(encoded(crop(9, 160))[:-300])
    out = str(tmp_path / "out")
    assert (
        pack(
            ["--source", f"imagefolder:{source}", "--out", out, "--check", "none", "--workers", "1"]
        )
        == 0
    )

    assert verify([out, "--level", "hash", "--workers", "1"]) == 0
    assert verify([out, "--level", "decode", "--workers", "1"]) == 3

    (key,) = [sample.key for sample in open_dataset(out) if sample.image == victim.read_bytes()]
    assert f"key={key}" in capsys.readouterr().out


def test_verify_processes_find_the_same(dataset):
    sample = dataset[5]
    flip(root_of(dataset) / sample.shard, sample.offset + 5)

    done = subprocess.run(
        [sys.executable, "-m", "data_prep.verify", str(root_of(dataset)), "--workers", "2"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip

    assert done.returncode == 3, done.stderr
    assert f"key={sample.key}" in done.stdout


def test_verify_missing_dataset_is_a_user_error(tmp_path, capsys):
    assert verify([str(tmp_path), "--workers", "1"]) == 2

    assert "no dataset at" in capsys.readouterr().err


@pytest.mark.mpi
def test_verify_under_mpi_finds_the_same(dataset, tmp_path):
    sample = dataset[5]
    flip(root_of(dataset) / sample.shard, sample.offset + 5)
    mpiexec = Path(sys.executable).with_name("mpiexec")

    done = subprocess.run(
        [mpiexec, "-n", "3", sys.executable, "-m", "data_prep.verify", root_of(dataset),
         "--out", tmp_path / "r.json"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip

    assert done.returncode == 3, done.stderr
    (damage,) = json.loads((tmp_path / "r.json").read_text())["damage"]
    assert damage["key"] == sample.key
    assert done.stdout.count("DAMAGED (1)") == 1


@pytest.mark.mpi
def test_verify_under_mpi_says_what_is_wrong_once(tmp_path):
    mpiexec = Path(sys.executable).with_name("mpiexec")

    done = subprocess.run(
        [mpiexec, "-n", "3", sys.executable, "-m", "data_prep.verify", tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip

    assert done.returncode == 2
    assert done.stderr.count("no dataset at") == 1
