"""One shard as a tar of samples, with bytes that depend on the samples alone.

    KEY.cls    the label, decimal ASCII, where the first label column gives one class a sample
    KEY.jpg    (or .png, .webp) the image, as it is stored
    KEY.json   {"label": 3, "real": [1, 2]}, where there are several columns or lists of classes

The members of a sample are sorted by name. Headers are plain USTAR with the clock, the user and
the machine left out: owner 0, mode 644, time 0. They are the bytes that Python's tarfile makes of
the same values (a test compares); making them here and writing a sample with one call doubles the
speed, and offsets are known by construction.
"""

import json
from collections.abc import Sequence
from typing import BinaryIO

from vitscale.data.label_columns import LabelColumn
from vitscale.data.shard_file import HashingFile, ShardFile

BLOCK_BYTES = 512
# An archive ends with two empty blocks and is filled up to whole records.
RECORD_BYTES = 20 * BLOCK_BYTES
MAX_MEMBER_BYTES = 8 << 30
_NAME_BYTES = 100
_ZEROS = bytes(RECORD_BYTES)


class TarShardWriter:
    """Writes samples to a tar.

    Args:
        file: An open, empty binary file; stays open.
        columns: Kinds of label of every sample.
    """

    def __init__(self, file: BinaryIO, columns: Sequence[LabelColumn]) -> None:
        self._out = HashingFile(file)
        self._columns = columns
        self._has_cls = not columns[0].multi
        self._has_json = len(columns) > 1 or columns[0].multi
        self._offsets: list[int] = []

    def add(
        self, key: str, labels: Sequence[tuple[int, ...]], image: bytes, image_format: str
    ) -> None:
        """Append one sample.

        Args:
            key: Unique in the dataset; without dots, for readers cut a member's name at the first
                one.
            labels: Classes in every column.
            image: Encoded image.
            image_format: "jpg", "png" or "webp": the member's extension.
        """
        assert "." not in key, key
        members = {image_format: image}
        if self._has_cls:
            members["cls"] = str(self._columns[0].value(labels[0])).encode()
        if self._has_json:
            pairs = zip(self._columns, labels, strict=True)
            values = {column.name: column.value(value) for column, value in pairs}
            members["json"] = json.dumps(values, sort_keys=True).encode()
        parts: list[bytes] = []
        start = end = self._out.num_bytes
        for extension in sorted(members):
            content = members[extension]
            end += BLOCK_BYTES
            if extension == image_format:
                self._offsets.append(end)
            filled = padded(len(content))
            end += filled
            parts += [
                _header(f"{key}.{extension}".encode(), len(content)),
                content,
                _ZEROS[: filled - len(content)],
            ]
        self._out.write_parts(parts, end - start)

    def close(self) -> ShardFile:
        """Write the end of the archive."""
        end = self._out.num_bytes + 2 * BLOCK_BYTES
        self._out.write(_ZEROS[: 2 * BLOCK_BYTES])
        self._out.write(_ZEROS[: -end % RECORD_BYTES])
        return ShardFile(self._out.num_bytes, self._out.sha256_hex(), self._offsets)

    def abandon(self) -> None:
        """Let go of what writing needs; the file is not finished."""
        self._out.close()


def padded(num_bytes: int) -> int:
    """Give the space that a member's content takes: whole blocks."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def sample_bytes(image_bytes: int) -> int:
    """Give the space of a sample with one label in the tar: two headers, a block, the image."""
    return 3 * BLOCK_BYTES + padded(image_bytes)


# Behind the name: mode, owner, group; size and time follow, then checksum, type, magic and version;
# names of owner and group, device numbers and the name's prefix stay empty.
_OWNER = b"0000644\0" + b"0000000\0" + b"0000000\0"
_TIME = b"00000000000\0"
_REST = b"0" + bytes(100) + b"ustar\00000" + bytes(64 + 16 + 155 + 12)
_CONSTANT_SUM = sum(_OWNER) + sum(_TIME) + sum(_REST) + 8 * ord(" ")


def _header(name: bytes, num_bytes: int) -> bytes:
    assert len(name) < _NAME_BYTES, name  # longer names would not be plain USTAR
    assert num_bytes < MAX_MEMBER_BYTES, num_bytes
    size = b"%011o\0" % num_bytes
    checksum = _CONSTANT_SUM + sum(name) + sum(size)
    return b"".join(
        [name.ljust(_NAME_BYTES, b"\0"), _OWNER, size, _TIME, b"%06o\0 " % checksum, _REST]
    )
