"""The validation images of ImageNet-1k, with the labels of the development kit.

    ILSVRC2012_img_val.tar       ILSVRC2012_val_00000001.JPEG ... 00050000, or a folder with them
    ILSVRC2012_devkit_t12/data/  ILSVRC2012_validation_ground_truth.txt: one id 1..1000 a line
                                 meta.mat: what WordNet id (n01440764) each of these ids is

Ids are in an order of their own. The classes here are the WordNet ids in the order of their names,
as those of the training images (`tartar`, `imagefolder`) are. A second column holds the labels of
"Are we done with ImageNet?" (ReaL, arXiv:2006.07159), any number for each image.
"""

import functools
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.sources.build import Column, Entry, LabelValue, SourceOptions, printable
from data_prep.sources.files import OpenFiles, RandomFile, find_files
from data_prep.sources.tar_files import TarFiles, block_of, member_entry, with_links
from data_prep.sources.tar_scan import TAR_ENDINGS, forward, scan_file, scan_tar
from vitscale.config.errors import DataError, UserError

TRUTH_NAME = "data/ILSVRC2012_validation_ground_truth.txt"
META_NAME = "data/meta.mat"
_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})\.jpe?g", re.IGNORECASE)


class ImageNetVal:
    """ImageNet's validation images.

    Args:
        uri: The tar, or a folder with the images.
        options: devkit, and real for the second column.
    """

    kind = "imagenet_val"

    def __init__(self, uri: str, options: SourceOptions) -> None:
        self._uri, self._options = uri, options
        self._names: tuple[str, ...] = ()
        self._tars, self._files = TarFiles(), OpenFiles()

    def entries(self) -> Iterator[Entry]:
        """List all images.

        Raises:
            UserError: A file is missing, or scipy is.
            DataError: A file is damaged, or they do not belong together.
        """
        self._names, wnids = _load_devkit(self._options.devkit)
        real = self._load_real(len(wnids))
        seen = bytearray(len(wnids) + 1)
        for entry in self._images():
            match = _NUMBER.fullmatch(entry.name.rpartition("/")[2])
            number = int(match[1]) if match else 0
            if not 1 <= number <= len(wnids):
                raise DataError(
                    f"imagenet_val: {printable(entry.name)!r} is none of the {len(wnids)} images "
                    "ILSVRC2012_val_00000001.JPEG ... that the development kit has labels for"
                )
            if seen[number]:
                raise DataError(
                    f"imagenet_val: image {number} is there twice, {printable(entry.name)!r} is "
                    "the second; give one tar, or one folder"
                )
            seen[number] = 1
            labels: tuple[LabelValue, ...] = (wnids[number - 1],)
            if real is not None:
                labels = (*labels, real[number - 1])
            yield entry._replace(labels=labels)
        if (num_images := sum(seen)) != len(wnids):
            missing = seen.index(0, 1)
            raise DataError(
                f"imagenet_val: {printable(self._uri)!r} has {num_images} images, the development "
                f"kit has labels for {len(wnids)}; the first one missing is number {missing}"
            )

    def columns(self) -> list[Column]:
        """Give "label", and "real" if that was asked for; with the same classes."""
        columns = [Column("label", names=self._names)]
        if self._options.real is not None:
            columns.append(Column("real", multi=True, names=self._names))
        return columns

    def read(self, entry: Entry) -> bytes:
        """Read one image."""
        if "\0" in entry.where:
            return self._tars.read(entry)
        return self._files.get(entry.where, entry.num_bytes).read(0, entry.num_bytes)

    def _images(self) -> Iterator[Entry]:
        """Give the images without labels."""
        files = find_files(self._uri, (".jpeg", ".jpg"))
        if len(files) > 1 or not files[0].uri.lower().endswith(TAR_ENDINGS):
            for found in files:
                name = found.uri.rpartition("/")[2]
                yield Entry(name, found.num_bytes, (), where=found.uri)
            return
        file = RandomFile(files[0].uri)
        block = block_of(file)
        for member in with_links(functools.partial(scan_file, file)):
            yield member_entry(files[0], member, member.name.rpartition("/")[2], (), block)

    def _load_real(self, num_images: int) -> list[tuple[int, ...]] | None:
        uri = self._options.real
        if uri is None:
            return None
        try:
            lists = json.loads(_read(uri))
        except ValueError as error:
            raise DataError(f"imagenet_val: {printable(uri)!r} is no JSON: {error}") from error
        if isinstance(lists, dict):
            lists = _by_number(uri, lists)
        if not isinstance(lists, list) or len(lists) != num_images:
            count = len(lists) if isinstance(lists, list) else "no"
            raise DataError(
                f"imagenet_val: {printable(uri)!r} has {count} lists of labels, expected one for "
                f"each of the {num_images} images"
            )
        num_classes = len(self._names)
        for number, labels in enumerate(lists, 1):
            if not isinstance(labels, list) or not all(
                type(label) is int and 0 <= label < num_classes for label in labels
            ):
                raise DataError(
                    f"imagenet_val: {printable(uri)!r}: the labels of image {number} are "
                    f"{labels!r:.80}, expected a list of numbers 0 to {num_classes - 1}"
                )
        return [tuple(labels) for labels in lists]


def _by_number(uri: str, lists: dict[str, Any]) -> list[Any]:
    """Bring lists by file name into the order of the numbers in the names."""
    ordered: dict[int, Any] = {}
    for name, labels in lists.items():
        match = _NUMBER.fullmatch(name.rpartition("/")[2])
        if not match:
            raise DataError(
                f"imagenet_val: {printable(uri)!r} has labels for {name!r}, expected names such as "
                "ILSVRC2012_val_00000001.JPEG"
            )
        ordered[int(match[1])] = labels
    if sorted(ordered) != list(range(1, len(lists) + 1)):
        raise DataError(
            f"imagenet_val: {printable(uri)!r} has labels for {len(lists)} names, but they are not "
            f"numbered 1 to {len(lists)}"
        )
    return [ordered[number] for number in range(1, len(lists) + 1)]


def _load_devkit(devkit: str | None) -> tuple[tuple[str, ...], list[str]]:
    """Give the WordNet ids in the order of their names, and that of every image."""
    if devkit is None:
        raise UserError(
            "imagenet_val: the labels are in the development kit: download "
            'ILSVRC2012_devkit_t12.tar.gz from image-net.org (ILSVRC 2012, "Development kit (Task '
            '1 & 2)") and name it with --devkit'
        )
    truth, meta = _devkit_files(devkit)
    wnid_of = _wnids(devkit, meta)
    wnids = []
    for line, text in enumerate(truth.decode("ascii", "replace").split(), 1):
        wnid = wnid_of.get(int(text)) if text.isdigit() else None
        if wnid is None:
            raise DataError(
                f"imagenet_val: {printable(devkit)!r}: {TRUTH_NAME}: line {line} is {text!r:.40}, "
                "which is the id of no class in meta.mat"
            )
        wnids.append(wnid)
    return tuple(sorted(wnid_of.values())), wnids


def _wnids(devkit: str, meta: bytes) -> dict[int, str]:
    """Give id -> WordNet id of the classes; others in meta.mat have classes below them."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise UserError(
            "imagenet_val: the development kit's meta.mat needs scipy; run `pip install scipy`"
        ) from None
    try:
        rows = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
        return {
            int(row["ILSVRC2012_ID"]): str(row["WNID"])
            for row in rows
            if int(row["num_children"]) == 0
        }
    except Exception as error:  # whatever a damaged file makes of the parser
        raise DataError(
            f"imagenet_val: {printable(devkit)!r}: {META_NAME} cannot be read: {error!r}"
        ) from error


def _devkit_files(devkit: str) -> tuple[bytes, bytes]:
    if os.path.isdir(devkit):
        folder = Path(devkit)
        return _read(str(folder / TRUTH_NAME)), _read(str(folder / META_NAME))
    found: dict[str, bytes] = {}

    def wanted(name: str, num_bytes: int) -> bool:
        return name.endswith((TRUTH_NAME, META_NAME))

    for member in scan_tar(forward(RandomFile(devkit)), wanted=wanted):
        if member.content is not None:
            found[META_NAME if member.name.endswith(META_NAME) else TRUTH_NAME] = member.content
    for name in (TRUTH_NAME, META_NAME):
        if name not in found:
            raise UserError(
                f"imagenet_val: {printable(devkit)!r} holds no {name}; give "
                "ILSVRC2012_devkit_t12.tar.gz, or the folder it unpacks to"
            )
    return found[TRUTH_NAME], found[META_NAME]


def _read(uri: str) -> bytes:
    file = RandomFile(uri)
    return file.read(0, file.num_bytes)
