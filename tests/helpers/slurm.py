"""A real Slurm cluster for tests: one controller and several nodes, all on this machine."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
START_S = 30.0
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
# A job that is put back into the queue waits for its old credential to expire.
AuthInfo=socket={root}/munge.sock,cred_expire=5
SlurmctldPort={port}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MailProg=/bin/true
"""
NODE = (
    "NodeName=node{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 Boards=1 "
    "SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=16000 State=UNKNOWN\n"
)


@dataclass
class Slurm:
    # what a process needs in its environment to reach the cluster; `vitscale` is on its path
    env: dict[str, str]

    def run(self, *command: str | Path, timeout: float = 120) -> subprocess.CompletedProcess:
        return subprocess.run(
            [str(word) for word in command],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Start a cluster of two nodes; it ends with the session."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(
            f"needs root and Slurm (apt-get install slurmctld slurmd slurm-client munge): no "
            f"{', '.join(missing) or 'root'}"
        )
    root = tmp_path_factory.mktemp("slurm")
    root.chmod(0o755)
    bin_dir = root / "bin"
    bin_dir.mkdir()
    command = bin_dir / "vitscale"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m vitscale.cli "$@"\n')
    command.chmod(0o755)
    checkout = Path(__file__).resolve().parents[2]
    env = {
        **os.environ,
        "PATH": os.pathsep.join([str(bin_dir), path]),
        "PYTHONPATH": str(checkout),
        "SLURM_CONF": str(root / "slurm.conf"),
    }
    started = _start(root, env)
    try:
        _wait_idle(env, 2)
        yield Slurm(env)
    finally:
        for process in started:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _start(root: Path, env: dict[str, str]) -> list[subprocess.Popen]:
    for name in ("state", "munge"):
        (root / name).mkdir(mode=0o700)
    key = root / "munge" / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    text = CONFIG.format(host=host, root=root, port=_free_port())
    for number in (1, 2):
        (root / f"spool-node{number}").mkdir()
        text += NODE.format(number=number, host=host, port=_free_port())
    text += "PartitionName=main Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP\n"
    (root / "slurm.conf").write_text(text)
    (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # loaded, but never used
    commands = [
        ["munged", "--foreground", "--force", f"--socket={root}/munge.sock",
         f"--key-file={key}", f"--pid-file={root}/munged.pid", f"--log-file={root}/munged.log",
         f"--seed-file={root}/munge/munged.seed"],
        ["slurmctld", "-D", "-f", str(root / "slurm.conf")],
        *(["slurmd", "-D", "-f", str(root / "slurm.conf"), "-N", f"node{n}"] for n in (1, 2)),
    ]  # fmt: skip
    started = []
    for command in commands:
        with open(root / f"{command[0]}-out.log", "ab") as log:
            started.append(
                subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
            )
        time.sleep(0.3)  # munge must listen before Slurm asks it
    return started


def _wait_idle(env: dict[str, str], nodes: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"], env=env, capture_output=True, text=True
        )
        if len(done.stdout.split()) == nodes:
            return
        time.sleep(0.1)
    raise RuntimeError(f"Slurm did not start: {done.stdout} {done.stderr}")
