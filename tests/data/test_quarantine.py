"""Damage while training: the same substitutes whoever meets it, remembered and limited (P4, P5)."""

import os
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from tests.helpers.small_dataset import flip_byte, local_dataset
from vitscale.config.errors import DataError
from vitscale.config.recipe import AugmentConfig, DataConfig
from vitscale.data.audit import EpochAudit
from vitscale.data.dataset import Dataset, open_dataset
from vitscale.data.loader import build_train_loader
from vitscale.data.order import Order
from vitscale.data.quarantine import BadSample, Quarantine, longest_row

SIZES = [7, 0, 12, 3, 9]  # 31 samples
FIELDS = ("images", "labels", "key_hash", "substitutes", "replaced")
# Neighbours in one window, so that a substitute can be bad as well.
BAD = (7, 8, 9, 10, 25)


def damage(folder, samples):
    dataset = open_dataset(folder)
    for number in samples:
        sample = dataset[number]
        flip_byte(folder / sample.shard, sample.offset + len(sample.image) // 2)


def order_of(manifest, quarantine=()):
    return Order(manifest.shards.num_samples, 1, 12, 4, 2, quarantine=quarantine)


def read(dataset, tmp_path, steps, *, quarantine=(), world_size=1, workers=0, **leaves):
    """Batches of all ranks by position, and what was found to be bad."""
    storage, manifest = dataset
    leaves = {"on_bad_sample": "substitute", **leaves}
    config = DataConfig(
        train=storage.uri, num_workers=workers, cache_dir=str(tmp_path / "cache"), **leaves
    )
    batches = []
    for rank in range(world_size):
        loader = build_train_loader(
            config, AugmentConfig(), [Dataset(storage, manifest)],
            order=order_of(manifest, quarantine), img_size=24, in_chans=3, rank=rank,
            world_size=world_size, micro_batch=12 // world_size, start_step=0, seed=1,
        )  # fmt: skip
        try:
            batches += [replace(b, images=b.images.clone()) for b in islice(loader, steps)]
        finally:
            loader.close()
    at = torch.cat([batch.positions for batch in batches]).argsort()
    joined = {name: torch.cat([getattr(b, name) for b in batches])[at] for name in FIELDS}
    return joined, [bad for batch in batches for bad in batch.found_bad]


@pytest.fixture
def damaged(tmp_path):
    dataset = local_dataset(tmp_path / "local", SIZES)
    damage(tmp_path / "local", BAD)
    return dataset


@pytest.mark.parametrize(
    "view",
    [{"workers": 2}, {"world_size": 2}, {"world_size": 3, "workers": 1}, {"quarantine": BAD},
     {"quarantine": BAD[:2]}],
    ids=lambda view: "-".join(f"{name}{value}" for name, value in view.items()),
)  # fmt: skip
def test_substitutes_do_not_depend_on_who_meets_the_damage(damaged, tmp_path, view):
    expected, found = read(damaged, tmp_path, 8)

    got, again = read(damaged, tmp_path, 8, **view)

    for name in FIELDS:
        assert torch.equal(got[name], expected[name]), name
    assert {bad.sample_index for bad in found} == set(BAD)
    assert {bad.sample_index for bad in again} == set(BAD) - set(view.get("quarantine", ()))


def test_substitutes_are_those_of_the_order(damaged, tmp_path):
    _, manifest = damaged

    got, _ = read(damaged, tmp_path, 8)

    order = order_of(manifest, BAD)
    sound, keys = order.samples(np.arange(96)), key_hashes(manifest)
    assert (got["key_hash"].numpy() == keys[sound.sample_index]).all()
    due = order.places(np.arange(96))
    assert (got["substitutes"].numpy() == due.substitute).all()
    bad = due.substitute
    assert (got["replaced"].numpy()[bad] == keys[due.sample_index[bad]]).all()
    assert not got["replaced"].numpy()[~bad].any()


def key_hashes(manifest):
    from vitscale.data.audit import hash_key

    hashes = [hash_key(f"{i:09d}") for i in range(manifest.num_samples)]
    return np.array(hashes, np.uint64).view(np.int64)


def test_audit_of_damaged_epochs_says_each_exactly_once(damaged, tmp_path):
    _, manifest = damaged
    audit = EpochAudit.expecting(manifest, order_of(manifest))

    got, _ = read(damaged, tmp_path, 8)

    epochs = np.arange(96) // 31
    names = ("key_hash", "substitutes", "replaced")
    audit.add(epochs, *(got[name].numpy() for name in names))
    totals = audit.totals([0, 1, 2])
    assert [audit.verdict(row) for row in totals] == [None] * 3
    assert totals[:, 2].tolist() == [len(BAD)] * 3


def test_missing_shard_is_replaced_from_its_windows(tmp_path):
    dataset = local_dataset(tmp_path / "local", SIZES)
    os.unlink(tmp_path / "local" / "shard-000003.tar")

    got, found = read(dataset, tmp_path, 3)

    assert {bad.sample_index for bad in found} == {19, 20, 21}
    assert all("shard-000003.tar: is missing" in bad.message for bad in found)
    assert int(got["substitutes"][:31].sum()) == 3


def test_damaged_index_stops_for_its_keys_are_unknown(tmp_path):
    dataset = local_dataset(tmp_path / "local", SIZES)
    flip_byte(tmp_path / "local" / "shard-000002.index.parquet", 40)

    with pytest.raises(DataError, match=r"shard-000002\.index\.parquet: sha256 is"):
        read(dataset, tmp_path, 3)


def test_policy_stop_says_how_to_go_on(damaged, tmp_path):
    with pytest.raises(DataError, match=r"--set data\.on_bad_sample=substitute"):
        read(damaged, tmp_path, 3, on_bad_sample="stop")


def test_search_for_a_substitute_is_limited(tmp_path):
    dataset = local_dataset(tmp_path / "local", SIZES)
    damage(tmp_path / "local", range(7, 31))

    with pytest.raises(DataError, match=r"3 samples in a row are damaged \(data.max_bad_in_a_row"):
        read(dataset, tmp_path, 8, max_bad_in_a_row=3)


def bad(sample_index, position):
    text = f"sample {sample_index} is broken"
    return BadSample(sample_index, "shard-000000.tar", "k", 1, text, position, 0)


def test_quarantine_takes_each_sample_once_and_survives_a_checkpoint():
    quarantine = Quarantine(10, 10)

    new = quarantine.add([bad(5, 9), bad(3, 4), bad(5, 7)])

    assert [(one.sample_index, one.position) for one in new] == [(3, 4), (5, 7)]
    assert quarantine.add([bad(5, 30)]) == []
    other = Quarantine(10, 10)
    other.load(quarantine.state())
    assert other.samples == quarantine.samples


@pytest.mark.parametrize(
    ("limits", "message"),
    [((2, 9), r"3 \(data.max_bad_samples = 2\)"), ((9, 1), r"2 in a row \(data.max_bad_in_a_row")],
)
def test_quarantine_over_a_limit_ends_the_run(limits, message):
    quarantine = Quarantine(*limits)
    quarantine.add([bad(1, 4), bad(2, 5), bad(3, 9)])

    with pytest.raises(DataError, match=rf"{message}.*The latest: sample 3 is broken"):
        quarantine.check()


@pytest.mark.parametrize(
    ("positions", "length"), [([], 0), ([4], 1), ([9, 3, 4, 4, 5, 8], 3), ([1, 3, 5], 1)]
)
def test_longest_row(positions, length):
    assert longest_row(positions) == length
