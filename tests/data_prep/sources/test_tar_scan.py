import io
import os
import pickle
import random
import tarfile

import pytest

from data_prep.sources.build import Entry
from data_prep.sources.files import FoundFile, RandomFile
from data_prep.sources.tar_files import TarFiles, UniqueNames, member_entry, with_links
from data_prep.sources.tar_scan import BLOCK_BYTES, scan_file
from tests.helpers.tars import header, write_tar
from vitscale.config.errors import DataError, UserError

LONG = "f" * 120 + "/" + "k" * 130 + "\u732b.jpg"
MEMBERS = [
    ("a.jpg", b"first"),
    ("./b/c.jpg", bytes(700)),
    ("b/empty.jpg", b""),
    (LONG, b"long" * 300),
    ("caf\u00e9.jpg", b"last"),
]


def scanned(path):
    """Name -> content, read from the offsets of the scan."""
    file = RandomFile(str(path))
    return {m.name: file.read(m.offset, m.num_bytes) for m in scan_file(file)}


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_where_the_scan_says(tmp_path, kind):
    path = write_tar(tmp_path / "a.tar", MEMBERS, kind=kind)

    assert scanned(path) == {name.removeprefix("./"): content for name, content in MEMBERS}


def test_members_agree_with_tarfile_whatever_their_sizes(tmp_path):
    draw = random.Random(5)
    members = [(f"{n}.bin", draw.randbytes(draw.choice([0, 1, 511, 512, 513, 40_000])))
               for n in range(200)]  # fmt: skip
    members += [("d" * 90 + f"/{n:064}", b"behind a prefix") for n in range(3)]
    path = write_tar(tmp_path / "a.tar", members, kind=tarfile.USTAR_FORMAT)

    with tarfile.open(path) as archive:
        assert [(info.name, info.offset_data, info.size) for info in archive] == [
            (member.name, member.offset, member.num_bytes)
            for member in scan_file(RandomFile(str(path)))
        ]
    assert list(scanned(path).items()) == members


def test_names_that_are_not_utf8_stay_as_they_are(tmp_path):
    path = write_tar(tmp_path / "a.tar", [(os.fsdecode(b"\xff.jpg"), b"1")])

    assert [os.fsencode(name) for name in scanned(path)] == [b"\xff.jpg"]


def test_pax_attributes_of_all_members_are_told_from_those_of_one(tmp_path):
    with tarfile.open(
        tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "x"}
    ) as archive:
        for name, extra in [("a", {"path": "other"}), ("b", {})]:
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = 2, extra
            archive.addfile(info, io.BytesIO(b"12"))

    assert scanned(tmp_path / "a.tar") == {"other": b"12", "b": b"12"}


def test_folders_and_litter_are_no_members(tmp_path):
    names = ["._a.jpg", ".hidden/a.jpg", "__MACOSX/a.jpg", "b/Thumbs.db"]
    members = [header("b", tarfile.DIRTYPE), *((name, b"1") for name in names), ("b/a.jpg", b"2")]
    path = write_tar(tmp_path / "a.tar", members)

    assert scanned(path) == {"b/a.jpg": b"2"}


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (tarfile.SYMTYPE, "unsupported: symbolic link"),
        (tarfile.FIFOTYPE, "unreadable: not a regular file"),
        (b"M", "unsupported: tar member of type 'M'"),
        (tarfile.GNUTYPE_SPARSE, "unsupported: sparse file in a tar"),
    ],
)
def test_what_is_no_regular_file_has_a_problem(tmp_path, kind, problem):
    members = [header("x.jpg", kind, "a.jpg"), ("a.jpg", b"1")]
    path = write_tar(tmp_path / "a.tar", members)

    found = [(member.name, member.problem) for member in scan_file(RandomFile(str(path)))]

    assert found == [("x.jpg", problem), ("a.jpg", "")]


def test_hard_links_have_the_content_of_what_they_link_to(tmp_path):
    members = [
        ("a.jpg", b"old"),
        header("b.jpg", tarfile.LNKTYPE, "./a.jpg"),
        header("c.jpg", tarfile.LNKTYPE, "b.jpg"),
        header("d.jpg", tarfile.LNKTYPE, "z.jpg"),
        ("a.jpg", b"newer"),
        ("z.jpg", b"late"),
    ]
    file = RandomFile(str(write_tar(tmp_path / "a.tar", members)))

    found = [
        (member.name, member.problem or file.read(member.offset, member.num_bytes))
        for member in with_links(lambda: scan_file(file))
    ]

    assert found == [
        ("a.jpg", b"old"),
        ("a.jpg", b"newer"),
        ("z.jpg", b"late"),
        ("b.jpg", b"old"),
        ("c.jpg", b"old"),
        ("d.jpg", "missing_file: hard link to 'z.jpg', not seen before it"),
    ]


def whole_tar(path) -> bytes:
    """Three members of 600 bytes, each with its header 1,536 bytes, and 7,168 bytes of end."""
    write_tar(path, [(f"{number}.jpg", bytes([number + 65]) * 600) for number in range(3)])
    return path.read_bytes()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tar: tar[:2000], r"offset 1536: the file ends.*the 1 members before it are whole"),
        (lambda tar: tar[:3200], r"offset 3072: the file ends inside a header"),
        (lambda tar: tar[:3700], r"offset 3584: the file ends inside member '2\.jpg' of 600"),
        (lambda tar: tar[:1537] + b"X" + tar[1538:], r"offset 1536: damaged header \(bad"),
        (lambda tar: tar[:1536] + bytes(512) + tar[2048:], r"offset 2048: damaged header"),
        (lambda tar: tar + b"trailing".ljust(512), r"offset 10240: damaged header"),
        (lambda tar: tar[:1664] + b"9" + tar[1665:], r"offset 1536: damaged header"),
        (lambda tar: b"<html>".ljust(10240), r"offset 0: no tar, or a damaged header"),
        (lambda tar: b"", r"the file is empty"),
    ],
)
def test_damage_is_named_with_its_place(tmp_path, damage, message):
    path = tmp_path / "damaged.tar"
    path.write_bytes(damage(whole_tar(path)))

    with pytest.raises(DataError, match=r"damaged\.tar.*" + message):
        scanned(path)


@pytest.mark.parametrize(
    "records", [b"30 path=too short\n", b"x path=a\n", b"9 path=ab", b"9 pathxab\n"]
)
def test_damaged_pax_attributes_are_named(tmp_path, records):
    info = tarfile.TarInfo("PaxHeaders/a")
    info.type, info.size = tarfile.XHDTYPE, len(records)
    data = info.tobuf(tarfile.USTAR_FORMAT) + records.ljust(BLOCK_BYTES, b"\0")
    path = write_tar(tmp_path / "a.tar", [("a", b"1")])
    path.write_bytes(data + path.read_bytes())

    with pytest.raises(DataError, match=r"a\.tar.*damaged PAX"):
        scanned(path)


def test_a_tar_without_an_end_is_read_with_a_warning(tmp_path, capsys):
    path = tmp_path / "a.tar"
    data = whole_tar(path)
    # the content of the last one is whole, its filling is not
    path.write_bytes(data[: 3 * 1536 - 300])

    assert list(scanned(path)) == ["0.jpg", "1.jpg", "2.jpg"]
    assert "a.tar': offset 4608: the tar has no end mark; its 3 members" in capsys.readouterr().err


def test_tars_one_behind_the_other_are_read_with_a_warning(tmp_path, capsys):
    first = write_tar(tmp_path / "a.tar", [("a.jpg", b"1")])
    second = write_tar(tmp_path / "b.tar", [("b.jpg", b"2")])
    first.write_bytes(first.read_bytes() + second.read_bytes())

    assert scanned(first) == {"a.jpg": b"1", "b.jpg": b"2"}
    assert "offset 10240: more members follow" in capsys.readouterr().err


def test_an_empty_archive_has_no_members(tmp_path, capsys):
    assert scanned(write_tar(tmp_path / "a.tar", [])) == {}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("mode", ["gz", "bz2", "xz"])
def test_a_cut_compressed_tar_is_named(tmp_path, mode):
    members = [(f"{n}.jpg", random.Random(n).randbytes(30_000)) for n in range(5)]
    path = write_tar(tmp_path / f"a.tar.{mode}", members, f"w:{mode}")
    path.write_bytes(path.read_bytes()[:-40_000])

    with pytest.raises(DataError, match=rf"a\.tar\.{mode}.*cannot be unpacked"):
        list(scan_file(RandomFile(str(path))))


def test_zstd_is_refused_with_the_way_out(tmp_path):
    path = tmp_path / "a.tar.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))

    with pytest.raises(UserError, match="zstd -d"):
        list(scan_file(RandomFile(str(path))))


def entries_of(path) -> list[Entry]:
    file = RandomFile(str(path))
    found = FoundFile(file.uri, file.num_bytes)
    return [member_entry(found, member, member.name, (), "") for member in scan_file(file)]


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_members_of_a_compressed_tar_are_read_from_memory_or_a_file(tmp_path, memory_bytes):
    path = write_tar(tmp_path / "a.tgz", MEMBERS, "w:gz")
    tars = pickle.loads(pickle.dumps(TarFiles(memory_bytes)))

    found = [tars.read(entry) for entry in reversed(entries_of(path))]

    assert found == [content for _, content in reversed(MEMBERS)]


def test_a_tar_that_changed_is_refused_when_it_is_read(tmp_path):
    path = write_tar(tmp_path / "a.tar", MEMBERS)
    entry = entries_of(path)[0]

    longer = tmp_path / "longer"
    longer.write_bytes(path.read_bytes() + bytes(512))
    longer.rename(path)
    with pytest.raises(DataError, match=r"has \d+ bytes, it had \d+"):
        TarFiles().read(entry)

    write_tar(path, [("x.jpg", b"other"), *MEMBERS[1:]])
    with pytest.raises(DataError, match=r"header of member 'a\.jpg' is not the one"):
        TarFiles().read(entry)


def test_a_name_that_comes_again_gets_a_number():
    unique = UniqueNames()

    names = [unique.name(name) for name in ["a", "b", "a", "a", "a#2", "b"]]

    assert names == ["a", "b", "a#2", "a#3", "a#2#2", "b#2"]
