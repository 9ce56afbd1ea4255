import hashlib
import io
import tarfile

import pytest

from vitscale.data.tar_shard import TarShardWriter, sample_bytes

IMAGES = [b"", b"x", b"y" * 512, b"z" * 70_000]


def write(images=IMAGES) -> tuple[bytes, list[int], tuple[int, str]]:
    file = io.BytesIO()
    writer = TarShardWriter(file)
    offsets = [
        writer.add(f"{number:09d}", number * 1000, image, "jpg")
        for number, image in enumerate(images)
    ]
    closed = writer.close()
    return file.getvalue(), offsets, closed


def test_tar_shard_offsets_point_to_the_images():
    data, offsets, _ = write()

    for image, offset in zip(IMAGES, offsets, strict=True):
        assert data[offset : offset + len(image)] == image


def test_tar_shard_members_have_no_clock_and_no_owner():
    data, _, _ = write()

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


def test_tar_shard_is_plain_ustar_as_tarfile_writes_it():
    data, _, _ = write()

    reference = io.BytesIO()
    with tarfile.open(fileobj=reference, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, image in enumerate(IMAGES):
            for ending, content in (("cls", str(number * 1000).encode()), ("jpg", image)):
                info = tarfile.TarInfo(f"{number:09d}.{ending}")
                info.size, info.mode = len(content), 0o644
                tar.addfile(info, io.BytesIO(content))
    assert data == reference.getvalue()


def test_tar_shard_bytes_are_pinned():
    # Format version 1: a change here breaks P1 against datasets that were begun earlier.
    data, _, (num_bytes, sha256) = write()

    assert num_bytes == len(data)
    assert sha256 == hashlib.sha256(data).hexdigest() == PINNED_SHA256


PINNED_SHA256 = "fb41fcc48f8034a0c7e818bf2109bdc1a9a5cf2c92b690441fa2962c9bc3f88a"


def test_tar_shard_without_samples_is_an_empty_archive():
    data, _, _ = write([])

    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getmembers() == []


def test_tar_shard_refuses_keys_that_readers_would_cut():
    with pytest.raises(AssertionError):
        TarShardWriter(io.BytesIO()).add("a.b", 0, b"", "jpg")


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513])
def test_sample_bytes_is_what_a_sample_takes(size):
    file = io.BytesIO()
    TarShardWriter(file).add("000000000", 5, b"x" * size, "jpg")

    assert file.tell() == sample_bytes(size)
