import pickle
import stat
import struct
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from data_prep.sources.archives import TarMembers, ZipMembers
from data_prep.sources.build import Column, SourceOptions, build_source
from data_prep.verdict import BadInputError
from tests.helpers.tars import contents, header, read, write_tar
from vitscale.config.errors import DataError, UserError
from vitscale.data.storage import open_storage

MEMBERS = [
    ("./train/cat/1.jpg", b"one"),
    ("train/dog/x/2.jpg", b"two" * 500),
    ("3.jpg", b"three"),
    ("train/cat/._1.jpg", b"mac"),
]
PARENT = {
    "train/cat/1.jpg": (("cat",), b"one"),
    "train/dog/x/2.jpg": (("x",), b"two" * 500),
    "3.jpg": (((),), "no_label: the member lies in no folder"),
}


def write_zip(path, members, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def tar(path, members=MEMBERS, **options):
    return TarMembers(str(write_tar(path, members)), SourceOptions(**options))


@pytest.mark.parametrize("ending", ["tar", "tar.gz", "tar.bz2", "tar.xz"])
def test_members_of_a_tar_have_the_class_of_their_folder(tmp_path, ending):
    mode = f"w:{ending.removeprefix('tar').removeprefix('.')}"
    path = write_tar(tmp_path / f"a.{ending}", MEMBERS, mode)
    source = TarMembers(str(path), SourceOptions())

    assert contents(source) == PARENT
    assert source.columns() == [Column("label")]
    blocks = {entry.block for entry in source.entries()}
    assert blocks == {"" if ending == "tar" else str(path)}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_members_of_a_zip_have_the_class_of_their_folder(tmp_path, method):
    path = write_zip(tmp_path / "a.zip", [("train/", b""), *MEMBERS], method)
    source = ZipMembers(str(path), SourceOptions())

    assert contents(source) == PARENT
    assert source.columns() == [Column("label")]


@pytest.mark.parametrize(
    ("rule", "labels"),
    [
        ("top", ["train", "train", ()]),
        (r"/(?P<label>cat|dog)/", ["cat", "dog", ()]),
        (r"()(\d)\.jpg$", [(), (), ()]),
        (r"(\d)\.jpg$", ["1", "2", "3"]),
    ],
)
def test_the_label_rule_finds_the_class(tmp_path, rule, labels):
    source = tar(tmp_path / "a.tar", label_rule=rule)

    entries = list(source.entries())

    assert [entry.labels for entry in entries] == [(label,) for label in labels]
    assert [entry.problem.partition(":")[0] for entry in entries] == [
        "" if label else "no_label" for label in labels
    ]


def test_without_labels_nothing_is_a_problem(tmp_path):
    source = tar(tmp_path / "a.tar", label_rule="none")

    assert {labels for labels, _ in contents(source).values()} == {((),)}
    assert source.columns() == [Column("label", multi=True, names=())]


@pytest.mark.parametrize("rule", ["[", "no group"])
def test_a_label_rule_that_finds_nothing_is_refused(rule):
    with pytest.raises(UserError, match="--label-rule"):
        build_source("tar:x.tar", SourceOptions(label_rule=rule))


def test_names_start_with_the_archive_where_there_are_several(tmp_path):
    write_tar(tmp_path / "1" / "a.tar", [("c/x", b"1")])
    write_tar(tmp_path / "2" / "a.tar", [("c/x", b"2")])

    found = contents(TarMembers(str(tmp_path), SourceOptions()))

    assert found == {"1/a.tar/c/x": (("c",), b"1"), "2/a.tar/c/x": (("c",), b"2")}


def test_members_of_the_same_name_are_all_listed(tmp_path):
    members = [("c/x", b"1"), ("c/x", b"2"), ("../c/x", b"3")]
    wanted = {"c/x": (("c",), b"1"), "c/x#2": (("c",), b"2"), "c/x#3": (("c",), b"3")}

    with pytest.warns(UserWarning, match="Duplicate name"):
        path = write_zip(tmp_path / "a.zip", members)

    assert contents(ZipMembers(str(path), SourceOptions())) == wanted
    assert contents(tar(tmp_path / "a.tar", members)) == wanted


def test_links_in_a_tar_are_resolved_or_have_a_problem(tmp_path):
    members = [
        ("c/a", b"1"),
        header("d/b", tarfile.LNKTYPE, "c/a"),
        header("d/c", tarfile.SYMTYPE, "../c/a"),
    ]

    assert contents(tar(tmp_path / "a.tar", members)) == {
        "c/a": (("c",), b"1"),
        "d/b": (("d",), b"1"),
        "d/c": (("d",), "unsupported: symbolic link"),
    }


def test_members_are_read_by_threads_of_a_copy_of_the_source(tmp_path):
    members = [(f"c/{n:03}", b"%d" % n * 1000) for n in range(300)]
    sources = [
        tar(tmp_path / "a.tar", members),
        TarMembers(str(write_tar(tmp_path / "a.tgz", members, "w:gz")), SourceOptions()),
        ZipMembers(str(write_zip(tmp_path / "a.zip", members)), SourceOptions()),
    ]

    for source in sources:
        copy = pickle.loads(pickle.dumps(source))
        with ThreadPoolExecutor(8) as pool:
            entries = list(source.entries())
            found = list(pool.map(lambda entry, copy=copy: read(copy, entry), entries))
        assert found == [content for _, content in members]


@pytest.mark.s3
def test_archives_in_a_store_are_read_in_place(s3_uri, tmp_path):
    storage = open_storage(s3_uri)
    storage.put_file("a.tar", write_tar(tmp_path / "a.tar", MEMBERS))
    storage.put_file("a.tgz", write_tar(tmp_path / "a.tgz", MEMBERS, "w:gz"))
    storage.put_file("a.zip", write_zip(tmp_path / "a.zip", MEMBERS))

    for kind, name in [("tar", "a.tar"), ("tar", "a.tgz"), ("zip", "a.zip")]:
        assert contents(build_source(f"{kind}:{s3_uri}/{name}", SourceOptions())) == PARENT


def test_a_zip_with_odd_members_gives_their_problems(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        link = zipfile.ZipInfo("c/link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, b"target")
        archive.writestr("c/lzma", b"x" * 100, zipfile.ZIP_LZMA)
        archive.writestr("c/secret", b"1")
        archive.writestr("c/good", b"2")
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\1\2", data.rindex(b"c/lzma") + 6)
    data[at + 8] |= 1  # the flag of an encrypted member
    path.write_bytes(data)

    assert contents(ZipMembers(str(path), SourceOptions())) == {
        "c/link": (("c",), "unsupported: symbolic link"),
        "c/lzma": (("c",), "unsupported: zip compression method 14"),
        "c/secret": (("c",), "unsupported: encrypted"),
        "c/good": (("c",), b"2"),
    }


def with_directory_field(path, offset, kind, value):
    """Change a field of the first member in a zip's directory."""
    data = bytearray(path.read_bytes())
    struct.pack_into(kind, data, data.index(b"PK\1\2") + offset, value)
    path.write_bytes(data)


def test_a_zip_member_that_unpacks_to_more_than_it_says_is_not_unpacked(tmp_path):
    path = write_zip(tmp_path / "a.zip", [("c/bomb", bytes(50 << 20))])
    with_directory_field(path, 24, "<I", 1000)
    source = ZipMembers(str(path), SourceOptions())

    with pytest.raises(BadInputError, match="corrupt: zip member of 1001 or more bytes"):
        source.read(next(source.entries()))


def test_a_zip_member_that_says_it_is_huge_has_a_problem(tmp_path):
    path = write_zip(tmp_path / "a.zip", [("c/huge", b"1")])
    with_directory_field(path, 24, "<I", 3 << 30)

    (entry,) = ZipMembers(str(path), SourceOptions()).entries()

    assert entry.problem == f"too_large: {3 << 30} bytes, at most {1 << 30} are read"


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_zip_member_is_corrupt(tmp_path, method):
    path = write_zip(tmp_path / "a.zip", [("c/x", bytes(range(256)) * 9), ("c/y", b"2")], method)
    data = bytearray(path.read_bytes())
    data[60] ^= 0x10
    path.write_bytes(data)
    source = ZipMembers(str(path), SourceOptions())
    first, second = source.entries()

    with pytest.raises(BadInputError, match="corrupt: zip member"):
        source.read(first)
    assert read(source, second) == b"2"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-30], "no zip, or a damaged one"),
        (lambda data: b"", "no zip"),
        (lambda data: data.replace(b"PK\3\4", b"PK\3\5", 1), "offset 0: member 'c/x'"),
    ],
)
def test_a_damaged_zip_is_named(tmp_path, damage, message):
    path = write_zip(tmp_path / "a.zip", [("c/x", b"1")])
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(DataError, match=rf"a\.zip.*{message}"):
        contents(ZipMembers(str(path), SourceOptions()))


def test_a_zip_with_long_extra_fields_is_read(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo("c/x")
        info.extra = struct.pack("<HH", 0xCAFE, 3000) + bytes(3000)
        archive.writestr(info, b"content")

    assert contents(ZipMembers(str(path), SourceOptions())) == {"c/x": (("c",), b"content")}


def test_archives_that_change_after_listing_are_refused(tmp_path):
    zipped = write_zip(tmp_path / "a.zip", [("c/x", b"1")])
    source = ZipMembers(str(zipped), SourceOptions())
    (entry,) = source.entries()
    write_zip(zipped, [("c/x", b"1"), ("c/y", b"2")])

    with pytest.raises(DataError, match="it had 107 when it was listed"):
        source.read(entry)
    zipped.unlink()
    with pytest.raises(DataError, match="no such file"):
        source.read(entry)
