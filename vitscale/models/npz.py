"""Reading and writing .npz archives of weights: no pickle, no allocation of what was not judged.

An .npz is a zip archive of .npy members; each has a header that gives its type and shape.
"""

import math
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from vitscale.config.errors import UserError

# Four times the float32 weights of the largest published model, ViT-G/14 (arXiv:2106.04560).
MAX_BYTES = 32 << 30
# What zipfile raises on damaged archives: most of it is not declared.
ZIP_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, OSError,
    RuntimeError, ValueError, LookupError,
)  # fmt: skip
_MAX_HEADER_BYTES = 10_000
_SUFFIX = ".npy"


def read_npz(path: str | Path, max_bytes: int = MAX_BYTES) -> dict[str, Tensor]:
    """Read all arrays of an archive, on the CPU.

    Args:
        path: Its name may end in anything.
        max_bytes: Most that the arrays may take together.

    Returns:
        Tensors by name; bfloat16 where a two-byte type has no name, as numpy writes it.

    Raises:
        UserError: Not a whole archive, an array of objects, or more than max_bytes.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = [item for item in archive.infolist() if item.filename.endswith(_SUFFIX)]
            num_bytes = sum(item.file_size for item in members)
            if num_bytes > max_bytes:
                raise UserError(
                    f"{path} unpacks to {num_bytes:,} bytes, more than the {max_bytes:,} that "
                    "weights may have"
                )
            return {
                item.filename.removesuffix(_SUFFIX): _read_member(archive, item, path)
                for item in members
            }
    except UserError:
        raise
    except ZIP_DAMAGE as error:
        raise UserError(f"{path} is not a whole .npz archive: {error}") from error


def _read_member(archive: zipfile.ZipFile, item: zipfile.ZipInfo, path: str | Path) -> Tensor:
    with archive.open(item) as stream:
        try:
            shape, fortran, dtype = _read_header(stream)
        except ValueError as error:
            raise UserError(f"{path}: {item.filename} has no sound header: {error}") from error
        if dtype.hasobject:
            raise UserError(f"{path}: {item.filename} holds Python objects, which are not read")
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > item.file_size:
            raise UserError(
                f"{path}: {item.filename} claims {num_bytes:,} bytes of numbers and has "
                f"{item.file_size:,}"
            )
        data = bytearray(stream.read(num_bytes))
    if len(data) != num_bytes:
        raise UserError(f"{path}: {item.filename} ends after {len(data):,} of {num_bytes:,} bytes")
    array = np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")
    return _tensor(array, f"{path}: {item.filename}")


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = npy.read_magic(stream)
    if version == (1, 0):
        return npy.read_array_header_1_0(stream, max_header_size=_MAX_HEADER_BYTES)
    if version == (2, 0):
        return npy.read_array_header_2_0(stream, max_header_size=_MAX_HEADER_BYTES)
    raise ValueError(f"version {version[0]}.{version[1]} is not for plain numbers")


def _tensor(array: np.ndarray, where: str) -> Tensor:
    """Turn an array into a tensor; numpy has no bfloat16 and stores it as two nameless bytes."""
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
    if array.dtype.kind not in "fiub":
        raise UserError(f"{where} is of type {array.dtype}, not numbers")
    return torch.from_numpy(np.asarray(array, array.dtype.newbyteorder("="), order="C"))


def write_npz(path: str | Path, arrays: Mapping[str, Tensor]) -> None:
    """Write float32 arrays; the same numbers give the same bytes.

    The file appears whole or not at all.

    Args:
        path: Its folder must exist; a file of that name is replaced.
        arrays: Any floating dtype, any device.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
            for name in sorted(arrays):
                array = arrays[name].detach().to("cpu", torch.float32).contiguous().numpy()
                # ZipInfo without a date: the clock stays out of the bytes.
                info = zipfile.ZipInfo(name + _SUFFIX)
                with archive.open(info, "w", force_zip64=True) as member:
                    npy.write_array(member, array, allow_pickle=False)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
