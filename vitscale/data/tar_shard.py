"""One shard as a tar of samples, with bytes that depend on the samples alone.

    KEY.cls    the label, decimal ASCII
    KEY.jpg    (or .png, .webp) the image, as it is stored

The writing is webdataset's TarWriter, so that what stock webdataset reads is what stock webdataset
wrote. Two settings make its bytes fixed: mtime 0 keeps out the clock, and with it the extended
header that a fractional time needs; empty user and group names keep out the machine. The result is
plain USTAR. Offsets follow from the 512-byte blocks and are compared with the position of the file
after every sample.
"""

import hashlib
import tarfile
from typing import Any, BinaryIO

BLOCK_BYTES = 512
FILE_MODE = 0o644
COPY_BYTES = 1 << 20  # an image is handed over in one piece: one write, one hash update


class HashingFile:
    """A binary file for writing that knows the sha256 and the number of the bytes written to it.

    Args:
        file: Where the bytes go.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: bytes) -> int:
        """Write bytes."""
        self._file.write(data)
        self._sha256.update(data)
        self.num_bytes += len(data)
        return len(data)

    def tell(self) -> int:
        """Give the number of bytes written so far."""
        return self.num_bytes

    def sha256_hex(self) -> str:
        """Give the sha256 of all bytes written so far."""
        return self._sha256.hexdigest()


class TarShardWriter:
    """Writes samples to a tar.

    Args:
        file: An open, empty binary file; stays open.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._out = HashingFile(file)
        self._tar = _tar_writer(self._out)

    def add(self, key: str, label: int, image: bytes, image_format: str) -> int:
        """Append one sample.

        Args:
            key: Unique in the dataset; without dots, for readers cut a member's name at the first
                one.
            label: Index of the class.
            image: Encoded image.
            image_format: "jpg", "png" or "webp": the member's extension.

        Returns:
            Offset of the image bytes in the tar.
        """
        assert "." not in key, key
        assert len(key) < 90, key  # longer names would not be plain USTAR
        label_bytes = str(label).encode()
        offset = self._out.num_bytes + 2 * BLOCK_BYTES + padded(len(label_bytes))
        # Members are written in the order of their extensions: cls comes before every image format.
        self._tar.write({"__key__": key, "cls": label_bytes, image_format: image})
        assert self._out.num_bytes == offset + padded(len(image)), (self._out.num_bytes, offset)
        return offset

    def close(self) -> tuple[int, str]:
        """Write the end of the archive; give the size in bytes and the sha256 of the whole."""
        self._tar.close()
        return self._out.num_bytes, self._out.sha256_hex()


def padded(num_bytes: int) -> int:
    """Give the space that a member's content takes: whole blocks."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def sample_bytes(image_bytes: int) -> int:
    """Give the space of one sample in the tar: two headers, a one-block label, the image."""
    return 3 * BLOCK_BYTES + padded(image_bytes)


def _tar_writer(out: HashingFile) -> Any:
    # Inside the function: importing webdataset imports torch where that is installed (two seconds).
    from webdataset.writer import TarWriter

    class PlainTarWriter(TarWriter):
        # Its own mode "w|" copies everything through 10 KiB blocks; "w" writes the same bytes
        # straight through.
        @staticmethod
        def tarmode(fileobj: object, compress: object = None) -> str:
            return "w"

    writer = PlainTarWriter(out, user="", group="", mode=FILE_MODE, mtime=0, encoder=False)
    # TarWriter means USTAR but does not say so to tarfile; the bytes are the same, made faster.
    writer.tarstream.format = tarfile.USTAR_FORMAT
    writer.tarstream.copybufsize = COPY_BYTES
    return writer
