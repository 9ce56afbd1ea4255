import time
from pathlib import Path

import pytest

from data_prep.pack import main
from tests.helpers.corpus import make_folder, object_hashes

SCRIPT = Path(__file__).resolve().parents[2] / "launchers" / "slurm" / "pack.sbatch"
pytestmark = [pytest.mark.slow, pytest.mark.mpi]


def test_pack_batch_job_survives_a_requeue(tmp_path, slurm):
    source = make_folder(tmp_path / "in", {"a": 600, "b": 400})
    words = ["--source", f"imagefolder:{source}", "--shard-bytes", "8KB"]
    assert main([*words, "--out", str(tmp_path / "alone"), "--workers", "1"]) == 0
    out = tmp_path / "out"
    log = tmp_path / "job.log"

    flags = ["--parsable", "--ntasks=3", "--mem-per-cpu=500M", f"--output={log}"]
    job = slurm.run("sbatch", *flags, SCRIPT, *words, "--out", out).stdout.strip()
    _wait(lambda: len(list(out.glob("_commit/shard-*.json"))) >= 3, log)
    assert slurm.run("scontrol", "requeue", job).returncode == 0

    _wait(lambda: (out / "manifest.json").exists(), log)
    assert "resuming: " in log.read_text()
    assert object_hashes(out) == object_hashes(tmp_path / "alone")


def _wait(condition, log: Path, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        text = log.read_text() if log.exists() else "no output"
        assert time.monotonic() < deadline, text
        time.sleep(0.05)
