"""Archives of arrays: numpy's read here, ours read by numpy, and hostile ones."""

import hashlib
import io
import zipfile

import numpy as np
import pytest
import torch

from vitscale.config.errors import UserError
from vitscale.models.npz import read_npz, write_npz


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_reads_what_numpy_writes(tmp_path, save):
    arrays = {
        "a/b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big_endian": np.arange(3, dtype=">f4"),
        "scalar": np.float16(1.5),
    }
    save(tmp_path / "w.npz", **arrays)

    read = read_npz(tmp_path / "w.npz")

    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        assert np.array_equal(read[name].numpy(), array), name


def test_two_nameless_bytes_are_bfloat16(tmp_path):
    values = torch.tensor([[1.0, -2.5], [3e38, 0.0]]).bfloat16()
    np.savez(tmp_path / "w.npz", a=values.view(torch.int16).numpy().view("V2"))

    assert torch.equal(read_npz(tmp_path / "w.npz")["a"], values)


def test_numpy_reads_what_is_written_and_bytes_are_reproducible(tmp_path):
    arrays = {"x/y": torch.randn(3, 4).T, "z": torch.ones(2).bfloat16()}

    write_npz(tmp_path / "a.npz", arrays)
    write_npz(tmp_path / "b.npz", dict(reversed(arrays.items())))

    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        assert np.array_equal(file["x/y"], arrays["x/y"].numpy())
        assert file["z"].dtype == np.float32
    digests = {hashlib.sha256((tmp_path / name).read_bytes()).digest() for name in
               ("a.npz", "b.npz")}  # fmt: skip
    assert len(digests) == 1


def archive(path, member, name="a.npy", compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr(name, member)


def header(text):
    data = io.BytesIO()
    np.lib.format.write_array_header_1_0(data, text)
    return data.getvalue()


def test_objects_are_refused(tmp_path):
    np.savez(tmp_path / "w.npz", evil=np.array([{"a": 1}], dtype=object))

    with pytest.raises(UserError, match=r"evil\.npy holds Python objects"):
        read_npz(tmp_path / "w.npz")


def test_a_header_that_claims_more_than_there_is_allocates_nothing(tmp_path):
    claim = header({"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)})
    archive(tmp_path / "w.npz", claim + bytes(16))

    with pytest.raises(UserError, match="claims 4,398,046,511,104 bytes"):
        read_npz(tmp_path / "w.npz")


def test_an_archive_that_unpacks_to_too_much_is_refused_unread(tmp_path):
    archive(tmp_path / "w.npz", bytes(1 << 20), compression=zipfile.ZIP_DEFLATED)

    with pytest.raises(UserError, match="unpacks to 1,048,576 bytes, more than the 1,000"):
        read_npz(tmp_path / "w.npz", max_bytes=1000)


def test_text_and_damage_are_refused(tmp_path):
    np.savez(tmp_path / "text.npz", a=np.array(["x"]))
    with pytest.raises(UserError, match="not numbers"):
        read_npz(tmp_path / "text.npz")
    archive(tmp_path / "junk.npz", b"no header at all")
    with pytest.raises(UserError, match="no sound header"):
        read_npz(tmp_path / "junk.npz")
    np.savez(tmp_path / "cut.npz", a=np.zeros(1000, np.float32))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:-100])
    with pytest.raises(UserError, match=r"not a whole \.npz"):
        read_npz(tmp_path / "cut.npz")
    np.savez(tmp_path / "flipped.npz", a=np.zeros(1000, np.float32))
    data = bytearray((tmp_path / "flipped.npz").read_bytes())
    data[1000] ^= 1
    (tmp_path / "flipped.npz").write_bytes(data)
    with pytest.raises(UserError, match=r"not a whole \.npz"):
        read_npz(tmp_path / "flipped.npz")
