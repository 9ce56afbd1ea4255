import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data_prep.pack import main as pack
from data_prep.verify import main as verify
from tests.helpers.corpus import crop, encoded, make_folder, object_hashes
from tests.helpers.small_dataset import flip_byte
from vitscale.data.storage import open_storage

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["tar", "arrow"])
def packed(request, tmp_path) -> tuple[Path, Path]:
    source = make_folder(tmp_path / "in", {"a": 20, "b": 10})
    (source / "a" / "bad").write_bytes(b"no image")
    out = tmp_path / "out"
    words = ["--source", f"imagefolder:{source}", "--out", str(out), "--shard-bytes", "20KB"]
    assert pack([*words, "--workers", "1", "--format", request.param]) == 0
    return source, out


def repair(source: Path, out: Path, *more: str) -> int:
    return verify([str(out), "--repair", "--source", f"imagefolder:{source}", "--workers", "1",
                   *more])  # fmt: skip


def spoil(out: Path) -> None:
    """Damage an object of every kind that is made of the inputs."""
    shards = sorted(out.glob("shard-*.index.parquet"))
    first, second, third = (str(path).removesuffix(".index.parquet") for path in shards[:3])
    (shard,) = (p for p in out.iterdir() if str(p).startswith(f"{first}.") and p not in shards)
    flip_byte(shard, shard.stat().st_size // 2)
    Path(f"{second}.index.parquet").unlink()
    (out / "ledger" / f"{Path(third).name}.parquet").write_bytes(b"")
    (out / "labels.json").write_bytes(b"{}")
    (out / "shards.parquet").write_bytes(b"cut")


def test_repair_brings_back_the_same_bytes(packed, capsys):
    source, out = packed
    wanted = object_hashes(out)
    spoil(out)
    assert verify([str(out), "--workers", "1"]) == 3

    assert repair(source, out) == 0

    assert object_hashes(out) == wanted
    said = capsys.readouterr().out
    assert "repaired shards.parquet" in said
    assert "repaired 3 shards" in said


def test_repair_touches_nothing_that_is_sound(packed):
    source, out = packed
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}

    assert repair(source, out) == 0

    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_repair_refuses_other_sources(packed, capsys):
    source, out = packed
    flip_byte(next(out.glob("shard-000000.[ta]*")), 3000)
    (source / "b" / "new.jpg").write_bytes(encoded(crop(5)))

    assert repair(source, out) == 2

    assert "classes.b.num_inputs: 10 -> 11" in capsys.readouterr().err


def test_repair_without_sources_says_what_is_needed(packed, capsys):
    assert verify([str(packed[1]), "--repair"]) == 2

    assert "--repair needs the sources" in capsys.readouterr().err


@pytest.mark.mpi
def test_repair_works_under_mpi(packed):
    source, out = packed
    wanted = object_hashes(out)
    spoil(out)
    mpiexec = Path(sys.executable).with_name("mpiexec")

    done = subprocess.run(
        [mpiexec, "-n", "3", sys.executable, "-m", "data_prep.verify", out, "--repair",
         "--source", f"imagefolder:{source}"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert object_hashes(out) == wanted


def test_verify_counts_ledger_rows(packed, capsys):
    _, out = packed
    storage = open_storage(out)
    text = storage.read_bytes("manifest.json").decode()
    storage.put("manifest.json", text.replace('"num_failed": 1', '"num_failed": 2').encode())

    assert verify([str(out), "--workers", "1"]) == 3

    assert "num_failed is 2, the tables have 1" in capsys.readouterr().out


def test_repair_brings_back_commit_records(packed):
    source, out = packed
    wanted = object_hashes(out)
    (out / "_commit" / "shard-000001.json").unlink()
    flip_byte(out / "_commit" / "shard-000002.json", 30)
    assert verify([str(out), "--level", "head"]) == 3

    assert repair(source, out) == 0

    assert object_hashes(out) == wanted


def test_repair_publishes_nothing_that_comes_out_otherwise(packed, capsys):
    source, out = packed
    (out / "shard-000000.index.parquet").unlink()
    spoilt = object_hashes(out)
    # The same name and size, so that the plan is the same.
    ledger = pq.read_table(out / "ledger" / "shard-000000.parquet").to_pylist()
    name = next(row["source"] for row in ledger if row["status"] == "packed").partition(":")[2]
    path = source / name
    flip_byte(path, path.stat().st_size // 2)

    assert repair(source, out) == 3

    assert "came out with sha256" in capsys.readouterr().err
    assert object_hashes(out) == spoilt


def test_repair_leaves_alone_what_is_not_in_the_manifest(packed, capsys):
    source, out = packed
    extra = out / "shard-000099.index.parquet"
    extra.write_bytes(b"of an older run")

    assert repair(source, out) == 3

    assert f"shard={extra.name} reason=is not in the manifest; remove it" in capsys.readouterr().out
    assert extra.exists()
