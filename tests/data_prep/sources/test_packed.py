import pickle

import pytest

from data_prep.sources.build import Column, SourceOptions
from data_prep.sources.packed import PackedDataset
from tests.helpers.small_dataset import flip_byte, local_dataset
from tests.helpers.tars import contents
from vitscale.config.errors import DataError, UserError
from vitscale.data import open_dataset


@pytest.mark.parametrize("kind", ["tar", "arrow"])
def test_a_dataset_is_a_source_of_its_own_samples(tmp_path, kind):
    local_dataset(tmp_path, [3, 2], kind=kind)
    source = pickle.loads(pickle.dumps(PackedDataset(str(tmp_path), SourceOptions())))

    assert contents(source) == {
        sample.key: ((sample.label,), sample.image) for sample in open_dataset(tmp_path)
    }
    assert source.columns() == [Column("label", names=tuple("abcde"))]


def test_a_damaged_sample_is_named(tmp_path):
    local_dataset(tmp_path, [3])
    source = PackedDataset(str(tmp_path), SourceOptions())
    entries = list(source.entries())
    offset = int(entries[1].where.split("\0")[1])
    flip_byte(tmp_path / "shard-000000.tar", offset + 30)

    assert len(source.read(entries[0])) == entries[0].num_bytes
    with pytest.raises(DataError, match=rf"shard-000000\.tar, key 000000001, offset {offset}"):
        source.read(entries[1])
    (tmp_path / "shard-000000.tar").unlink()
    with pytest.raises(DataError, match="is missing"):
        source.read(entries[0])


def test_a_folder_without_a_dataset_is_refused(tmp_path):
    with pytest.raises(UserError, match="no dataset at"):
        list(PackedDataset(str(tmp_path), SourceOptions()).entries())
