import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.comm import LocalCrew, launcher_rank
from vitscale.config.errors import DataError, VitscaleError

ROOT = Path(__file__).resolve().parents[2]


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def fail_at_five(number: int) -> int:
    if number == 5:
        raise DataError("five is bad")
    return number


def die_at_five(number: int) -> int:
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_local_crew_of_one_works_in_this_process():
    results = list(LocalCrew(1).map(square, range(10)))

    assert results == [(number * number, os.getpid()) for number in range(10)]


def test_local_crew_of_two_does_every_task_once_elsewhere():
    results = list(LocalCrew(2).map(square, range(50)))

    assert sorted(value for value, _ in results) == [number * number for number in range(50)]
    assert os.getpid() not in {pid for _, pid in results}


@pytest.mark.parametrize("size", [1, 2])
def test_local_crew_passes_errors_on(size):
    with pytest.raises(DataError, match="five is bad"):
        list(LocalCrew(size).map(fail_at_five, range(50)))


def test_local_crew_names_a_killed_worker():
    with pytest.raises(VitscaleError, match="a worker process died without a message"):
        list(LocalCrew(2).map(die_at_five, range(50)))


def test_launcher_rank_is_read_from_the_environment(monkeypatch):
    for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert launcher_rank() is None

    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    assert launcher_rank() == 3


@pytest.mark.mpi
def test_run_refuses_a_launcher_of_another_mpi(tmp_path):
    # What an Open MPI launcher sets; the library in use is another one and sees itself alone.
    env = {**os.environ, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"}
    command = [
        sys.executable,
        "-m",
        "data_prep.pack",
        "--source",
        "digits:test",
        "--out",
        str(tmp_path / "o"),
    ]

    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)

    assert done.returncode == 2
    assert "announces 3 ranks, the MPI library of mpi4py sees 1" in done.stderr
    assert not (tmp_path / "o").exists()
