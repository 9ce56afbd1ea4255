"""Starts the real commands the way a launcher does, and reads what they leave behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from vitscale.observe.metrics import read_metrics

CHECKOUT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240


def environment(**extra: str) -> dict[str, str]:
    """Environment of a child: one thread, the CPU, this interpreter's commands first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PATH": path, **extra}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Started:
    """Ranks of one command."""

    processes: list[subprocess.Popen]
    outputs: list[Path]

    def wait(self) -> list[int]:
        """Wait for all ranks; returns their exit codes."""
        deadline = time.monotonic() + DEADLINE_S
        try:
            return [p.wait(timeout=max(1, deadline - time.monotonic())) for p in self.processes]
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            raise AssertionError(f"no end after {DEADLINE_S} s:\n{self.text()}") from None

    def signal(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def text(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in self.outputs)

    def wait_for_step(self, run_dir: Path, step: int) -> None:
        """Wait until the run has written the row of a step."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if any(row["step"] >= step for row in read_metrics(run_dir / "metrics.jsonl")):
                return
            if all(process.poll() is not None for process in self.processes):
                raise AssertionError(f"ended before step {step}:\n{self.text()}")
            time.sleep(0.02)
        raise AssertionError(f"step {step} did not come:\n{self.text()}")


@dataclass
class Commands:
    """Runs vitscale's commands in a working folder of their own."""

    folder: Path
    started: list[Started] = field(default_factory=list)

    def start(self, script: str, *words: str, ranks: int = 1, **extra: str) -> Started:
        """Start the ranks of a launcher script as torchrun would, each in a session of its own."""
        port, processes, outputs = str(free_port()), [], []
        for rank in range(ranks):
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": ranks,
                "LOCAL_WORLD_SIZE": ranks,
            }
            env = environment(**{k: str(v) for k, v in place.items()}, MASTER_PORT=port, **extra)
            env["MASTER_ADDR"] = "127.0.0.1"
            output = self.folder / f"output-{len(self.started)}-{rank}.txt"
            with output.open("wb") as stream:
                command = [sys.executable, str(CHECKOUT / "launchers" / f"{script}.py"), *words]
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=self.folder,
                        env=env,
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
            outputs.append(output)
        self.started.append(Started(processes, outputs))
        return self.started[-1]

    def run(self, script: str, *words: str, ranks: int = 1, code: int = 0, **extra: str) -> str:
        """Run to the end, check the exit code of every rank, return what they printed."""
        started = self.start(script, *words, ranks=ranks, **extra)
        codes = started.wait()
        assert codes == [code] * ranks, f"exit codes {codes}, wanted {code}:\n{started.text()}"
        return started.text()

    def vitscale(self, *words: str, code: int = 0) -> str:
        """Run a verb of the console command."""
        done = subprocess.run(
            [sys.executable, "-m", "vitscale.cli", *words],
            cwd=self.folder,
            env=environment(PYTHONPATH=str(CHECKOUT)),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def close(self) -> None:
        for started in self.started:
            started.signal(signal.SIGKILL)
            for process in started.processes:
                process.wait()


@pytest.fixture
def commands(tmp_path: Path):
    """Commands in a fresh folder; whatever they leave running is killed."""
    commands = Commands(tmp_path)
    yield commands
    commands.close()


def pack_digits(folder: Path) -> Path:
    """Pack the handwritten digits, train and test, with the real packer."""
    packer = Commands(folder)
    for split in ("train", "test"):
        source, out = f"digits:{split}", str(folder / split)
        packer.vitscale("pack", "--source", source, "--out", out, "--shard-bytes", "16KB")
    return folder


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed handwritten digits; made once."""
    return pack_digits(tmp_path_factory.mktemp("digits"))


TINY = """\
[model]
variant = "Ti/4"
img_size = 16
in_chans = 1
embed_dim = 32
depth = 2
num_heads = 2
mlp_dim = 64
[data]
train = "{digits}/train"
val = "{digits}/test"
num_workers = 0
[augment]
hflip = 0.0
eval_crop = "resize"
[optim]
lr = 2e-3
weight_decay = 0.05
grad_clip_norm = 1.0
warmup = "5steps"
ema_decay = 0.9
[batch]
global_batch = 24
[run]
duration = "20steps"
log_every = 5
"""


@pytest.fixture
def tiny_recipe(tmp_path: Path, digits: Path) -> str:
    """Path of a recipe that trains in seconds."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.format(digits=digits))
    return str(path)


def step_rows(run_dir: Path) -> list[dict]:
    """Training rows of a run, one a step."""
    return [row for row in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in row]


def exact(rows: list[dict]) -> list[tuple]:
    """What must not depend on interruptions."""
    names = ("step", "seen_examples", "train/loss", "train/lr", "train/grad_norm", "data/digest")
    return [tuple(row[name] for name in names) for row in rows]


def json_of(path: Path) -> dict:
    return json.loads(path.read_text())
