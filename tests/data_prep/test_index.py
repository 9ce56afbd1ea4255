import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data_prep.foreign_shards import Reading
from data_prep.index import main
from data_prep.survey import Doubles, SurveyWork
from data_prep.verify import main as verify
from tests.helpers.corpus import crop, encoded
from tests.helpers.small_dataset import flip_byte
from vitscale.config.errors import DataError
from vitscale.data import open_dataset

ROOT = Path(__file__).resolve().parents[2]
NUM_SHARDS, NUM_SAMPLES = 3, 5


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def sample(number: int, label: object) -> dict[str, bytes]:
    key = f"part/{number:04d}"
    image = encoded(crop(number), "PNG" if number % 3 == 2 else "JPEG")
    return {
        f"{key}.{'png' if number % 3 == 2 else 'jpg'}": image,
        f"{key}.json": json.dumps({"label": label, "tags": ["x", "y"][: number % 3]}).encode(),
    }


@pytest.fixture
def shards(tmp_path) -> Path:
    """Three tars of five samples, with names of classes."""
    for shard in range(NUM_SHARDS):
        members: dict[str, bytes] = {}
        for number in range(shard * NUM_SAMPLES, (shard + 1) * NUM_SAMPLES):
            members |= sample(number, ["bee", "ant", "cow"][number % 3])
        write_tar(tmp_path / "wds" / f"train-{shard:04d}.tar", members)
    return tmp_path / "wds"


def tar_hashes(root: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in root.glob("*.tar")}


def test_index_makes_a_dataset_of_foreign_tars(shards, capsys):
    before = tar_hashes(shards)

    assert main([str(shards), "--workers", "1"]) == 0

    assert tar_hashes(shards) == before
    dataset = open_dataset(shards)
    assert dataset.class_names == ["ant", "bee", "cow"]
    samples = list(dataset)
    assert [s.key for s in samples] == [f"part/{n:04d}" for n in range(15)]
    assert [s.label for s in samples] == [[1, 0, 2][n % 3] for n in range(15)]
    assert all(s.image == encoded(crop(n), "PNG" if n % 3 == 2 else "JPEG")
               for n, s in enumerate(samples))  # fmt: skip
    assert verify([str(shards), "--level", "decode", "--workers", "1"]) == 0
    assert "num_samples=15 num_failed=0" in capsys.readouterr().out


def test_index_takes_several_columns(shards):
    words = ["--label-column", "label", "--label-column", "tags", "--workers", "1"]

    assert main([str(shards), *words]) == 0

    dataset = open_dataset(shards)
    assert [column.multi for column in dataset.label_columns] == [False, True]
    assert [s.labels["tags"] for s in dataset][:4] == [[], [0], [0, 1], []]


def test_index_puts_what_cannot_be_used_into_the_ledger(shards, capsys):
    bad = {"b/1.jpg": b"<html>", "b/1.cls": b"3", "b/2.cls": b"4", "b/3.jpg": encoded(crop(1))}
    write_tar(shards / "train-0009.tar", {**sample(90, "ant"), **bad})

    assert main([str(shards), "--workers", "1"]) == 0

    rows = [r for p in (shards / "ledger").iterdir() for r in pq.read_table(p).to_pylist()]
    failed = {r["key"]: r["reason"].partition(":")[0] for r in rows if r["status"] == "failed"}
    assert failed == {
        "b/1": "not_an_image",
        "b/2": "incomplete_sample",
        "b/3": "incomplete_sample",
    }
    assert len(open_dataset(shards)) == 16
    said = capsys.readouterr().out
    assert "incomplete_sample=2 not_an_image=1; such as:\n  webdataset:train-0009.tar/b/1" in said
    assert main([str(shards)]) == 2
    assert "is a dataset already" in capsys.readouterr().err


def test_index_takes_an_empty_tar_among_others(shards, capsys):
    write_tar(shards / "train-0009.tar", {})

    assert main([str(shards), "--workers", "1"]) == 0

    assert len(open_dataset(shards)) == 15
    assert verify([str(shards), "--workers", "1"]) == 0


def test_index_finds_later_damage_by_key(shards, capsys):
    assert main([str(shards), "--workers", "1"]) == 0
    offset = list(open_dataset(shards))[7].offset
    flip_byte(shards / "train-0001.tar", offset + 40)

    assert verify([str(shards), "--workers", "1"]) == 3

    assert "shard=train-0001.tar key=part/0007" in capsys.readouterr().out


@pytest.mark.parametrize("cut", [700, 5000])
def test_index_refuses_a_damaged_tar(shards, capsys, cut):
    path = shards / "train-0001.tar"
    path.write_bytes(path.read_bytes()[:cut])

    assert main([str(shards), "--workers", "1"]) == 3

    assert "train-0001.tar" in capsys.readouterr().err
    assert not (shards / "manifest.json").exists()


def test_index_names_keys_that_come_twice(shards, capsys):
    write_tar(shards / "train-0005.tar", sample(3, "ant"))

    assert main([str(shards), "--workers", "1"]) == 3

    said = capsys.readouterr().err
    assert "1 keys come twice, for example part/0003 in train-0000.tar and train-0005.tar" in said


def test_index_limits_failures(shards, capsys):
    write_tar(shards / "train-0009.tar", {"b/1.jpg": b"<html>", "b/1.cls": b"3"})

    assert main([str(shards), "--max-bad", "0", "--workers", "1"]) == 3
    assert "--max-bad allows 0" in capsys.readouterr().err
    assert main([str(shards), "--workers", "1"]) == 0


def test_index_without_tars_says_so(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2

    assert "has no .tar or .parquet files" in capsys.readouterr().err


def test_doubles_are_found_in_files_as_in_memory(shards, capsys):
    write_tar(shards / "train-0005.tar", {**sample(3, "ant"), **sample(14, "ant")})
    names = sorted(path.name for path in shards.glob("*.tar"))
    reading = Reading(str(shards), "tar", ())
    doubles = Doubles(held_rows=4)
    for number, name in enumerate(names):
        doubles.add(SurveyWork(reading)((number, name)))

    with pytest.raises(DataError, match="2 keys come twice") as caught:
        doubles.refuse(reading, names)

    assert "part/0014 in train-0002.tar and train-0005.tar" in str(caught.value)


def test_index_names_all_damaged_shards_and_leaves_them_out_when_asked(shards, capsys):
    for name in ("train-0000.tar", "train-0002.tar"):
        path = shards / name
        path.write_bytes(path.read_bytes()[:700])

    assert main([str(shards), "--workers", "1"]) == 3
    said = capsys.readouterr().err
    assert "2 of 3 shards" in said
    assert "train-0000.tar" in said
    assert "train-0002.tar" in said
    assert main([str(shards), "--workers", "1", "--skip-damaged"]) == 0

    assert {s.shard for s in open_dataset(shards)} == {"train-0001.tar"}
    rows = [r for p in (shards / "ledger").iterdir() for r in pq.read_table(p).to_pylist()]
    failed = {r["source"]: r["reason"] for r in rows if r["status"] == "failed"}
    assert set(failed) == {"webdataset:train-0000.tar", "webdataset:train-0002.tar"}
    assert all(reason.startswith("corrupt: ") for reason in failed.values())
    assert verify([str(shards), "--workers", "1"]) == 0


def test_index_goes_on_where_it_was_stopped(shards):
    write_tar(shards / "train-0009.tar", {"b/1.jpg": b"<html>", "b/1.cls": b"3"})
    assert main([str(shards), "--max-bad", "0", "--workers", "1"]) == 3
    records = sorted((shards / "_commit").glob("shard-*.json"))
    before = [path.stat().st_mtime_ns for path in records]

    assert main([str(shards), "--workers", "1"]) == 0

    assert len(records) == 4
    assert [path.stat().st_mtime_ns for path in records] == before


def test_repair_of_an_indexed_dataset_says_what_to_do(shards, capsys):
    assert main([str(shards), "--workers", "1"]) == 0
    flip_byte(shards / "train-0000.index.parquet", 50)

    assert verify([str(shards), "--repair", "--source", f"webdataset:{shards}"]) == 2

    assert "was made by `vitscale index`" in capsys.readouterr().err


def test_index_refuses_compressed_tars_by_name(shards, capsys):
    (shards / "train-0007.tar.gz").write_bytes(b"")

    assert main([str(shards)]) == 2

    assert "such as train-0007.tar.gz: unpack them" in capsys.readouterr().err


def test_index_check_full_finds_what_does_not_decode(shards):
    image = bytearray(encoded(crop(1, 64)))
    start = image.index(b"\xff\xda") + 14
    image[start : start + 40] = b"\xff\xd9" * 20
    write_tar(shards / "train-0009.tar", {"b/1.jpg": bytes(image), "b/1.json": b'{"label": "ant"}'})

    assert main([str(shards), "--workers", "1", "--check", "full"]) == 0

    (row,) = pq.read_table(shards / "ledger" / "train-0009.parquet").to_pylist()
    assert (row["status"], row["key"]) == ("failed", "b/1")


@pytest.mark.mpi
@pytest.mark.s3
def test_index_works_under_mpi_on_a_bucket(shards, s3_uri):
    from vitscale.data.storage import open_storage

    storage = open_storage(s3_uri)
    for path in shards.iterdir():
        storage.put(path.name, path.read_bytes())
    assert main([str(shards), "--workers", "1"]) == 0
    mpiexec = Path(sys.executable).with_name("mpiexec")

    done = subprocess.run(
        [mpiexec, "-n", "3", sys.executable, "-m", "data_prep.index", s3_uri],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    local = open_storage(shards)
    assert [(n, storage.read_bytes(n)) for n in storage.list()] == [
        (n, local.read_bytes(n)) for n in local.list()
    ]
