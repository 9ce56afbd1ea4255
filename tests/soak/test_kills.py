"""Hundreds of kill -9 at random moments: `make soak`. The suite has a short version of each."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.corpus import make_folder, object_hashes
from tests.helpers.pack_kills import (
    make_large_images,
    object_hashes_at,
    pack_command,
    pack_with_kills,
)
from tests.helpers.runs import CHECKOUT, Commands, environment, exact, step_rows
from tests.helpers.s3 import open_uploads
from vitscale.models.weights import read_safetensors

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3 * 3600)]

PACK_KILLS = 200
S3_KILLS = 100
TRAIN_KILLS = 60


@pytest.mark.parametrize("launcher", [[], ["mpiexec", "-n", "3"]], ids=["processes", "mpi"])
def test_pack_survives_kills(tmp_path: Path, launcher: list[str]):
    source = make_folder(tmp_path / "in", {"a": 400, "b": 300, "c": 300})
    rng = random.Random(len(launcher))

    def command(out: Path) -> list[str]:
        words = ["--source", f"imagefolder:{source}", "--shard-bytes", "20KB", "--out", str(out)]
        return [*launcher, sys.executable, "-m", "data_prep.pack", *words]

    def start(out: Path) -> subprocess.Popen:
        quiet = subprocess.DEVNULL
        return subprocess.Popen(
            command(out), cwd=CHECKOUT, env=environment(), stdout=quiet, stderr=quiet,
            start_new_session=True,
        )  # fmt: skip

    began = time.monotonic()
    assert start(tmp_path / "straight").wait() == 0
    whole_s = time.monotonic() - began
    wanted = object_hashes(tmp_path / "straight")

    kills = round = 0
    while kills < PACK_KILLS:
        round += 1
        out = tmp_path / f"out-{round}"
        while True:
            process = start(out)
            try:
                code = process.wait(timeout=rng.uniform(0.3, 1.1) * whole_s)
                assert code == 0
                break
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                kills += 1
        assert object_hashes(out) == wanted, f"round {round}, {kills} kills"


@pytest.mark.parametrize("ranks", [0, 3], ids=["processes", "mpi"])
def test_pack_to_s3_survives_kills(tmp_path: Path, s3_server, s3_uri: str, ranks: int):
    source = make_large_images(tmp_path / "in", 24, 3_500_000)
    rng = random.Random(ranks)
    began = time.monotonic()
    words = ["--shard-bytes", "20MB"]
    subprocess.run(pack_command(source, f"{s3_uri}/whole", ranks, *words), cwd=CHECKOUT, check=True)
    whole_s = time.monotonic() - began
    wanted = object_hashes_at(f"{s3_uri}/whole")

    kills = round = uploads = 0

    def count_uploads() -> None:
        nonlocal uploads
        uploads += len(open_uploads(s3_server))

    while kills < S3_KILLS:
        round += 1
        out = f"{s3_uri}/{round}"
        command = pack_command(source, out, ranks, *words)
        kills += pack_with_kills(command, rng, whole_s, S3_KILLS - kills, count_uploads)
        assert object_hashes_at(out) == wanted, f"round {round}, {kills} kills"
        assert open_uploads(s3_server) == []
    assert uploads > 0, "no kill hit an upload: the test shows less than it should"


def test_training_survives_kills(commands: Commands, tiny_recipe: str):
    sets = ["run.duration=400steps", "run.save_every=7steps", "data.num_workers=1"]
    words = ["--recipe", tiny_recipe, *(w for s in sets for w in ("--set", s))]
    began = time.monotonic()
    commands.run("pretrain", *words, "--run-dir", "straight", ranks=2)
    whole_s = time.monotonic() - began
    rows = exact(step_rows(commands.folder / "straight"))
    rng = random.Random(0)

    kills = round = 0
    while kills < TRAIN_KILLS:
        round += 1
        run_dir = f"killed-{round}"
        while True:
            started = commands.start("pretrain", *words, "--run-dir", run_dir, ranks=2)
            deadline = time.monotonic() + rng.uniform(0.3, 1.1) * whole_s
            while time.monotonic() < deadline and started.processes[0].poll() is None:
                time.sleep(0.01)
            if started.processes[0].poll() is not None:
                assert started.wait() == [0, 0], started.text()
                break
            started.signal(signal.SIGKILL)
            started.wait()
            kills += 1
        assert exact(step_rows(commands.folder / run_dir)) == rows, f"round {round}, {kills} kills"
        for name in ("weights", "ema"):
            one, other = (
                read_safetensors(next((commands.folder / d).glob(f"checkpoints/*400/{name}.*")))[0]
                for d in ("straight", run_dir)
            )
            assert all((one[key] == other[key]).all() for key in one), f"round {round}: {name}"
