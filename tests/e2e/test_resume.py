"""P3: a run that was interrupted anywhere ends exactly as one that was not."""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.runs import (
    CHECKOUT,
    DEADLINE_S,
    Commands,
    environment,
    exact,
    free_port,
    step_rows,
)
from vitscale.models.weights import read_safetensors

pytestmark = [pytest.mark.dist, pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def words(commands: Commands, tiny_recipe: str):
    """Command line of a run of 60 steps, by the name of its folder."""

    def words(name: str, *more: str) -> list[str]:
        run_dir = str(commands.folder / name)
        base = ["--recipe", tiny_recipe, "--ds-config", str(CHECKOUT / "configs" / "zero2.json")]
        sets = ["run.duration=60steps", "run.save_every=10steps", "model.drop_rate=0.1", *more]
        return [*base, "--run-dir", run_dir, *(w for s in sets for w in ("--set", s))]

    return words


def assert_same_end(commands: Commands, straight: str, other: str) -> None:
    rows, others = (step_rows(commands.folder / name) for name in (straight, other))
    assert exact(rows) == exact(others)
    assert [row["step"] for row in rows] == list(range(1, 61))
    for flags in ((), ("--ema",)):
        hashes = []
        for name in (straight, other):
            out = commands.folder / f"{name}{''.join(flags)}.safetensors"
            run = str(commands.folder / name)
            commands.vitscale("export", "--checkpoint", run, "--out", str(out), *flags)
            hashes.append(hashlib.sha256(out.read_bytes()).hexdigest())
        assert hashes[0] == hashes[1], f"export {flags}"


def test_kill_9_and_stop_signals_change_nothing(commands: Commands, words):
    commands.run("pretrain", *words("straight"), ranks=2)

    killed = commands.start("pretrain", *words("killed"), ranks=2)
    killed.wait_for_step(commands.folder / "killed", 25)
    killed.signal(signal.SIGKILL)
    assert set(killed.wait()) == {-signal.SIGKILL}
    text = commands.run("pretrain", *words("killed"), ranks=2)
    assert "resume checkpoint=" in text
    assert_same_end(commands, "straight", "killed")

    stopped = commands.start("pretrain", *words("stopped"), ranks=2)
    stopped.wait_for_step(commands.folder / "stopped", 25)
    stopped.processes[1].send_signal(signal.SIGUSR2)  # one rank is told, all agree
    assert stopped.wait() == [75, 75]
    assert "stopped: SIGUSR2: saved at step" in stopped.text()
    commands.run("pretrain", *words("stopped"), ranks=2)
    assert_same_end(commands, "straight", "stopped")

    # A second command finds the run complete, before torch is even loaded.
    assert "already complete" in commands.run("pretrain", *words("straight"), ranks=2)


def test_stopping_twice_and_at_the_last_step_changes_nothing(commands: Commands, words):
    commands.run("pretrain", *words("straight"))

    for stop in ("1steps", "31steps", "59steps"):
        commands.run("pretrain", *words("often", f"run.stop_at={stop}"), code=75)
    commands.run("pretrain", *words("often"))
    assert_same_end(commands, "straight", "often")

    # Killed between the last checkpoint and the final evaluation: only that is done again.
    run_dir = commands.folder / "often"
    (run_dir / "done.json").unlink()
    metrics = run_dir / "metrics.jsonl"
    kept = [line for line in metrics.read_text().splitlines() if "val/" not in line]
    metrics.write_text("\n".join(kept) + "\n")
    commands.run("pretrain", *words("often"))
    assert_same_end(commands, "straight", "often")
    assert sum("val/top1" in line for line in metrics.read_text().splitlines()) == 1


def test_a_damaged_checkpoint_falls_back_and_says_so(commands: Commands, words):
    commands.run("pretrain", *words("straight"))
    commands.run("pretrain", *words("hurt", "run.stop_at=40steps"), code=75)
    checkpoints = commands.folder / "hurt" / "checkpoints"
    newest = checkpoints / "step-00000040"

    shard = next(iter((newest / "engine").glob("*optim_states.pt")))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    (checkpoints / "latest").write_text("")  # never trusted more than the folders
    (checkpoints / ".tmp-step-00000050").mkdir()
    text = commands.run("pretrain", *words("hurt"))

    assert f"{shard.name} does not have its hash" in text
    assert "resume checkpoint=" in text
    assert "step-00000030 step=30" in text
    assert_same_end(commands, "straight", "hurt")
    assert not list(checkpoints.glob(".tmp*"))


def test_no_sound_checkpoint_is_an_error_and_no_fresh_start(commands: Commands, words):
    commands.run("pretrain", *words("lost", "run.stop_at=12steps"), code=75)
    for commit in (commands.folder / "lost" / "checkpoints").glob("step-*/COMMIT.json"):
        commit.unlink()

    text = commands.run("pretrain", *words("lost"), code=1)

    assert "none of the checkpoints is sound" in text
    never = commands.run("pretrain", *words("lost"), "--resume", "never", code=2)
    assert "--resume never" in never


def test_what_cannot_be_resumed_is_refused_with_both_values(commands: Commands, words):
    commands.run("pretrain", *words("first", "run.stop_at=10steps"), code=75)

    seed = commands.run("pretrain", *words("first", "run.seed=1"), code=2)
    assert "seed: the checkpoint has 0, this run 1" in seed
    batch = commands.run("pretrain", *words("first", "batch.global_batch=48"), code=2)
    assert "global_batch: the checkpoint has 24, this run 48" in batch
    ranks = commands.run("pretrain", *words("first"), ranks=2, code=2)
    assert "world_size was 1, now 2" in ranks
    learning = commands.run(
        "pretrain", *words("first", "optim.lr=1e-3", "run.stop_at=11steps"), code=75
    )
    assert "the recipe changed since this checkpoint: optim.lr: 0.002 -> 0.001" in learning


@pytest.mark.parametrize("victim", ["deepspeed", "launch"])
def test_ranks_end_with_their_launcher(commands: Commands, words, victim: str):
    run_dir = commands.folder / "orphans"
    script = str(CHECKOUT / "launchers" / "pretrain.py")
    command = ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), script]
    command += words("orphans", "run.duration=100000steps")
    with (commands.folder / "launcher.txt").open("wb") as output:
        launcher = subprocess.Popen(
            command, cwd=commands.folder, env=environment(), stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        begun = commands.folder / "launcher.txt"
        wait_until(
            lambda: len(step_rows(run_dir)) > 15 or launcher.poll() is not None, "training began"
        )
        assert launcher.poll() is None, begun.read_text()
        ranks = [p for p in descendants(launcher.pid) if b"pretrain.py" in command_of(p)]
        inner = [p for p in ranks if b"deepspeed.launcher.launch" in command_of(p)]
        ranks = [p for p in ranks if p not in inner]
        assert len(ranks) >= 2

        os.kill(launcher.pid if victim == "deepspeed" else inner[0], signal.SIGKILL)

        wait_until(lambda: not any(alive(p) for p in ranks), "the ranks have ended")
    finally:
        for pid in [launcher.pid, *descendants(launcher.pid)]:
            kill(pid)
        launcher.wait()
    log = (run_dir / "log-rank00000.txt").read_text()
    assert "saved checkpoint=" in log
    latest = (run_dir / "checkpoints" / "latest").read_text().strip()
    commit = json.loads((run_dir / "checkpoints" / latest / "COMMIT.json").read_text())
    assert commit["step"] >= 10


def test_a_taken_port_is_said_with_the_way_out(commands: Commands, words):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = ["deepspeed", "--master_port", port, str(CHECKOUT / "launchers" / "pretrain.py")]
        done = subprocess.run(
            [*command, *words("port")], cwd=commands.folder, env=environment(),
            capture_output=True, text=True, timeout=DEADLINE_S,
        )  # fmt: skip

    assert done.returncode == 1, done.stdout + done.stderr
    assert f"the ranks cannot meet at 127.0.0.1:{port}" in done.stderr
    assert "--master_port" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_folder_serves_one_run_at_a_time(commands: Commands, words):
    first = commands.start("pretrain", *words("shared", "run.duration=100000steps"))
    first.wait_for_step(commands.folder / "shared", 1)

    text = commands.run("pretrain", *words("shared", "run.duration=100000steps"), code=2)

    assert f"is in use by process {first.processes[0].pid}" in text
    assert first.processes[0].poll() is None


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    found = []
    children = Path(f"/proc/{pid}/task/{pid}/children")
    for child in children.read_text().split() if children.exists() else []:
        found += [int(child), *descendants(int(child))]
    return found


def command_of(pid: int) -> bytes:
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_bytes() if path.exists() else b""


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


assert sys.platform == "linux", "these tests read /proc"


def test_a_rollback_sets_later_checkpoints_aside(commands: Commands, words):
    one = "run.keep_last=1"
    commands.run("pretrain", *words("back", "run.stop_at=40steps", "run.keep_last=9"), code=75)
    checkpoints = commands.folder / "back" / "checkpoints"
    (checkpoints / "step-00000040" / "weights.safetensors").write_bytes(b"damaged")

    text = commands.run("pretrain", *words("back", one, "run.stop_at=33steps"), code=75)
    assert "step-00000030 step=30" in text
    names = sorted(path.name for path in checkpoints.glob("*step-*"))
    assert names == ["abandoned-step-00000040", "step-00000033"]
    assert (checkpoints / "latest").read_text() == "step-00000033\n"

    # An older one that is asked for by name is gone on from in the same way.
    commands.run("pretrain", *words("back", "run.stop_at=45steps", "run.keep_last=9"), code=75)
    older = str(checkpoints / "step-00000040")
    again = [*words("back", one, "run.stop_at=42steps"), "--resume", older]
    assert "step=40" in commands.run("pretrain", *again, code=75)
    assert (checkpoints / "abandoned-step-00000045").is_dir()
    assert "step=42" in commands.run("pretrain", *words("back", one))


def test_settings_changed_on_resume_take_effect(commands: Commands, words):
    frozen = ["run.save_every=none", "optim.schedule=constant"]
    commands.run("pretrain", *words("run", *frozen, "run.stop_at=30steps"), code=75)
    before = weights_of(commands.folder / "run")

    # A clip this small stops Adam's moments from growing, the decay alone moves the kernels.
    changed = ["optim.grad_clip_norm=1e-12", "optim.weight_decay=1.0", "run.stop_at=31steps"]
    commands.run("pretrain", *words("run", *frozen, *changed), code=75)
    after = weights_of(commands.folder / "run")

    kernel, bias = "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc1.bias"
    shrunk = (after[kernel] / before[kernel]).median().item()
    assert shrunk == pytest.approx(1 - 2e-3 * 1.0, abs=3e-4)
    # Kernels feel the decay of 1.0; biases have none, so they move by Adam's step alone.
    assert (after[bias] - before[bias]).abs().max() < 2.1e-3


def test_a_finished_run_is_not_relabelled(commands: Commands, words):
    short = "run.duration=6steps"
    commands.run("pretrain", *words("done", short))

    run_dir = str(commands.folder / "done")

    def again(*sets: str, code: int = 2) -> str:
        return commands.run("pretrain", *words("done", *sets), "--resume", run_dir, code=code)

    assert "holds a complete run of 6 steps" in commands.run(
        "pretrain", *words("done", short, "optim.lr=1e-4"), code=2
    )
    other = again(short, "optim.lr=1e-4")
    assert "nothing is left to train" in other
    assert "optim.lr: 0.002 -> 0.0001" in other
    assert "step 6 of 3" in again("run.duration=3steps")
    assert "model.depth: 2 -> 3" in again("run.duration=9steps", "model.depth=3")
    assert "averaged weights" in again("run.duration=9steps", "optim.ema_decay=none")
    assert "done steps=9" in again("run.duration=9steps", code=0)


def weights_of(run_dir: Path):
    latest = (run_dir / "checkpoints" / "latest").read_text().strip()
    return read_safetensors(run_dir / "checkpoints" / latest / "weights.safetensors")[0]
