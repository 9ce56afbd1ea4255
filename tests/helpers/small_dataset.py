"""Small datasets of real images, written shard by shard, and a remote store made of local files."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash
from PIL import Image

from vitscale.data.arrow_shard import ArrowShardWriter
from vitscale.data.label_columns import LABELS_NAME, LabelColumn, labels_json
from vitscale.data.manifest import (
    MANIFEST_NAME,
    MANIFEST_VERSION,
    SHARDS_NAME,
    SHARDS_SCHEMA,
    Manifest,
    index_name,
    index_schema,
    json_bytes,
    load_manifest,
    parquet_bytes,
    sha256_hex,
)
from vitscale.data.storage import FileStorage, Storage, open_storage
from vitscale.data.tar_shard import TarShardWriter


class RemoteFiles(FileStorage):
    """A folder that is treated as a remote store: nothing in it is opened in place."""

    def __init__(self, root: Path) -> None:
        super().__init__(f"remote:{root}", root)

    def local_path(self, name):
        return None


def picture(seed: int, width: int = 48, height: int = 40) -> Image.Image:
    """A smooth random picture, different for every seed."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    """The bytes of an image file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


COLUMNS = [LabelColumn("label", False, tuple("abcde"))]


def write_dataset(
    storage: Storage,
    shard_sizes: list[int],
    images: dict[int, bytes] | None = None,
    kind: str = "tar",
) -> Manifest:
    """Write a dataset of pictures with labels 0 .. 4.

    Args:
        storage: Where to, empty.
        shard_sizes: Samples of each shard; 0 is allowed.
        images: Files to store instead of pictures, by sample_index.
        kind: "tar" or "arrow".
    """
    rows, keys_sum, ordinal = [], 0, 0
    samples = []
    for shard_id, size in enumerate(shard_sizes):
        name = f"shard-{shard_id:06d}.{kind}"
        with storage.open_temp() as file:
            writer = {"tar": TarShardWriter, "arrow": ArrowShardWriter}[kind](file, COLUMNS)
            index = []
            for _ in range(size):
                key, label = f"{ordinal:09d}", ordinal % 5
                shape = 30 + ordinal % 23, 34 + ordinal % 11
                image = (images or {}).get(ordinal) or encoded(picture(ordinal, *shape))
                writer.add(key, [(label,)], image, "jpg")
                digest = xxhash.xxh3_64_intdigest(image)
                index.append([key, 0, len(image), *shape, "jpg", digest, label])
                samples.append([shard_id, key, digest, label])
                keys_sum += xxhash.xxh64_intdigest(key.encode())
                ordinal += 1
            num_bytes, sha256, offsets = writer.close()
            storage.put_file(name, file.name)
        for row, offset in zip(index, offsets, strict=True):
            row[1] = offset
        schema = index_schema(COLUMNS)
        columns = list(zip(*index, strict=True)) if index else [()] * len(schema)
        index_bytes = parquet_bytes(pa.table(list(map(list, columns)), schema=schema))
        storage.put(index_name(name), index_bytes)
        rows.append((shard_id, name, size, num_bytes, sha256, sha256_hex(index_bytes)))
    shards = parquet_bytes(pa.table(list(map(list, zip(*rows, strict=True))), schema=SHARDS_SCHEMA))
    labels = json_bytes(labels_json(COLUMNS))
    storage.put(SHARDS_NAME, shards)
    storage.put(LABELS_NAME, labels)
    manifest = {
        "version": MANIFEST_VERSION,
        "format": kind,
        "split": "train",
        "num_samples": ordinal,
        "num_bytes": sum(row[3] for row in rows),
        "num_shards": len(rows),
        "num_failed": 0,
        "num_excluded": 0,
        "columns": [column.summary() for column in COLUMNS],
        "labels_sha256": sha256_hex(labels),
        "shards_sha256": sha256_hex(shards),
        "plan_digest": "",
        "keys_sum64": keys_sum % 2**64,
        "samples_sha256": sha256_hex(json_bytes(samples)),
        "image": {"policy": "keep"},
        "ledger": [],
    }
    storage.create_once(MANIFEST_NAME, json_bytes(manifest))
    return load_manifest(storage)


def local_dataset(folder: Path, shard_sizes: list[int], **options) -> tuple[Storage, Manifest]:
    """Write a dataset to a folder that is read in place."""
    storage = open_storage(folder)
    return storage, write_dataset(storage, shard_sizes, **options)


def remote_dataset(folder: Path, shard_sizes: list[int], **options) -> tuple[Storage, Manifest]:
    """Write a dataset to a folder that is read like a remote store."""
    storage = RemoteFiles(folder)
    return storage, write_dataset(storage, shard_sizes, **options)


def flip_byte(path: Path, offset: int) -> None:
    """Damage one byte of a file in place."""
    with open(path, "r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ 0x55]))
