"""Every operation on a store that fails: it ends right, or says why; never with other bytes."""

import os

import pytest

from tests.helpers.fault_proxy import FAULTS, fault_proxy, first, sometimes
from vitscale.data.s3_storage import S3Storage
from vitscale.data.storage import StorageError, open_storage

pytestmark = pytest.mark.s3
PART = 5 << 20
LARGE = os.urandom(PART + 1000)
MEDIUM = LARGE[:300_000]


def through(uri: str, patience_s: float = 60.0) -> S3Storage:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return S3Storage(uri, bucket, prefix, part_bytes=PART, patience_s=patience_s)


@pytest.fixture
def direct(s3_uri):
    return open_storage(s3_uri)


def put(storage, tmp_path):
    storage.put("x", b"content" * 1000)
    return "x", b"content" * 1000


def put_file(storage, tmp_path):
    (tmp_path / "file").write_bytes(LARGE)
    storage.put_file("large", tmp_path / "file")
    return "large", LARGE


def create_once(storage, tmp_path):
    assert storage.create_once("once", b"mine") is True
    assert storage.create_once("once", b"other") is False
    return "once", b"mine"


@pytest.mark.parametrize("fault", [*FAULTS, "stall:0.3"])
@pytest.mark.parametrize("operation", [put, put_file, create_once], ids=lambda f: f.__name__)
def test_storage_write_through_faults_is_whole(
    direct, s3_server, monkeypatch, tmp_path, fault, operation
):
    with fault_proxy(s3_server.endpoint, first(2, fault)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        name, content = operation(through(direct.uri), tmp_path)

    assert proxy.counts[fault.partition(":")[0]] > 0
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint)
    assert direct.read_bytes(name) == content


@pytest.mark.parametrize("fault", [*FAULTS, "stall:0.3"])
def test_storage_read_through_faults_is_whole(direct, s3_server, monkeypatch, tmp_path, fault):
    direct.put("medium", MEDIUM)
    with fault_proxy(s3_server.endpoint, first(2, fault)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        storage = through(direct.uri)

        assert storage.read_bytes("medium") == MEDIUM
        proxy.choose = first(2, fault)
        assert storage.read_range("medium", 10, 70_000) == MEDIUM[10:70_010]
        proxy.choose = first(1, fault)
        assert storage.size("medium") == len(MEDIUM)
        proxy.choose = first(2, fault)
        assert storage.list() == ["medium"]
        proxy.choose = first(1, fault)
        storage.download("medium", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == MEDIUM


@pytest.mark.parametrize("fault", ["busy", "reset_request", "lost_answer"])
def test_storage_that_stays_down_is_named(direct, s3_server, monkeypatch, fault):
    with fault_proxy(s3_server.endpoint, first(10_000, fault)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        with pytest.raises(StorageError, match=rf"cannot write {direct.uri}/x in \d+ tries over"):
            through(direct.uri, patience_s=0.5).put("x", b"1")


def test_storage_expired_credentials_are_explained(direct, s3_server, monkeypatch):
    with fault_proxy(s3_server.endpoint, first(10_000, "expired")) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        with pytest.raises(
            StorageError, match=r"ExpiredToken.*if the credentials have expired"
        ) as caught:
            through(direct.uri).read_bytes("x")

    assert s3_server.env["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)


def test_storage_renewed_credentials_are_taken_up(direct, s3_server, monkeypatch, tmp_path):
    direct.put("x", b"1")
    shared = tmp_path / "credentials"
    form = "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n"
    shared.write_text(form.format("old-key", "old-secret"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(shared))
    keys = [s3_server.env[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    storage = through(direct.uri)
    storage._s3()  # holds the old ones
    shared.write_text(form.format(*keys))

    assert storage.read_bytes("x") == b"1"


def test_storage_unfinished_upload_is_aborted(direct, s3_server, monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(LARGE)

    def parts_fail(method: str, target: str) -> str:
        return "busy" if method == "PUT" and "partNumber" in target else ""

    with fault_proxy(s3_server.endpoint, parts_fail) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        with pytest.raises(StorageError, match="SlowDown"):
            through(direct.uri, patience_s=0.3).put_file("large", tmp_path / "file")

    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint)
    assert direct.abort_uploads() == 0
    assert direct.list() == []
    assert (tmp_path / "file").exists()


@pytest.mark.parametrize("seed", [1])
def test_storage_many_writes_through_a_bad_network_are_all_right(
    direct, s3_server, monkeypatch, tmp_path, seed
):
    with fault_proxy(s3_server.endpoint, sometimes(seed, 0.3)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        storage = through(direct.uri)
        for number in range(20):
            storage.put(f"{number:02d}", str(number).encode() * 500)

    assert len(proxy.counts) > 4
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint)
    contents = {name: direct.read_bytes(name) for name in direct.list()}
    assert contents == {f"{n:02d}": str(n).encode() * 500 for n in range(20)}
