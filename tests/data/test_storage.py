import multiprocessing
import os
import threading

import pytest

from tests.helpers.s3 import open_uploads
from vitscale.config.errors import UserError
from vitscale.data.storage import FileStorage, S3Storage, StorageError, open_storage

S3 = pytest.mark.s3
BOTH = pytest.mark.parametrize("make", [pytest.param(make, marks=S3) for make in ("s3", "ceph")])


@pytest.fixture(
    params=["file", pytest.param("s3_uri", marks=S3), pytest.param("ceph_uri", marks=S3)]
)
def storage(request, tmp_path):
    if request.param == "file":
        return open_storage(tmp_path / "store")
    return open_storage(request.getfixturevalue(request.param))


def test_storage_gives_back_what_was_put(storage):
    storage.put("a/b.bin", b"old")
    storage.put("a/b.bin", b"0123456789")

    assert storage.read_bytes("a/b.bin") == b"0123456789"
    assert storage.read_range("a/b.bin", 2, 3) == b"234"
    assert storage.read_range("a/b.bin", 8, 100) == b"89"
    assert storage.read_range("a/b.bin", 50, 3) == b""
    assert storage.size("a/b.bin") == 10
    assert storage.size("a/c.bin") is None


def test_storage_missing_object_is_named(storage):
    storage.put("there", b"")

    with pytest.raises(FileNotFoundError, match=f"{storage.uri}/gone does not exist"):
        storage.read_bytes("gone")
    with pytest.raises(FileNotFoundError, match="gone"):
        storage.read_range("gone", 0, 1)
    assert storage.read_bytes("there") == b""


def test_storage_lists_sorted_names_with_sizes(storage):
    for name in ("b", "a/2", "a/10", "ab", "_commit/x"):
        storage.put(name, name.encode())

    assert storage.list() == ["_commit/x", "a/10", "a/2", "ab", "b"]
    assert storage.list("a/") == ["a/10", "a/2"]
    assert storage.sizes("a") == {"a/10": 4, "a/2": 3, "ab": 2}
    assert storage.list("nothing/") == []


def test_storage_delete_is_idempotent(storage):
    storage.put("x", b"1")

    storage.delete("x")
    storage.delete("x")

    assert storage.list() == []


def test_storage_create_once_lets_the_first_win(storage):
    assert storage.create_once("manifest.json", b"first") is True
    assert storage.create_once("manifest.json", b"second") is False

    assert storage.read_bytes("manifest.json") == b"first"
    assert storage.list() == ["manifest.json"]


def test_storage_create_once_has_one_winner_among_racers(storage):
    results: list[tuple[bool, int]] = []
    barrier = threading.Barrier(8)

    def race(number: int) -> None:
        own = open_storage(storage.uri)
        barrier.wait()
        results.append((own.create_once("m", str(number).encode()), number))

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    winners = [number for won, number in results if won]
    assert len(results) == 8
    assert len(winners) == 1
    assert storage.read_bytes("m") == str(winners[0]).encode()


def test_storage_put_file_moves_a_temp(storage):
    with storage.open_temp() as file:
        file.write(b"x" * 100_000)
        file.flush()
        storage.put_file("big/file", file.name)

    assert storage.read_bytes("big/file") == b"x" * 100_000
    assert not os.path.exists(file.name)


def test_storage_download_copies(storage, tmp_path):
    storage.put("x", b"content")

    storage.download("x", tmp_path / "copy")

    assert (tmp_path / "copy").read_bytes() == b"content"
    with pytest.raises(FileNotFoundError, match="gone"):
        storage.download("gone", tmp_path / "other")


def test_storage_put_onto_a_blocked_path_is_an_error(tmp_path):
    storage = open_storage(tmp_path)
    storage.put("taken", b"a file")

    with pytest.raises(StorageError, match=r"cannot write .*/taken/below"):
        storage.put("taken/below", b"x")


def test_file_storage_sweeps_dead_temps_only(tmp_path):
    storage = open_storage(tmp_path)
    dead = tmp_path / ".vitscale-tmp-00000000deadbeef"
    dead.write_bytes(b"of a killed run")
    other = tmp_path / ".vitscale-tmp-notes.txt"
    other.write_bytes(b"of somebody else")

    with storage.open_temp() as live:
        assert storage.list() == [other.name]
        assert storage.sweep_temps() == 1
        assert os.path.exists(live.name)

    assert not dead.exists()
    assert other.exists()
    os.unlink(live.name)


def test_file_storage_opens_objects_in_place(tmp_path):
    storage = open_storage(f"file://{tmp_path}/with%20blank")
    storage.put("x", b"1")

    assert storage.local_path("x").read_bytes() == b"1"
    assert (tmp_path / "with blank" / "x").exists()


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("", "an empty URI"),
        ("gs://b/x", "scheme 'gs' is not known"),
        ("s3://", "names no bucket"),
        ("file://host/x", "names no local file"),
    ],
)
def test_open_storage_refuses_other_uris(uri, said):
    with pytest.raises(UserError, match=said):
        open_storage(uri)


def test_open_storage_knows_the_kinds(tmp_path):
    assert isinstance(open_storage("some/where"), FileStorage)
    assert isinstance(open_storage(f"file://{tmp_path}"), FileStorage)
    storage = open_storage("s3://bucket/a/b/")
    assert isinstance(storage, S3Storage)
    assert (storage.bucket, storage.prefix, storage.uri) == ("bucket", "a/b/", "s3://bucket/a/b")


def _read_in_child(storage, queue) -> None:
    queue.put(storage.read_bytes("x"))


@pytest.mark.s3
def test_s3_storage_works_in_a_forked_child(s3_uri):
    storage = open_storage(s3_uri)
    storage.put("x", b"1")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    child = context.Process(target=_read_in_child, args=(storage, queue))
    child.start()

    assert queue.get(timeout=60) == b"1"
    child.join()


@BOTH
def test_s3_storage_uploads_in_parts_and_sweeps_unfinished_ones(request, tmp_path, make):
    storage = open_storage(request.getfixturevalue(f"{make}_uri"))
    storage.part_bytes = 5 << 20
    server = request.getfixturevalue(f"{make}_server")
    root = storage.prefix.partition("/")[0]
    for key in (storage.prefix + "shard-000000.tar", f"{root}/elsewhere"):
        server.client().create_multipart_upload(Bucket=storage.bucket, Key=key)
    data = os.urandom(2 * storage.part_bytes + 1)
    with storage.open_temp() as file:
        file.write(data)
        file.flush()
        storage.put_file("large", file.name)

    assert storage.abort_uploads() == 1

    assert open_uploads(server, root) == [f"{root}/elsewhere"]
    head = server.client().head_object(Bucket=storage.bucket, Key=storage.prefix + "large")
    assert head["ETag"].endswith('-3"'), "three parts"
    assert storage.read_bytes("large") == data
    storage.download("large", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data


@BOTH
def test_s3_storage_lists_page_by_page(request, make):
    uri = request.getfixturevalue(f"{make}_uri")
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    storage = S3Storage(uri, bucket, prefix, page_names=2)
    names = ["a b", "a+b", "a/1", "a/2", "\u00e4"]
    for name in names:
        storage.put(name, name.encode())

    assert storage.sizes() == {name: len(name.encode()) for name in names}
    assert storage.list("a/") == ["a/1", "a/2"]


@BOTH
def test_s3_storage_handles_empty_objects(request, tmp_path, make):
    storage = open_storage(request.getfixturevalue(f"{make}_uri"))
    (tmp_path / "empty").write_bytes(b"")
    storage.put_file("x", tmp_path / "empty")

    assert storage.size("x") == 0
    assert storage.read_bytes("x") == b""
    assert storage.read_range("x", 0, 10) == b""
    storage.download("x", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b""


@pytest.mark.s3
def test_s3_storage_refusals_are_named(s3_uri, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")

    with pytest.raises(StorageError, match=f"cannot write {s3_uri}/x: SignatureDoesNotMatch"):
        open_storage(s3_uri).put("x", b"1")


@pytest.mark.s3
def test_s3_storage_missing_bucket_is_an_error(s3_uri):
    with pytest.raises(StorageError, match="s3://no-such-bucket/x/y: NoSuchBucket"):
        open_storage("s3://no-such-bucket/x").read_bytes("y")
