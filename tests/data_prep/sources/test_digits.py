import io

import numpy as np
import pytest
from PIL import Image

from data_prep.sources.build import Column, SourceOptions, build_source
from data_prep.sources.digits import Digits
from vitscale.config.errors import UserError


def listed(part):
    return list(Digits(part, SourceOptions()).entries())


def test_parts_divide_the_images():
    parts = {part: [entry.name for entry in listed(part)] for part in ("train", "test", "all")}

    assert len(parts["all"]) == 1797
    assert len(parts["test"]) == 359
    assert all(int(name) % 5 == 4 for name in parts["test"])
    assert sorted(parts["train"] + parts["test"]) == parts["all"]


def test_images_are_those_of_sklearn():
    from sklearn.datasets import load_digits

    data = load_digits()
    source = Digits("all", SourceOptions())
    entries = list(source.entries())

    assert [entry.labels for entry in entries] == [(label,) for label in data.target.tolist()]
    assert source.columns() == [Column("label", names=tuple("0123456789"))]
    with Image.open(io.BytesIO(source.read(entries[7]))) as image:
        assert np.abs(np.asarray(image) - data.images[7] * 255 / 16).max() <= 0.5


def test_unknown_part_is_named():
    said = "digits:val is not one of digits:train, digits:test, digits:all"
    with pytest.raises(UserError, match=said):
        list(build_source("digits:val", SourceOptions()).entries())
