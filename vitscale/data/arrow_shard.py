"""One shard as an Arrow IPC file, with bytes that depend on the samples alone.

    key: string, image: struct<bytes: binary, path: string>, one field for each label column

Stock pyarrow opens it as a file; Hugging Face `datasets` sees images and class names, which are
described in the schema. Batches are cut by bytes, so that a sample's place is found without reading
much, and the image bytes lie in the file as they are: a reader with the index needs no Arrow.
"""

import json
from collections.abc import Sequence
from typing import Any, BinaryIO

import pyarrow as pa

from vitscale.data.label_columns import LabelColumn
from vitscale.data.shard_file import HashingFile, ShardFile

BATCH_BYTES = 16 << 20
BATCH_ROWS = 4096
# Version of the key "huggingface" that `datasets` writes; it takes features from there.
_IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


class ArrowShardWriter:
    """Writes samples to an Arrow IPC file.

    Args:
        file: An open, empty binary file with a name; stays open.
        columns: Kinds of label of every sample.
    """

    def __init__(self, file: BinaryIO, columns: Sequence[LabelColumn]) -> None:
        self._path = file.name
        self._out = HashingFile(file)
        self._columns = columns
        self._schema = arrow_schema(columns)
        self._writer = pa.ipc.new_file(pa.PythonFile(self._out, "w"), self._schema)
        self._clear()

    def _clear(self) -> None:
        self._keys: list[str] = []
        self._images: list[bytes] = []
        self._paths: list[str] = []
        self._labels: list[Sequence[tuple[int, ...]]] = []
        self._num_bytes = 0

    def add(
        self, key: str, labels: Sequence[tuple[int, ...]], image: bytes, image_format: str
    ) -> None:
        """Append one sample.

        Args:
            key: Unique in the dataset.
            labels: Classes in every column.
            image: Encoded image.
            image_format: "jpg", "png" or "webp".
        """
        if self._images and (
            self._num_bytes + len(image) > BATCH_BYTES or len(self._images) == BATCH_ROWS
        ):
            self._write_batch()
        self._keys.append(key)
        self._images.append(image)
        self._paths.append(f"{key}.{image_format}")
        self._labels.append(labels)
        self._num_bytes += len(image)

    def close(self) -> ShardFile:
        """Write what is left and the footer."""
        if self._images:
            self._write_batch()
        self._writer.close()
        sha256 = self._out.sha256_hex()
        return ShardFile(self._out.num_bytes, sha256, image_offsets(self._path))

    def abandon(self) -> None:
        """Let go of what writing needs; the file is not finished."""
        self._out.close()

    def _write_batch(self) -> None:
        images = pa.StructArray.from_arrays(
            [pa.array(self._images, pa.binary()), pa.array(self._paths, pa.string())],
            fields=list(_IMAGE_TYPE),
        )
        arrays: list[pa.Array] = [pa.array(self._keys, pa.string()), images]
        for number, column in enumerate(self._columns):
            values = [column.value(labels[number]) for labels in self._labels]
            arrays.append(pa.array(values, column.field.type))
        self._writer.write_batch(pa.record_batch(arrays, schema=self._schema))
        self._clear()


def arrow_schema(columns: Sequence[LabelColumn]) -> pa.Schema:
    """Give the schema of a shard, with the description that Hugging Face `datasets` reads."""
    features: dict[str, Any] = {
        "key": {"dtype": "string", "_type": "Value"},
        "image": {"_type": "Image"},
    }
    for column in columns:
        feature = {"names": list(column.names), "_type": "ClassLabel"}
        features[column.name] = {"feature": feature, "_type": "List"} if column.multi else feature
    metadata = {"huggingface": json.dumps({"info": {"features": features}}, sort_keys=True)}
    fields = [pa.field("key", pa.string()), pa.field("image", _IMAGE_TYPE)]
    return pa.schema([*fields, *(column.field for column in columns)], metadata)


def image_offsets(path: str) -> list[int]:
    """Say where in an Arrow shard the image bytes of each sample start."""
    offsets: list[int] = []
    with pa.memory_map(path) as file:
        start = file.read_buffer(file.size()).address
        file.seek(0)
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            images = reader.get_batch(number).column("image").field("bytes")
            _, ends, values = images.buffers()
            base = values.address - start
            starts = memoryview(ends).cast("i")[images.offset : images.offset + len(images)]
            offsets += [base + begin for begin in starts]
    return offsets
