"""Stop anywhere, go on as anything: the digests are those of the uninterrupted run (P2, P3)."""

from itertools import islice

import numpy as np
import pytest

from tests.helpers.small_dataset import local_dataset
from vitscale.config.errors import UserError
from vitscale.config.recipe import AugmentConfig, DataConfig
from vitscale.data.audit import batch_digest
from vitscale.data.dataset import Dataset
from vitscale.data.loader import build_train_loader
from vitscale.data.train_sets import build_order

SIZES = [7, 0, 12, 3, 9, 17]  # 48 samples
BATCH, STEPS = 12, 15  # four steps an epoch: into the fourth
STOPS = {"start": [0], "first": [1], "middle": [2], "last": [3], "boundary": [4], "next": [5],
         "third": [11], "twice": [3, 9]}  # fmt: skip
CHANGES = {
    "same": {},
    "more-ranks": {"world_size": 4},
    "fewer-ranks": {"world_size": 1},
    "workers": {"workers": 3},
    "micro-batch": {"micro_batch": 2},
    "prefetch": {"workers": 1, "prefetch": 5},
    "arrow": {"kind": "arrow"},
}


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    return {
        kind: Dataset(*local_dataset(folder / kind, SIZES, kind=kind)) for kind in ("tar", "arrow")
    }


@pytest.fixture(scope="module")
def straight(sets):
    return digests(sets, 0, STEPS)


def digests(sets, start, stop, *, world_size=2, workers=0, prefetch=2, micro_batch=None,
            kind="tar", saved=None):  # fmt: skip
    """data/digest of some steps, as all ranks together write it; checks a saved state first."""
    data = sets[kind]
    config = DataConfig(train=data.storage.uri, num_workers=workers, prefetch_batches=prefetch)
    share = BATCH // world_size
    micro_batch = micro_batch or share
    hashes = np.zeros((stop - start, BATCH), np.int64)
    for rank in range(world_size):
        order = build_order(config, [data.manifest], seed=1, global_batch=BATCH)
        if saved is not None:
            order.check_state(saved)
        loader = build_train_loader(
            config, AugmentConfig(), [data], order=order, img_size=8, in_chans=3, rank=rank,
            world_size=world_size, micro_batch=micro_batch, start_step=start, seed=1,
        )  # fmt: skip
        for batch in islice(loader, (stop - start) * share // micro_batch):
            step, slot = np.divmod(batch.positions.numpy() - start * BATCH, BATCH)
            hashes[step, slot] = batch.key_hash.numpy()
        loader.close()
    return [batch_digest(row) for row in hashes]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("stops", STOPS.values(), ids=STOPS)
def test_digests_equal_the_straight_run(sets, straight, stops, change):
    got, start, saved = [], 0, None
    for number, stop in enumerate([*stops, STEPS]):
        more = change if number else {}
        got += digests(sets, start, stop, saved=saved, **more)
        order = build_order(DataConfig(train="x"), [sets["tar"].manifest], 1, BATCH)
        start, saved = stop, order.state(stop * BATCH)

    assert got == straight


def test_state_of_an_old_release_is_refused(sets):
    order = build_order(DataConfig(train="x"), [sets["tar"].manifest], 1, BATCH)
    saved = order.state(BATCH)
    del saved["version"]

    with pytest.raises(UserError, match="version 1, this vitscale writes and reads version 2"):
        order.check_state(saved)
