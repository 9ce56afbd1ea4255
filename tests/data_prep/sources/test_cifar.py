import io
import os
import pickle
import struct
import tarfile

import numpy as np
import pytest
from PIL import Image

from data_prep.sources.build import Column, SourceOptions, build_source
from data_prep.sources.cifar import Cifar10, Cifar100
from vitscale.config.errors import DataError, UserError


def pickled_by_python2(value) -> bytes:
    """Write what cPickle of Python 2 wrote with protocol 2: texts are strings of bytes."""
    return b"\x80\x02" + _python2(value) + b"."


def _python2(value) -> bytes:
    if isinstance(value, dict):
        return b"}(" + b"".join(_python2(k) + _python2(v) for k, v in value.items()) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(_python2, value)) + b"e"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_python2, value)) + b"t"
    if isinstance(value, str):
        return b"T" + struct.pack("<i", len(value)) + value.encode("latin1")
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    minus_one = b"J\xff\xff\xff\xff"
    kind = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNN" + 2 * minus_one + b"K\x00tb"
    raw = b"T" + struct.pack("<i", value.nbytes) + value.tobytes()
    return array + b"(K\x01" + _python2(value.shape) + kind + b"\x89" + raw + b"tb"


def pickled_by_python3(value) -> bytes:
    return pickle.dumps({k.encode(): v for k, v in value.items()}, protocol=2)


CLASSES = [f"k{number}" for number in range(10)]
BATCHES = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"]


def pixels(seed, count=4):
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def planes(images):
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2).reshape(len(images), -1))


def write_cifar10(folder, write=pickled_by_python2):
    folder.mkdir()
    for seed, name in enumerate([*BATCHES, "test_batch"]):
        batch = {"data": planes(pixels(seed)), "labels": [seed, 9, 0, 5], "batch_label": name}
        (folder / name).write_bytes(write(batch))
    meta = {"label_names": CLASSES, "num_vis": 3072}
    (folder / "batches.meta").write_bytes(write(meta))
    return folder


def decoded(source, entry):
    with Image.open(io.BytesIO(source.read(entry))) as image:
        assert image.format == "PNG"
        return np.asarray(image)


@pytest.mark.parametrize("write", [pickled_by_python2, pickled_by_python3])
@pytest.mark.parametrize("packed", [False, True])
def test_batches_become_rgb_images(tmp_path, write, packed):
    place = write_cifar10(tmp_path / "cifar-10-batches-py", write)
    if packed:
        with tarfile.open(tmp_path / "c.tar.gz", "w:gz") as tar:
            tar.add(place, place.name)
        place = tmp_path / "c.tar.gz"
    source = Cifar10(str(place), SourceOptions())

    entries = list(source.entries())

    assert [entry.name for entry in entries[3:6]] == [
        "data_batch_1/00003", "data_batch_2/00000", "data_batch_2/00001",
    ]  # fmt: skip
    assert [entry.labels[0] for entry in entries] == [
        label for seed in range(5) for label in (seed, 9, 0, 5)
    ]
    assert source.columns() == [Column("label", names=tuple(CLASSES))]
    wanted = np.concatenate([pixels(seed) for seed in range(5)])
    for reader in (source, pickle.loads(pickle.dumps(source))):
        assert all((decoded(reader, e) == w).all() for e, w in zip(entries, wanted, strict=True))


@pytest.mark.parametrize("split", ["val", "test"])
def test_the_test_batch_is_for_validation(tmp_path, split):
    place = write_cifar10(tmp_path / "c")

    source = build_source(f"cifar10:{place}", SourceOptions(split=split))

    assert [entry.name for entry in source.entries()] == [f"test_batch/{n:05d}" for n in range(4)]


def test_cifar100_has_fine_and_coarse_classes(tmp_path):
    fine, coarse = [f"f{n}" for n in range(100)], [f"c{n}" for n in range(20)]
    meta = {"fine_label_names": fine, "coarse_label_names": coarse}
    (tmp_path / "meta").write_bytes(pickled_by_python2(meta))
    for name in ("train", "test"):
        labels = {"fine_labels": [99, 1, 2, 3], "coarse_labels": [0, 19, 1, 2]}
        batch = {"data": planes(pixels(7)), **labels}
        (tmp_path / name).write_bytes(pickled_by_python2(batch))
    source = build_source(f"cifar100:{tmp_path}", SourceOptions())

    entries = list(source.entries())

    assert isinstance(source, Cifar100)
    assert [entry.labels for entry in entries] == [(99, 0), (1, 19), (2, 1), (3, 2)]
    assert source.columns() == [
        Column("label", names=tuple(fine)),
        Column("coarse", names=tuple(coarse)),
    ]
    assert (decoded(source, entries[2]) == pixels(7)[2]).all()


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickles_that_run_something_are_refused(tmp_path):
    place = write_cifar10(tmp_path / "c")
    victim = tmp_path / "made by the pickle"
    (place / "data_batch_2").write_bytes(pickle.dumps({b"data": Harmful(victim)}))

    with pytest.raises(DataError, match=r"data_batch_2: refused: it asks for posix\.mkdir"):
        list(Cifar10(str(place), SourceOptions()).entries())

    assert not victim.exists()


GOOD = planes(pixels(0))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickled_by_python2({"data": GOOD, "labels": [0, 1]}), "4 images and 2 labels"),
        (pickled_by_python2({"data": GOOD, "labels": [0, 1, 2, 10]}), "label 10 is not one of 10"),
        (pickled_by_python2({"data": GOOD, "labels": [0, -1, 2, 1]}), "label -1 is not one of 10"),
        (pickled_by_python2({"data": GOOD}), "no list of integers 'labels'"),
        (pickled_by_python2({"data": GOOD[:, :100], "labels": [0] * 4}), "100 bytes an image"),
        (pickled_by_python2({"labels": [0] * 4}), "no array of bytes"),
        (pickled_by_python2([1, 2]), "no dictionary"),
        (pickled_by_python2({"data": GOOD, "labels": [0] * 4})[:-500], "data_batch_1 is damaged"),
        (b"", "data_batch_1 is damaged"),
    ],
)
def test_damage_is_named(tmp_path, content, said):
    place = write_cifar10(tmp_path / "c")
    (place / "data_batch_1").write_bytes(content)

    with pytest.raises(DataError, match=said):
        list(Cifar10(str(place), SourceOptions()).entries())


def test_absent_batches_are_announced(tmp_path, capsys):
    place = write_cifar10(tmp_path / "c")
    (place / "data_batch_2").unlink()
    (place / "data_batch_5").unlink()

    assert len(list(Cifar10(str(place), SourceOptions()).entries())) == 12

    assert "lacks data_batch_2, data_batch_5; its images are not packed" in capsys.readouterr().err


def test_missing_places_and_splits_are_named(tmp_path):
    with pytest.raises(UserError, match=r"lacks batches\.meta or data_batch_1; give the folder"):
        list(Cifar10(str(tmp_path), SourceOptions()).entries())
    with pytest.raises(UserError, match="nowhere: no such file or folder"):
        list(Cifar10(str(tmp_path / "nowhere"), SourceOptions()).entries())
    with pytest.raises(UserError, match="'dev' is not one of train, val, test"):
        list(Cifar10(str(tmp_path), SourceOptions(split="dev")).entries())
    (tmp_path / "x.tar.gz").write_bytes(b"\x1f\x8b no tar")
    with pytest.raises(DataError, match=r"cannot read .*x\.tar\.gz"):
        list(Cifar10(str(tmp_path / "x.tar.gz"), SourceOptions()).entries())


def test_a_batch_that_is_gone_ends_the_run(tmp_path):
    place = write_cifar10(tmp_path / "c")
    entry = list(Cifar10(str(place), SourceOptions()).entries())[-1]
    (place / "data_batch_5").unlink()

    with pytest.raises(DataError, match="data_batch_5/00003 was listed but is gone"):
        Cifar10(str(place), SourceOptions()).read(entry)
