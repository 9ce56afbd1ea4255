"""A second real S3 server for tests, of another make: Ceph's RADOS Gateway.

One monitor, one object store in memory and one gateway, with keys that are thrown away.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.s3 import S3Server

PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "ceph-authtool")
START_S = 60.0
CONFIG = """\
[global]
fsid = {fsid}
mon_initial_members = a
mon_host = [v2:127.0.0.1:{mon2},v1:127.0.0.1:{mon1}]
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
paxos_propose_interval = 0.02
paxos_min_wait = 0.01
mon_max_pg_per_osd = 1000
osd_objectstore = memstore
memstore_device_bytes = 2147483648
mon_data = {root}/mon
osd_data = {root}/osd
run_dir = {root}/run
admin_socket = {run}/$name.asok
pid_file = {root}/run/$name.pid
log_file = {root}/log/$name.log
crash_dir = {root}/log
rgw_data = {root}/rgw
keyring = {root}/keyring
"""
KEYS = {
    "mon.": ["--cap", "mon", "allow *"],
    "client.admin": ["--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr",
                     "allow *"],
    "osd.0": ["--cap", "mon", "allow profile osd", "--cap", "osd", "allow *"],
    "client.rgw.a": ["--cap", "mon", "allow *", "--cap", "osd", "allow *"],
}  # fmt: skip


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture(scope="session")
def ceph_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Start the cluster; it and its data end with the session."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(
            "needs root and Ceph (apt-get install radosgw ceph-mon ceph-osd): no "
            f"{', '.join(missing) or 'root'}"
        )
    root = tmp_path_factory.mktemp("ceph")
    for name in ("mon", "osd", "run", "log", "rgw"):
        (root / name).mkdir()
    # Names of sockets are short: at most 107 bytes.
    run = Path("/tmp") / f"ceph-{uuid.uuid4().hex[:8]}"
    run.mkdir()
    started: list[subprocess.Popen] = []
    try:
        yield _start(root, run, started)
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGKILL)
            process.wait()
        shutil.rmtree(run)


def _start(root: Path, run: Path, started: list[subprocess.Popen]) -> S3Server:
    port, mon2, mon1 = _free_ports(3)
    fsid = str(uuid.uuid4())
    config = root / "ceph.conf"
    config.write_text(CONFIG.format(fsid=fsid, root=root, run=run, mon2=mon2, mon1=mon1))
    env = {**os.environ, "CEPH_CONF": str(config)}
    log = open(root / "log" / "commands.log", "ab")  # noqa: SIM115  as long as the processes

    def call(*words: object) -> None:
        subprocess.run(
            list(map(str, words)), env=env, check=True, timeout=60, stdout=log, stderr=log
        )

    def daemon(*words: object) -> None:
        command = [*map(str, words), "-c", str(config), "-f"]
        started.append(
            subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        )

    keyring = root / "keyring"
    address = f"[v2:127.0.0.1:{mon2},v1:127.0.0.1:{mon1}]"
    call("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, root / "monmap")
    for number, (name, caps) in enumerate(KEYS.items()):
        create = [] if number else ["--create-keyring"]
        call("ceph-authtool", *create, keyring, "--gen-key", "-n", name, *caps)
    call("ceph-mon", "-c", config, "--mkfs", "-i", "a", "--monmap", root / "monmap",
         "--keyring", keyring)  # fmt: skip
    daemon("ceph-mon", "-i", "a")
    osd = str(uuid.uuid4())
    call("ceph", "-c", config, "--connect-timeout", "30", "osd", "new", osd)
    call("ceph-osd", "-c", config, "-i", "0", "--mkfs", "--osd-uuid", osd, "--keyring", keyring)
    daemon("ceph-osd", "-i", "0")
    call("radosgw-admin", "-c", config, "user", "create", "--uid=test", "--display-name=test",
         "--access-key=test-key", "--secret-key=test-secret")  # fmt: skip
    daemon("radosgw", "-n", "client.rgw.a", f"--rgw-frontends=beast endpoint=127.0.0.1:{port}")
    log.close()
    _wait_ready(f"http://127.0.0.1:{port}/", root)
    env = {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test-key",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    server = S3Server(env["AWS_ENDPOINT_URL_S3"], "tests", env)
    server.client().create_bucket(Bucket=server.bucket)
    return server


def _wait_ready(url: str, root: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"Ceph did not start: {(root / 'log' / 'commands.log').read_text()[-2000:]}")


@pytest.fixture
def ceph_uri(ceph_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give the URI of a fresh prefix, with this process's environment pointing to the server."""
    for name, value in ceph_server.env.items():
        monkeypatch.setenv(name, value)
    return f"s3://{ceph_server.bucket}/{uuid.uuid4().hex[:12]}/some/prefix"
