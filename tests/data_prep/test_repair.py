import subprocess
import sys
from pathlib import Path

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

    assert "the ledger has 31 rows, 32 inputs" in capsys.readouterr().out
