import hashlib
import io
import json
import tarfile

import pytest

from vitscale.data.label_columns import LabelColumn
from vitscale.data.shard_file import ShardFile
from vitscale.data.tar_shard import TarShardWriter, sample_bytes

IMAGES = [b"", b"x", b"y" * 512, b"z" * 70_000]


COLUMNS = [LabelColumn("label", False, ("a",) * 4000)]


def write(path, images=IMAGES, columns=COLUMNS, labels=None) -> tuple[bytes, ShardFile]:
    with open(path / "shard", "wb") as file:
        writer = TarShardWriter(file, columns)
        for number, image in enumerate(images):
            own = labels[number] if labels else [(number * 1000,)]
            writer.add(f"{number:09d}", own, image, "jpg")
        closed = writer.close()
    return (path / "shard").read_bytes(), closed


def test_tar_shard_offsets_point_to_the_images(tmp_path):
    data, shard = write(tmp_path)

    for image, offset in zip(IMAGES, shard.offsets, strict=True):
        assert data[offset : offset + len(image)] == image


def test_tar_shard_members_have_no_clock_and_no_owner(tmp_path):
    data, _ = write(tmp_path)

    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = tar.getmembers()
        labels = [tar.extractfile(member).read() for member in members[::2]]
    assert [member.name for member in members[:4]] == [
        "000000000.cls",
        "000000000.jpg",
        "000000001.cls",
        "000000001.jpg",
    ]
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in members} == {
        (0, 0, 0, "", "", 0o644)
    }
    assert all(not member.pax_headers for member in members)
    assert labels == [b"0", b"1000", b"2000", b"3000"]


def test_tar_shard_is_plain_ustar_as_tarfile_writes_it(tmp_path):
    data, _ = write(tmp_path)

    reference = io.BytesIO()
    with tarfile.open(fileobj=reference, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, image in enumerate(IMAGES):
            for ending, content in (("cls", str(number * 1000).encode()), ("jpg", image)):
                info = tarfile.TarInfo(f"{number:09d}.{ending}")
                info.size, info.mode = len(content), 0o644
                tar.addfile(info, io.BytesIO(content))
    assert data == reference.getvalue()


def test_tar_shard_bytes_are_pinned(tmp_path):
    # A change here breaks P1 against datasets that were begun earlier.
    data, (num_bytes, sha256, _) = write(tmp_path)

    assert num_bytes == len(data)
    assert sha256 == hashlib.sha256(data).hexdigest() == PINNED_SHA256


PINNED_SHA256 = "fb41fcc48f8034a0c7e818bf2109bdc1a9a5cf2c92b690441fa2962c9bc3f88a"


def test_tar_shard_without_samples_is_an_empty_archive(tmp_path):
    data, _ = write(tmp_path, [])

    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getmembers() == []


def test_tar_shard_several_columns_go_to_json(tmp_path):
    columns = [LabelColumn("label", False, ("a", "b")), LabelColumn("real", True, ("a", "b"))]

    data, _ = write(tmp_path, [b"x", b"y"], columns, [[(1,), (0, 1)], [(0,), ()]])

    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        content = {member.name: tar.extractfile(member).read() for member in tar}
    assert list(content) == sorted(content)
    assert content["000000000.cls"] == b"1"
    assert json.loads(content["000000000.json"]) == {"label": 1, "real": [0, 1]}
    assert json.loads(content["000000001.json"]) == {"label": 0, "real": []}


def test_tar_shard_multi_label_has_no_cls(tmp_path):
    data, _ = write(tmp_path, [b"x"], [LabelColumn("tags", True, ("a", "b"))], [[(1,)]])

    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == ["000000000.jpg", "000000000.json"]


def test_tar_shard_refuses_keys_that_readers_would_cut(tmp_path):
    with open(tmp_path / "x", "wb") as file, pytest.raises(AssertionError):
        TarShardWriter(file, COLUMNS).add("a.b", [(0,)], b"", "jpg")


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513])
def test_sample_bytes_is_what_a_sample_takes(tmp_path, size):
    with open(tmp_path / "x", "wb") as file:
        writer = TarShardWriter(file, COLUMNS)
        writer.add("000000000", [(5,)], b"x" * size, "jpg")
        writer.abandon()

    assert (tmp_path / "x").stat().st_size == sample_bytes(size)
