"""Every operation on a store that fails: it ends right, or says why; never with other bytes."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.fault_proxy import FAULTS, each_once, fault_proxy, first, sometimes
from tests.helpers.s3 import open_uploads
from vitscale.config.errors import UserError
from vitscale.data.s3_storage import S3Storage
from vitscale.data.storage import StorageError, open_storage

pytestmark = pytest.mark.s3
PART = 5 << 20
LARGE = os.urandom(2 * PART + 1000)
MEDIUM = LARGE[:300_000]
LIMITS = {"part_bytes": PART, "patience_s": 60.0, "page_names": 2}


def through(uri: str, **limits) -> S3Storage:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return S3Storage(uri, bucket, prefix, **{**LIMITS, **limits})


@pytest.fixture
def direct(s3_uri):
    """The storage past the proxy: it keeps the client that it makes here."""
    storage = open_storage(s3_uri)
    storage.list()
    return storage


@pytest.fixture
def large_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(LARGE)
    return path


@pytest.fixture
def faulty(s3_server, monkeypatch):
    """Make a proxy to which storages of now on talk: faulty(choose) as a context."""

    class Faulty:
        def __init__(self, choose, **settings):
            self.proxy = fault_proxy(s3_server.endpoint, choose, **settings)

        def __enter__(self):
            proxy = self.proxy.__enter__()
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
            return proxy

        def __exit__(self, *error):
            self.proxy.__exit__(*error)
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint)

    return Faulty


def contents(storage) -> dict[str, bytes]:
    return {name: storage.read_bytes(name) for name in storage.list()}


@pytest.mark.parametrize("fault", FAULTS)
def test_storage_writes_through_faults_are_whole(direct, s3_server, faulty, large_file, fault):
    direct.put("taken", b"theirs")
    direct.put("old", b"")
    s3_server.client().create_multipart_upload(Bucket=direct.bucket, Key=direct.prefix + "dead")

    with faulty(each_once(fault)) as proxy:
        storage = through(direct.uri)
        storage.put("small", b"content" * 1000)
        storage.put_file("large", large_file)
        assert storage.create_once("once", b"mine") is True
        assert storage.create_once("taken", b"mine") is False
        storage.delete("old")
        assert storage.abort_uploads() >= 1

    # put, create_once (2), delete, listed and cancelled uploads; begin, 3 parts, end, look
    assert proxy.counts[fault] >= 12
    assert contents(direct) == {
        "small": b"content" * 1000,
        "large": LARGE,
        "once": b"mine",
        "taken": b"theirs",
    }
    assert open_uploads(s3_server, direct.prefix) == []
    assert not large_file.exists()


@pytest.mark.parametrize("fault", FAULTS)
def test_storage_reads_through_faults_are_whole(direct, faulty, tmp_path, fault):
    direct.put("large", LARGE)
    for name in ("medium", "more", "most"):
        direct.put(name, MEDIUM)

    with faulty(each_once(fault)) as proxy:
        storage = through(direct.uri)
        assert storage.read_bytes("medium") == MEDIUM
        assert storage.read_range("more", 10, 70_000) == MEDIUM[10:70_010]
        assert storage.size("medium") == len(MEDIUM)
        assert storage.size("none") is None
        assert storage.list() == ["large", "medium", "more", "most"]
        storage.download("large", tmp_path / "copy")

    # of the two ranges of the download only the first in time: their requests look alike
    assert proxy.counts[fault] >= 8
    assert (tmp_path / "copy").read_bytes() == LARGE
    assert os.listdir(tmp_path) == ["copy"]


def test_storage_that_is_silent_is_asked_again(direct, faulty):
    direct.put("x", MEDIUM)
    with faulty(each_once("stall:0.9")) as proxy:
        storage = through(direct.uri, timeout_s=0.5)
        start = time.monotonic()
        assert storage.read_bytes("x") == MEDIUM
        assert storage.create_once("once", b"mine") is True
        assert time.monotonic() - start > 1.0

    assert proxy.counts["stall"] >= 2


def test_storage_that_refuses_connections_is_waited_for(direct, faulty, monkeypatch, capsys):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
    storage = through(direct.uri, patience_s=12)

    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(storage.put, "x", b"1")
        time.sleep(1.5)
        assert not writing.done()
        with faulty(first(0, ""), port=port):
            writing.result(timeout=60)

    assert direct.read_bytes("x") == b"1"
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith(f"warning: cannot write {direct.uri}/x, trying for 12 s: ")


@pytest.mark.parametrize("fault", ["busy", "reset_request", "lost_answer", "damaged"])
def test_storage_that_stays_down_is_named(direct, faulty, fault):
    with (
        faulty(first(10_000, fault)),
        pytest.raises(StorageError, match=rf"cannot write {direct.uri}/x in \d+ tries over"),
    ):
        through(direct.uri, patience_s=0.3).put("x", b"1")


def test_storage_long_work_before_the_first_failure_uses_no_patience(direct, faulty):
    direct.put("x", MEDIUM)
    asked = []

    def slow_then_busy_once(method: str, target: str) -> str:
        asked.append(target)
        if len(asked) > 1:
            return ""
        time.sleep(1)
        return "busy"

    with faulty(slow_then_busy_once):
        assert through(direct.uri, patience_s=0.5).read_bytes("x") == MEDIUM


def test_storage_expired_credentials_are_explained(direct, s3_server, faulty):
    with (
        faulty(first(10_000, "expired")),
        pytest.raises(StorageError, match=r"ExpiredToken.*if the credentials have expired") as said,
    ):
        through(direct.uri).read_bytes("x")

    assert s3_server.env["AWS_SECRET_ACCESS_KEY"] not in str(said.value)


@pytest.mark.parametrize("old_key", ["old-key", "test-key"], ids=["both_new", "secret_new"])
def test_storage_renewed_credentials_are_taken_up(
    direct, s3_server, faulty, monkeypatch, tmp_path, old_key
):
    direct.put("x", b"1")
    shared = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(shared))
    keys = [s3_server.env[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")

    def write(key: str, secret: str) -> None:
        shared.write_text(
            f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
        )

    def renew_when_asked(method: str, target: str) -> str:
        write(*keys)
        return ""

    write(old_key, "old-secret")
    with faulty(renew_when_asked) as proxy:
        assert through(direct.uri).read_bytes("x") == b"1"

    assert proxy.counts[""] == 2, "refused with the old ones, then taken"


def test_storage_threads_share_renewed_credentials(direct, faulty, large_file):
    seen = []

    def every_third(method: str, target: str) -> str:
        seen.append(target)
        return "expired" if len(seen) % 3 == 0 else ""

    with faulty(every_third):
        through(direct.uri).put_file("large", large_file)

    assert direct.read_bytes("large") == LARGE


def test_storage_unfinished_upload_is_aborted(direct, s3_server, faulty, large_file):
    def second_part_fails(method: str, target: str) -> str:
        return "refuse:403:AccessDenied" if "partNumber=2" in target else ""

    with faulty(second_part_fails), pytest.raises(StorageError, match="AccessDenied"):
        through(direct.uri).put_file("large", large_file)

    assert open_uploads(s3_server, direct.prefix) == []
    assert direct.list() == []
    assert large_file.read_bytes() == LARGE


def test_storage_part_that_is_refused_ends_the_patience_of_others(direct, faulty, large_file):
    def parts_fail(method: str, target: str) -> str:
        if "partNumber=2" in target:
            time.sleep(0.5)
            return "refuse:403:AccessDenied"
        return "busy" if "partNumber" in target else ""

    start = time.monotonic()
    with faulty(parts_fail), pytest.raises(StorageError, match="AccessDenied"):
        through(direct.uri).put_file("large", large_file)

    assert time.monotonic() - start < 20, "not the 60 s of patience with a busy store"


CHILD = """
import sys
from vitscale.data.s3_storage import S3Storage
uri, bucket, prefix, path = sys.argv[1:]
S3Storage(uri, bucket, prefix, part_bytes=5 << 20).put_file("large", path)
"""


def test_storage_interrupted_upload_is_aborted(direct, s3_server, faulty, large_file):
    begun = threading.Event()

    def parts_are_slow(method: str, target: str) -> str:
        if "partNumber" not in target:
            return ""
        begun.set()
        return "stall:1"

    words = [direct.uri, direct.bucket, direct.prefix.strip("/"), str(large_file)]
    with (
        faulty(parts_are_slow),
        subprocess.Popen([sys.executable, "-c", CHILD, *words], stderr=subprocess.PIPE) as child,
    ):
        assert begun.wait(30)
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=30)

    assert b"KeyboardInterrupt" in said
    assert open_uploads(s3_server, direct.prefix) == []
    assert direct.list() == []
    assert large_file.exists()


def end_of_upload(*answers: str):
    """Treat the requests that end an upload in this way, one after the other."""
    left = list(answers)

    def choose(method: str, target: str) -> str:
        return left.pop(0) if left and method == "POST" and "uploadId" in target else ""

    return choose


def test_storage_upload_whose_end_was_not_heard_of_is_found(direct, faulty, large_file):
    with faulty(end_of_upload("lost_answer", "refuse:404:NoSuchUpload")) as proxy:
        through(direct.uri).put_file("large", large_file)

    assert proxy.counts["refuse"] == 1
    assert direct.read_bytes("large") == LARGE


@pytest.mark.parametrize("answers", [["refuse:404:NoSuchUpload"], ["busy"]])
def test_storage_upload_that_vanished_is_no_success(direct, faulty, large_file, answers):
    direct.put("large", bytes(len(LARGE)))  # of an earlier run, and as long
    with (
        faulty(end_of_upload(*answers, *["refuse:404:NoSuchUpload"] * 2)),
        pytest.raises(StorageError, match="NoSuchUpload"),
    ):
        through(direct.uri).put_file("large", large_file)

    assert direct.read_bytes("large") == bytes(len(LARGE))
    assert large_file.read_bytes() == LARGE


def test_storage_upload_that_is_cancelled_unheard_stays_cancelled(direct, s3_server, faulty):
    s3_server.client().create_multipart_upload(Bucket=direct.bucket, Key=direct.prefix + "dead")
    answers = ["lost_answer", "refuse:404:NoSuchUpload"]

    with faulty(lambda method, target: answers.pop(0) if method == "DELETE" else ""):
        assert through(direct.uri).abort_uploads() == 1

    assert answers == []
    assert open_uploads(s3_server, direct.prefix) == []


def test_storage_download_that_fails_leaves_nothing(direct, faulty, tmp_path):
    direct.put("large", LARGE)

    def second_range_fails(method: str, target: str) -> str:
        ranges.append(method)
        return "refuse:403:AccessDenied" if ranges.count("GET") == 2 else ""

    ranges: list[str] = []
    with faulty(second_range_fails), pytest.raises(StorageError, match="AccessDenied"):
        through(direct.uri).download("large", tmp_path / "copy")

    assert os.listdir(tmp_path) == []


def test_storage_that_ignores_ranges_is_refused(direct, faulty):
    with (
        faulty(first(1, "refuse:200:Whole")),
        pytest.raises(StorageError, match="must pass Range headers on"),
    ):
        through(direct.uri).read_range("x", 5, 10)


def test_storage_wrong_endpoint_is_the_users_fault(s3_uri, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "no address")

    with pytest.raises(UserError, match="AWS_ENDPOINT_URL_S3 takes"):
        open_storage(s3_uri).list()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A file with key and certificate of 127.0.0.1 that nobody knows."""
    folder = tmp_path_factory.mktemp("tls")
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
        "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
        "-keyout", folder / "key.pem", "-out", folder / "certificate.pem",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_text("".join((folder / f"{n}.pem").read_text() for n in ("key", "certificate")))
    return both


def test_storage_bytes_damaged_under_tls_are_sent_again(
    direct, faulty, monkeypatch, certificate, large_file
):
    # Under TLS the signature leaves the body out: the MD5 sum alone guards it.
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    with faulty(each_once("damaged"), certificate=certificate) as proxy:
        storage = through(direct.uri)
        storage.put("small", MEDIUM)
        assert storage.create_once("once", MEDIUM) is True
        storage.put_file("large", large_file)

    assert proxy.counts["damaged"] >= 5
    assert contents(direct) == {"small": MEDIUM, "once": MEDIUM, "large": LARGE}


def test_storage_unknown_certificate_is_refused_at_once(direct, faulty, certificate):
    with (
        faulty(first(0, ""), certificate=certificate) as proxy,
        pytest.raises(StorageError, match="certificate file in AWS_CA_BUNDLE"),
    ):
        through(direct.uri).put("x", b"1")

    assert proxy.counts.total() == 0


def test_storage_many_writes_through_a_bad_network_are_all_right(direct, faulty):
    wanted = {f"{n:02d}": str(n).encode() * 500 for n in range(18)}
    with faulty(sometimes(4, 0.3)) as proxy:
        storage = through(direct.uri)
        for name, data in wanted.items():
            storage.put(name, data)

    assert len(proxy.counts) > 4, "too few kinds of faults; take another seed"
    assert contents(direct) == wanted
