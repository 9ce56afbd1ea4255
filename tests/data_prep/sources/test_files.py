import io
import os
import pickle
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from data_prep.sources.files import (
    FoundFile,
    OpenFiles,
    RandomFile,
    expand_uris,
    find_files,
    is_litter,
    with_prefixes,
)
from vitscale.config.errors import DataError, UserError
from vitscale.data.storage import open_storage

NAMES = ["a/x-0.tar", "a/x-1.TAR", "a/x-10.tar", "b/c/x-2.tar", "b/notes.txt"]
LITTER = ["a/._x-0.tar", ".hidden/x-9.tar", "__MACOSX/x-8.tar"]


@pytest.fixture
def folder(tmp_path):
    for name in NAMES + LITTER:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


@pytest.mark.parametrize(
    ("uri", "wanted"),
    [
        ("", ["a/x-0.tar", "a/x-1.TAR", "a/x-10.tar", "b/c/x-2.tar"]),
        ("/a/x-0.tar", ["a/x-0.tar"]),
        ("/b/notes.txt", ["b/notes.txt"]),
        ("/a/x-?.*", ["a/x-0.tar", "a/x-1.TAR"]),
        ("/**/x-[12]*.tar", ["a/x-10.tar", "b/c/x-2.tar"]),
        ("/*/x-*.tar", ["a/x-0.tar", "a/x-10.tar"]),
        ("/a/x-{0,10}.tar", ["a/x-0.tar", "a/x-10.tar"]),
        ("/{b/c,a}/x-*.tar", ["a/x-0.tar", "a/x-10.tar", "b/c/x-2.tar"]),
    ],
)
def test_uris_expand_to_sorted_files(folder, uri, wanted):
    found = find_files(f"{folder}{uri}", (".tar",))

    assert found == [FoundFile(f"{folder}/{name}", len(name)) for name in wanted]
    assert expand_uris(f"{folder}{uri}", (".tar",)) == [file.uri for file in found]


@pytest.mark.s3
def test_uris_in_a_store_expand_alike(s3_uri):
    storage = open_storage(s3_uri)
    for name in NAMES + LITTER:
        storage.put(name, name.encode())

    for uri, wanted in [
        ("", ["a/x-0.tar", "a/x-1.TAR", "a/x-10.tar", "b/c/x-2.tar"]),
        ("/a/x-0.tar", ["a/x-0.tar"]),
        ("/**/x-[12]*.tar", ["a/x-10.tar", "b/c/x-2.tar"]),
        ("/*/x-*.tar", ["a/x-0.tar", "a/x-10.tar"]),
        ("/a/x-{0..0}.tar", ["a/x-0.tar"]),
    ]:
        found = find_files(f"{s3_uri}{uri}", (".tar",))
        assert found == [FoundFile(f"{s3_uri}/{name}", len(name)) for name in wanted], uri
    with pytest.raises(UserError, match=r"x-7\.tar.*no such file"):
        expand_uris(f"{s3_uri}/a/x-7.tar", (".tar",))


@pytest.mark.parametrize("uri", ["/gone.tar", "/a/*.zip", "/a/x-{0..2}.tar", "/b/{notes"])
def test_a_uri_without_files_is_refused_by_name(folder, uri):
    with pytest.raises(UserError, match=r"gone\.tar|\*\.zip|x-1\.tar|notes"):
        expand_uris(f"{folder}{uri}", (".tar",))


def test_a_folder_without_such_files_is_refused(folder):
    with pytest.raises(UserError, match=r"a folder with \.zip or \.rar in it"):
        expand_uris(str(folder), (".zip", ".rar"))


def test_a_name_with_braces_that_exists_is_taken_as_it_is(tmp_path):
    path = tmp_path / "x{1,2}.tar"
    path.touch()

    assert expand_uris(str(path), ()) == [str(path)]


def test_names_that_are_not_utf8_are_found(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff.tar"
    with open(path, "wb") as file:
        file.write(b"12")

    assert find_files(str(tmp_path), (".tar",)) == [FoundFile(os.fsdecode(path), 2)]


def test_links_between_folders_are_followed_once(folder):
    os.symlink(folder, folder / "b" / "loop")

    assert len(expand_uris(str(folder), (".tar",))) == 4


def test_prefixes_leave_out_the_folders_in_common():
    files = [FoundFile(uri, 0) for uri in ("/d/t/a.tar", "/d/t/b.tar", "/d/u/a.tar")]

    assert [prefix for _, prefix in with_prefixes(files)] == ["t/a.tar/", "t/b.tar/", "u/a.tar/"]
    assert [prefix for _, prefix in with_prefixes(files[:2])] == ["a.tar/", "b.tar/"]
    assert [prefix for _, prefix in with_prefixes(files[:1])] == [""]


@pytest.mark.parametrize("name", ["._a.jpg", "a/.b/c.jpg", "__MACOSX/a.jpg", "a/Thumbs.db"])
def test_litter_is_told_by_name(name):
    assert is_litter(name)
    assert not is_litter(name.replace(".", "x").replace("_M", "M").replace("Th", "th"))


def test_a_file_is_read_at_any_place_by_many_threads(tmp_path):
    data = bytes(range(256)) * 64
    (tmp_path / "f").write_bytes(data)
    file = pickle.loads(pickle.dumps(RandomFile(str(tmp_path / "f"))))

    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda at: file.read(at, 100), range(0, len(data), 100)))

    assert b"".join(parts) == data
    assert file.num_bytes == len(data)
    assert file.read(len(data), 5) == b""


@pytest.mark.s3
def test_an_object_is_read_at_any_place(s3_uri):
    open_storage(s3_uri).put("f", b"0123456789")
    file = pickle.loads(pickle.dumps(RandomFile(f"{s3_uri}/f")))

    assert file.num_bytes == 10
    assert file.read(3, 4) == b"3456"
    assert file.read(8, 4) == b"89"
    with file.open() as opened:
        assert opened.read() == b"0123456789"
    with pytest.raises(UserError, match="no such object"):
        _ = RandomFile(f"{s3_uri}/g").num_bytes
    with pytest.raises(DataError, match="gone"):
        RandomFile(f"{s3_uri}/g").read(0, 1)


def test_descriptors_are_closed_with_the_file(tmp_path):
    (tmp_path / "f").write_bytes(b"1")
    before = len(os.listdir("/proc/self/fd"))

    for _ in range(10):
        RandomFile(str(tmp_path / "f")).read(0, 1)

    assert len(os.listdir("/proc/self/fd")) == before


def test_an_opened_file_can_be_sought_like_any_other(tmp_path):
    with zipfile.ZipFile(tmp_path / "z", "w") as archive:
        archive.writestr("a", b"content" * 50_000)
    file = RandomFile(str(tmp_path / "z"))

    with file.open() as opened, zipfile.ZipFile(opened) as archive:
        assert archive.read("a") == b"content" * 50_000
    with file.open() as opened:
        opened.seek(-2, io.SEEK_END)
        assert opened.tell() == file.num_bytes - 2
        with pytest.raises(OSError, match="before the start"):
            opened.seek(-1)


def test_a_missing_file_is_an_error_of_the_user_only_while_listing(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        _ = RandomFile(str(tmp_path / "gone")).num_bytes
    with pytest.raises(DataError, match="put it back"):
        RandomFile(str(tmp_path / "gone")).read(0, 1)


def test_open_files_refuse_what_changed_and_keep_a_bounded_number(tmp_path):
    files = OpenFiles()
    for number in range(100):
        (tmp_path / f"{number}").write_bytes(b"ab")
    before = len(os.listdir("/proc/self/fd"))

    for number in range(100):
        assert files.get(str(tmp_path / f"{number}"), 2).read(0, 2) == b"ab"

    assert len(os.listdir("/proc/self/fd")) <= before + 64
    with pytest.raises(DataError, match="has 2 bytes, it had 3"):
        files.get(str(tmp_path / "0"), 3)
    with pytest.raises(DataError, match="was there when it was listed"):
        files.get(str(tmp_path / "gone"), 3)
