"""CIFAR-10 and CIFAR-100 as published: Python pickles in a folder, or the .tar.gz with them.

A pickle can run any program when it is loaded. These are read by an unpickler that knows NumPy
arrays and plain values only, and refuses all else. Images are rows of 3,072 bytes: the red plane
of 32 x 32 px, then green, then blue; each becomes a PNG.
Source of the layout: https://www.cs.toronto.edu/~kriz/cifar.html
"""

import io
import pickle
import sys
import tarfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from data_prep.images import encode_png
from data_prep.sources.build import Column, Entry, SourceOptions
from vitscale.config.errors import DataError, UserError

SIDE = 32  # px
IMAGE_BYTES = 3 * SIDE * SIDE


def _bytes_of(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


# What arrays are made of in a pickle, under the names of NumPy's versions, and bytes of Python 3.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _bytes_of,
}


class _Cifar:
    """One of the two: they differ in files and labels.

    Args:
        uri: The folder with the pickles, or the .tar.gz.
        options: `split` is "train", "val" or "test".
    """

    kind: ClassVar[str]
    # split -> pickles with images; those of training may be some of them
    _batches: ClassVar[dict[str, tuple[str, ...]]]
    _meta: ClassVar[str]
    # (column, key of the labels in a batch, key of the names in the meta file)
    _labels: ClassVar[tuple[tuple[str, str, str], ...]]

    def __init__(self, uri: str, options: SourceOptions) -> None:
        self._uri = uri
        self._split = options.split
        self._names: list[tuple[str, ...]] = []
        self._images: dict[str, npt.NDArray[np.uint8]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._uri, SourceOptions(split=self._split))

    def entries(self) -> Iterator[Entry]:
        """List the images of the split.

        Raises:
            UserError: There are no such files, or the split is not one of the three.
            DataError: A file is damaged, or holds what it should not.
        """
        wanted = self._batches.get(self._split)
        if wanted is None:
            raise UserError(
                f"{self.kind}: --split {self._split!r} is not one of {', '.join(self._batches)}"
            )
        files = self._files()
        there = [name for name in wanted if name in files]
        if not there or self._meta not in files:
            raise UserError(
                f"{self.kind}: {self._uri} lacks {self._meta} or {wanted[0]}; give the folder with "
                "the Python version of the data set, or its .tar.gz"
            )
        if absent := [name for name in wanted if name not in files]:
            print(
                f"warning: {self.kind}: {self._uri} lacks {', '.join(absent)}; its images are not "
                "packed",
                file=sys.stderr,
                flush=True,
            )
        meta = self._unpickled(self._meta, files[self._meta])
        self._names = [self._class_names(meta, key) for _, _, key in self._labels]
        for name in there:
            batch = self._unpickled(name, files[name])
            self._images[name] = self._pixels(name, batch)
            columns = [
                self._classes(name, batch, key, len(names))
                for (_, key, _), names in zip(self._labels, self._names, strict=True)
            ]
            for number, labels in enumerate(zip(*columns, strict=True)):
                yield Entry(f"{name}/{number:05d}", IMAGE_BYTES, labels)

    def columns(self) -> list[Column]:
        """Give the classes in the order of the meta file."""
        pairs = zip(self._labels, self._names, strict=True)
        return [Column(column, names=names) for (column, _, _), names in pairs]

    def read(self, entry: Entry) -> bytes:
        """Encode one image as PNG."""
        name, _, number = entry.name.rpartition("/")
        with self._lock:
            if name not in self._images:
                self._load()
        images = self._images.get(name)
        if images is None or int(number) >= len(images):
            raise DataError(
                f"{self.kind}: {self._uri}: {entry.name} was listed but is gone; put the files "
                "back as they were and run the same command again"
            )
        return encode_png(images[int(number)])

    def _load(self) -> None:
        """Read all batches of the split: inputs come in any order, a .tar.gz in its own."""
        for name, data in self._files().items():
            if name in self._batches[self._split]:
                self._images[name] = self._pixels(name, self._unpickled(name, data))

    def _files(self) -> dict[str, "bytes | Path"]:
        """Give the pickles by name."""
        path = Path(self._uri)
        names = {self._meta}.union(*self._batches.values())
        if path.is_dir():
            return {name: path / name for name in names if (path / name).is_file()}
        found: dict[str, bytes | Path] = {}
        try:
            with tarfile.open(path) as tar:
                for member in tar:
                    name = member.name.rpartition("/")[2]
                    content = tar.extractfile(member) if member.isfile() else None
                    if content is not None and name in names:
                        found[name] = content.read()
        except FileNotFoundError:
            raise UserError(f"{self.kind}: {self._uri}: no such file or folder") from None
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            raise DataError(f"{self.kind}: cannot read {self._uri}: {error}") from error
        return found

    def _unpickled(self, name: str, data: "bytes | Path") -> dict[str, Any]:
        try:
            content = data if isinstance(data, bytes) else data.read_bytes()
            value = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        except OSError as error:
            raise DataError(f"{self.kind}: cannot read {data!r}: {error}") from error
        except DataError as error:
            raise DataError(f"{self.kind}: {self._uri}: {name}: {error}") from error
        except Exception as error:  # a damaged pickle raises nearly anything
            raise DataError(
                f"{self.kind}: {self._uri}: {name} is damaged: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(value, dict):
            raise DataError(f"{self.kind}: {self._uri}: {name} holds no dictionary")
        return {_text(key): item for key, item in value.items()}

    def _pixels(self, name: str, batch: dict[str, Any]) -> npt.NDArray[np.uint8]:
        data = batch.get("data")
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2:
            raise DataError(f"{self.kind}: {self._uri}: {name} holds no array of bytes")
        if data.shape[1] != IMAGE_BYTES:
            raise DataError(
                f"{self.kind}: {self._uri}: {name} has {data.shape[1]} bytes an image, expected "
                f"{IMAGE_BYTES}"
            )
        return np.ascontiguousarray(data.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1))

    def _classes(self, name: str, batch: dict[str, Any], key: str, num_classes: int) -> list[int]:
        labels = batch.get(key)
        where = f"{self.kind}: {self._uri}: {name}"
        if not isinstance(labels, list) or not all(type(label) is int for label in labels):
            raise DataError(f"{where} has no list of integers {key!r}")
        if len(labels) != len(batch["data"]):
            raise DataError(f"{where}: {len(batch['data'])} images and {len(labels)} labels")
        if wrong := [label for label in labels if not 0 <= label < num_classes]:
            raise DataError(f"{where}: label {wrong[0]} is not one of {num_classes} classes")
        return labels

    def _class_names(self, meta: dict[str, Any], key: str) -> tuple[str, ...]:
        names = meta.get(key)
        if not isinstance(names, list) or not names:
            raise DataError(f"{self.kind}: {self._uri}: {self._meta} has no list {key!r}")
        return tuple(map(_text, names))


class Cifar10(_Cifar):
    """CIFAR-10: ten classes, five batches for training."""

    kind = "cifar10"
    _batches: ClassVar[dict[str, tuple[str, ...]]] = {
        "train": tuple(f"data_batch_{number}" for number in range(1, 6)),
        "val": ("test_batch",),
        "test": ("test_batch",),
    }
    _meta = "batches.meta"
    _labels = (("label", "labels", "label_names"),)


class Cifar100(_Cifar):
    """CIFAR-100: a hundred classes, in twenty coarse ones as a second column."""

    kind = "cifar100"
    _batches: ClassVar[dict[str, tuple[str, ...]]] = {
        "train": ("train",),
        "val": ("test",),
        "test": ("test",),
    }
    _meta = "meta"
    _labels = (
        ("label", "fine_labels", "fine_label_names"),
        ("coarse", "coarse_labels", "coarse_label_names"),
    )


class _Unpickler(pickle.Unpickler):
    """Loads arrays and plain values, and nothing that could do anything."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise DataError(
                f"refused: it asks for {module}.{name}, which no file of this data set needs; "
                "fetch it from its publisher"
            )
        return _ALLOWED[module, name]


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
