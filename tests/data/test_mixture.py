"""Mixtures: exact shares, every dataset once an epoch, weights that change (P2, P3, P4)."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitscale.config.errors import UserError
from vitscale.data.mixture import CYCLE, Mixture, Source, cycle_counts
from vitscale.data.order import Order

PROPERTY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def sources(weights, sizes=None, batch=12, lanes=4, quarantines=None):
    sizes = sizes or [[9, 14, 3, 20], [7, 7], [30, 1, 12]][: len(weights)]
    bad = quarantines or [()] * len(weights)
    return [
        Source(f"set{k}", Order(sizes[k], 10 + k, batch, lanes, 2, quarantine=bad[k]), weight)
        for k, weight in enumerate(weights)
    ]


@st.composite
def mixtures(draw):
    count = draw(st.integers(2, 4))
    lanes = draw(st.sampled_from([1, 2, 3, 4, 6]))
    sizes = [
        draw(st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any)) for _ in range(count)
    ]
    weights = [draw(st.sampled_from([0.01, 0.3, 1.0, 2.5, 7.0])) for _ in range(count)]
    return weights, sizes, lanes * draw(st.integers(1, 4)), lanes


@PROPERTY
@given(mixtures(), st.integers(0, 3))
def test_every_dataset_is_fed_once_an_epoch_of_its_own(arguments, rounds):
    mixture = Mixture(sources(*arguments))
    steps = 40 * (rounds + 1)
    seen = steps * mixture.global_batch
    found = mixture.places(np.arange(seen))
    who = mixture.source_of(np.arange(seen))

    for k, epochs in enumerate(mixture.open_epochs(seen)):
        samples = mixture.sources[k].order.num_samples
        for epoch in range(epochs.start):
            fed = found.sample_index[(who == k) & (found.epoch == epoch)]
            assert len(fed) == samples
            assert len(set(fed.tolist())) == samples
        mine = found.epoch[who == k]
        assert not len(mine) or mine.max() < epochs.stop


@PROPERTY
@given(mixtures(), st.integers(0, 10**9), st.integers(1, 400))
def test_restart_anywhere_equals_the_tail(arguments, start, length):
    whole = Mixture(sources(*arguments)).places(np.arange(start, start + length))
    cut = length // 2

    tail = Mixture(sources(*arguments)).places(np.arange(start + cut, start + length))

    assert (whole.sample_index[cut:] == tail.sample_index).all()
    assert (whole.epoch[cut:] == tail.epoch).all()


@pytest.mark.parametrize("weights", [[1, 1], [0.9, 0.1], [5, 3, 2], [0.001, 1.0]])
def test_shares_are_exact_over_a_cycle_and_close_in_every_batch(weights):
    batch, lanes = 256, 64
    mixture = Mixture(sources(weights, [[50]] * len(weights), batch, lanes))
    who = mixture.source_of(np.arange(CYCLE * lanes))

    counts = np.bincount(who, minlength=len(weights))
    assert counts.tolist() == (cycle_counts(weights) * lanes).tolist()
    exact = np.array(weights) / sum(weights)
    assert np.abs(counts / counts.sum() - exact).max() < 1 / CYCLE
    shares = np.stack([(who.reshape(-1, batch) == k).mean(axis=1) for k in range(len(weights))])
    # As even as whole examples allow: far below the 1 / sqrt(batch) of independent draws.
    assert np.abs(shares - exact[:, None]).max() <= 4 / batch


def test_shards_and_samples_are_counted_through():
    mixture = Mixture(sources([1, 2]))

    found = mixture.places(np.arange(600))

    sizes = np.array([9, 14, 3, 20, 7, 7])
    starts = np.concatenate([[0], np.cumsum(sizes)])
    assert (starts[found.shard_id] + found.index == found.sample_index).all()
    assert set(found.shard_id.tolist()) == set(range(6))
    assert ((found.shard_id >= 4) == (mixture.source_of(np.arange(600)) == 1)).all()


def test_substitutes_come_from_the_same_dataset():
    mixture = Mixture(sources([1, 1]))
    clean = mixture.places(np.arange(2000))
    bad = [3, 20, 47, 55]

    mixture.quarantine(bad)
    fed = mixture.samples(np.arange(2000))

    was = np.isin(clean.sample_index, bad)
    assert (mixture.places(np.arange(2000)).substitute == was).all()
    assert was.any()
    assert not np.isin(fed.sample_index, bad).any()
    assert (fed.sample_index[~was] == clean.sample_index[~was]).all()
    assert ((fed.sample_index >= 46) == (mixture.source_of(np.arange(2000)) == 1)).all()


def test_weights_change_at_a_checkpoint_by_name_and_every_dataset_goes_on():
    seen = 12 * 50
    before = Mixture(sources([3, 1]))
    state = before.state(seen)
    after = Mixture(sources([1, 3]))

    with pytest.raises(UserError, match=r"set0 0.7500, set1 0.2500; this run set0 0.2500"):
        after.go_on_from(state, may_change_weights=False)
    after = Mixture(sources([1, 3]))
    after.go_on_from(state, may_change_weights=True)

    assert (after.source_of(np.arange(seen)) == before.source_of(np.arange(seen))).all()
    later = np.arange(seen, seen + 12 * 400)
    assert abs((after.source_of(later) == 0).mean() - 0.25) < 0.01
    everything = np.arange(seen + 12 * 400)
    found, who = after.places(everything), after.source_of(everything)
    for k, epochs in enumerate(after.open_epochs(len(everything))):
        for epoch in range(epochs.start):
            fed = found.sample_index[(who == k) & (found.epoch == epoch)].tolist()
            assert len(fed) == len(set(fed)) == after.sources[k].order.num_samples
    # A resume of the changed run needs no permission.
    again = Mixture(sources([1, 3]))
    again.go_on_from(after.state(seen + 24), may_change_weights=False)
    assert (again.source_of(later) == after.source_of(later)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: Mixture(sources([1, 1, 1])), "this run mixes"),
        (lambda: Mixture(sources([1, 1], [[9, 14, 3, 20], [7, 8]])), "num_samples"),
    ],
    ids=["more", "other"],
)
def test_other_datasets_are_refused(change, message):
    state = Mixture(sources([1, 1])).state(0)

    with pytest.raises(UserError, match=message):
        change().go_on_from(state, may_change_weights=True)


def test_state_of_a_single_dataset_is_refused():
    with pytest.raises(UserError, match="trained on a single dataset"):
        Mixture(sources([1, 1])).check_state(Order([9], 0, 12, 4).state(0))


def test_weights_must_be_positive_and_names_differ():
    with pytest.raises(UserError, match="weights above 0"):
        Mixture(sources([1, 0]))
    one = sources([1, 1])
    with pytest.raises(UserError, match="different names"):
        Mixture([one[0], Source("set0", one[1].order, 1.0)])
