"""The order of examples (promises P2, P3, P4), tested with integers alone."""

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitscale.config.errors import DataError, UserError
from vitscale.data.order import Order, default_lanes, eval_slots
from vitscale.data.permute import permutation, permute, stream
from vitscale.data.requests import EvalRequests, TrainRequests

FROZEN_STREAM = 7092953601063208639
FROZEN_PERMUTATION = [3, 2, 10, 8, 5, 0, 1, 9, 11, 4, 7, 6]
FROZEN_BATCH = [10, 17, 3, 25, 12, 21, 2, 24]

PROPERTY = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@st.composite
def orders(draw):
    """Arguments of an order over uneven shards, some of them empty."""
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any))
    lanes = draw(st.sampled_from([1, 1, 2, 3, 4, 6, 8]))
    batch = lanes * draw(st.integers(1, 6))
    tail = draw(st.sampled_from(["carry", "drop"]))
    if sum(sizes) < batch:
        tail = "carry"
    return {
        "shard_sizes": sizes,
        "seed": draw(st.integers(0, 2**63 - 1)),
        "global_batch": batch,
        "lanes": lanes,
        "shuffle_block": draw(st.integers(1, 6)),
        "tail": tail,
    }


def fed(order, start, stop):
    """Sample and epoch of each position in start .. stop - 1."""
    found = order.samples(np.arange(start, stop, dtype=np.int64))
    return found.sample_index, found.epoch


@PROPERTY
@given(orders())
def test_order_feeds_every_sample_exactly_once_an_epoch(arguments):
    order = Order(**arguments)

    for epoch in range(3):
        samples, epochs = fed(order, epoch * order.usable, (epoch + 1) * order.usable)

        assert set(epochs.tolist()) == {epoch}
        assert len(np.unique(samples)) == order.usable
        assert samples.min() >= 0
        assert samples.max() < sum(arguments["shard_sizes"])
    if arguments["tail"] == "carry":
        assert order.usable == sum(arguments["shard_sizes"])
    else:
        assert 0 <= sum(arguments["shard_sizes"]) - order.usable < order.global_batch


@PROPERTY
@given(orders())
def test_order_shard_and_index_name_the_sample(arguments):
    order = Order(**arguments)
    sizes = np.array(arguments["shard_sizes"])

    found = order.samples(np.arange(order.usable, dtype=np.int64))

    assert (found.index >= 0).all()
    assert (found.index < sizes[found.shard_id]).all()
    starts = np.concatenate([[0], np.cumsum(sizes)])
    assert (starts[found.shard_id] + found.index == found.sample_index).all()


@PROPERTY
@given(orders(), st.integers(0, 10**6), st.integers(1, 200))
def test_order_restart_anywhere_equals_the_tail(arguments, start, length):
    whole, _ = fed(Order(**arguments), start, start + length)
    cut = start + length // 2

    tail, _ = fed(Order(**arguments), cut, start + length)

    assert (whole[cut - start :] == tail).all()


@PROPERTY
@given(orders(), st.data())
def test_order_ranks_share_each_batch_without_overlap(arguments, data):
    order = Order(**arguments)
    batch = order.global_batch
    world_size = data.draw(st.sampled_from([n for n in range(1, batch + 1) if batch % n == 0]))

    slots = [order.rank_slots(rank, world_size) for rank in range(world_size)]

    assert {len(mine) for mine in slots} == {batch // world_size}
    assert sorted(np.concatenate(slots).tolist()) == list(range(batch))
    if order.lanes % world_size == 0:
        assert all(len(set(m % order.lanes)) == order.lanes // world_size for m in slots)


@PROPERTY
@given(orders(), st.integers(0, 50), st.data())
def test_order_other_topology_gives_the_same_global_batches(arguments, start, data):
    order = Order(**arguments)
    batch, steps = order.global_batch, 3

    def global_batches(world_size, micro_batch, first_step):
        seen = np.full((steps, batch), -1)
        for rank in range(world_size):
            requests = TrainRequests(Order(**arguments), rank, world_size, micro_batch, first_step)
            for _, part in zip(
                range(steps * batch // world_size // micro_batch), requests, strict=False
            ):
                step, slot = np.divmod(part.positions - first_step * batch, batch)
                assert (seen[step, slot] == -1).all()
                seen[step, slot] = part.sample_indexes
        return seen

    divisors = [n for n in range(1, batch + 1) if batch % n == 0]
    world_size = data.draw(st.sampled_from(divisors))
    share = batch // world_size
    micro_batch = data.draw(st.sampled_from([n for n in divisors if share % n == 0]))

    expected = global_batches(1, batch, start)
    assert (global_batches(world_size, micro_batch, start) == expected).all()
    assert (expected >= 0).all()


@pytest.mark.parametrize("tail", ["carry", "drop"])
@pytest.mark.parametrize("lanes", [1, 4, 12])
@pytest.mark.parametrize("num_samples", [12, 13, 143, 1000])
def test_order_grid_of_sizes(num_samples, lanes, tail):
    rng = np.random.default_rng(num_samples)
    sizes = np.bincount(rng.integers(0, 9, num_samples), minlength=11)
    order = Order(sizes, 7, 12, lanes, 3, tail)

    counts = np.zeros(num_samples, dtype=int)
    for epoch in range(3):
        samples, _ = fed(order, epoch * order.usable, (epoch + 1) * order.usable)
        counts += np.bincount(samples, minlength=num_samples)

    if tail == "carry":
        assert (counts == 3).all()
    else:
        assert counts.sum() == 3 * order.usable
        assert counts.max() == 3


def test_order_carry_batch_goes_on_into_the_next_epoch():
    order = Order([5, 5, 3], 0, 4, 2, 2)

    located = order.samples(order.step_positions(3))

    assert located.epoch.tolist() == [0, 1, 1, 1]
    assert order.steps_per_epoch == 13 / 4
    assert [order.epoch_at(seen) for seen in (0, 12, 13, 26)] == [0, 0, 1, 2]


def test_order_dataset_smaller_than_a_batch_repeats_inside_it():
    order = Order([3], 0, 12, 4)

    located = order.samples(order.step_positions(1))

    assert located.epoch.tolist() == [4, 4, 4, 5, 5, 5, 6, 6, 6, 7, 7, 7]
    assert sorted(located.sample_index.tolist()) == sorted([0, 1, 2] * 4)


def test_order_drop_leaves_out_other_samples_each_epoch():
    order = Order([50] * 6, 3, 64, 8, 2, "drop")

    left_out = []
    for epoch in range(20):
        samples, _ = fed(order, epoch * order.usable, (epoch + 1) * order.usable)
        left_out.append(frozenset(range(300)) - set(samples.tolist()))

    assert {len(out) for out in left_out} == {300 - 256}
    assert len(set(left_out)) == 20
    # Twenty draws of 44 of 300 meet 95 % of the samples if they are not stuck to some places.
    assert len(frozenset().union(*left_out)) > 240


def test_order_seeds_and_epochs_differ_from_the_start():
    sizes = [20] * 30
    first = {
        (seed, epoch): tuple(fed(Order(sizes, seed, 20, 4, 4), epoch * 600, epoch * 600 + 60)[0])
        for seed in range(6)
        for epoch in range(6)
    }

    # Also rules out that only seed + epoch or seed * epoch counts.
    assert len(set(first.values())) == 36


def test_stream_keys_are_distinct_by_purpose_seed_and_parts():
    keys = [
        stream(seed, purpose, *parts)
        for seed in (-1, 0, 1, 11, 2**70)
        for purpose in ("shards", "window", "augment")
        for parts in ((), (0,), (1,), (11,), (1, 1), (0, 11))
    ]

    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)


def test_stream_and_permutation_are_frozen():
    # A change of these values changes the data order of every run: see the changelog's Numerics.
    assert stream(0, "shards", 0) == FROZEN_STREAM
    assert permutation(12, stream(1, "window", 2)).tolist() == FROZEN_PERMUTATION
    order = Order([7, 0, 11, 5, 9], 42, 8, 4, 2)
    assert order.samples(order.step_positions(2**40)).sample_index.tolist() == FROZEN_BATCH


@pytest.mark.parametrize("size", [1, 2, 3, 5, 10, 257, 70_000])
def test_permutation_is_one(size):
    assert (np.sort(permutation(size, stream(3, "test", size))) == np.arange(size)).all()


def test_permute_handles_mixed_and_huge_sizes():
    sizes = np.array([1, 2, 3, 1000, 2**40 + 1, 2**62], dtype=np.int64)
    keys = np.full(6, stream(0, "test"), dtype=np.uint64)

    low = permute(np.zeros(6, dtype=np.int64), sizes, keys)
    high = permute(sizes - 1, sizes, keys)

    assert (low >= 0).all()
    assert (high >= 0).all()
    assert (low < sizes).all()
    assert (high < sizes).all()
    assert (low[1:] != high[1:]).all()


@pytest.mark.parametrize("size", [2, 3, 5, 7, 11, 30])
def test_permute_sends_values_everywhere_equally_often(size):
    keys = np.array([stream(key, "test") for key in range(20_000)], dtype=np.uint64)
    sizes = np.full(len(keys), size, dtype=np.int64)

    counts = np.stack(
        [
            np.bincount(permute(np.full_like(sizes, value), sizes, keys), minlength=size)
            for value in range(size)
        ]
    )

    expected = len(keys) / size
    freedom = (size - 1) ** 2
    chi2 = ((counts - expected) ** 2 / expected).sum()
    # Six standard deviations of a chi-square distribution.
    assert chi2 < freedom + 6 * np.sqrt(2 * freedom), (chi2, freedom)


def test_order_shuffles_within_few_shards_and_draws_from_many():
    sizes = np.full(400, 100)
    order = Order(sizes, 0, 64, 8, 5)
    found = order.samples(np.arange(order.usable, dtype=np.int64))
    lane = np.arange(order.usable) % 8

    for one in range(8):
        shards = found.shard_id[lane == one]
        window = shards[: 5 * 100]
        # A window is five shards at most, and two neighbours come from the same one by chance only.
        assert len(set(window.tolist())) <= 6
        assert (window[1:] == window[:-1]).mean() < 0.4
    batch = found.shard_id[:64]
    assert len(set(batch.tolist())) > 24


def test_order_windows_of_one_epoch_are_shuffled_differently():
    # Two lanes of four windows of two shards, 20 places each.
    order = Order(np.full(16, 10), 0, 2, 2, 2)
    found = order.samples(np.arange(160, dtype=np.int64))
    patterns = set()

    for lane in range(2):
        for window in range(4):
            part = slice(lane + window * 40, lane + (window + 1) * 40, 2)
            first = found.shard_id[part] == found.shard_id[part][0]
            patterns.add((tuple(first), tuple(found.index[part])))

    assert len(patterns) == 8


def test_order_class_sorted_shards_give_mixed_batches():
    # 40 classes, ten shards each, stored one class after the other.
    order = Order(np.full(400, 100), 0, 64, 64, 16)
    classes = order.samples(np.arange(64 * 200, dtype=np.int64)).shard_id.reshape(200, 64) // 10

    distinct = [len(set(batch.tolist())) for batch in classes]

    # 64 independent draws of 40 classes hit 40 * (1 - (39/40)^64) = 32.1 of them on average.
    assert abs(np.mean(distinct) - 32.1) < 3.0


def test_order_quarantined_samples_are_replaced_from_their_window():
    arguments = {"seed": 5, "global_batch": 12, "lanes": 3, "shuffle_block": 2}
    sizes = [9, 14, 3, 0, 20, 11, 8]
    clean = Order(sizes, **arguments)
    bad = {4, 5, 30, 64}
    order = Order(sizes, **arguments, quarantine=bad)
    positions = np.arange(3 * order.usable, dtype=np.int64)

    before, after = clean.samples(positions), order.samples(positions)

    replaced = np.isin(before.sample_index, list(bad))
    assert (after.substitute == replaced).all()
    assert replaced.sum() == 3 * len(bad)
    assert (after.sample_index[~replaced] == before.sample_index[~replaced]).all()
    assert not set(after.sample_index.tolist()) & bad
    again = Order(sizes, **arguments, quarantine=sorted(bad)).samples(positions[40:])
    assert (again.sample_index == after.sample_index[40:]).all()
    assert order.quarantine_digest != clean.quarantine_digest


def test_order_substitute_comes_from_the_same_shards():
    sizes = np.full(20, 10)
    order = Order(sizes, 1, 4, 1, 2, quarantine={int(i) for i in range(0, 200, 7)})
    found = order.samples(np.arange(200, dtype=np.int64))

    for start in range(0, 200, 20):
        assert len(set(found.shard_id[start : start + 20].tolist())) <= 2


def test_order_window_all_in_quarantine_is_refused():
    order = Order([4, 4], 0, 2, 1, 1, quarantine={0, 1, 2, 3})

    with pytest.raises(DataError, match=r"all 4 samples .* shard_id \[0\]"):
        order.samples(np.arange(8, dtype=np.int64))


def test_order_state_allows_other_topology_and_names_every_other_change():
    sizes = [30, 40, 50]
    order = Order(sizes, 1, 12, 4, 2, "carry", dataset_digest="aa")
    saved = order.state(24)
    assert saved["epoch"] == 0

    Order(sizes, 1, 12, 4, 2, "carry", dataset_digest="aa").check_state(saved)
    other = Order(sizes, 2, 24, 8, 3, "drop", {1}, dataset_digest="bb")
    with pytest.raises(UserError) as caught:
        other.check_state(saved)

    message = str(caught.value)
    for part in (
        "dataset_digest: the checkpoint has 'aa', this run 'bb'",
        "seed: the checkpoint has 1, this run 2",
        "global_batch: the checkpoint has 12, this run 24",
        "lanes: the checkpoint has 4, this run 8",
        "shuffle_block: the checkpoint has 2, this run 3",
        "tail: the checkpoint has 'carry', this run 'drop'",
        "quarantine_digest",
    ):
        assert part in message
    assert "seen_examples" not in message


def test_order_state_that_is_incomplete_is_refused():
    order = Order([30], 1, 12)
    saved = order.state(12)
    del saved["lanes"]

    with pytest.raises(UserError, match="lanes: the checkpoint has None"):
        order.check_state(saved)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lanes": 5}, "lanes = 5 must divide global_batch = 12"),
        ({"lanes": 0}, "at least 1"),
        ({"tail": "pad"}, '"pad"'),
        ({"tail": "drop", "shard_sizes": [3]}, "leaves nothing of 3 samples"),
        ({"shard_sizes": [0, 0]}, "0 samples"),
    ],
    ids=["lanes", "zero", "tail", "drop", "empty"],
)
def test_order_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        Order(**{"shard_sizes": [30], "seed": 0, "global_batch": 12, **arguments})


def test_rank_slots_uneven_world_is_refused():
    with pytest.raises(UserError, match=r"global_batch = 12 .* 5 ranks"):
        Order([30], 0, 12).rank_slots(0, 5)


@pytest.mark.parametrize(
    ("global_batch", "num_shards", "lanes"),
    [(4096, None, 64), (96, None, 48), (7, None, 7), (134, None, 2), (64, 1, 1), (64, 40, 32)],
)
def test_default_lanes_divide_the_batch(global_batch, num_shards, lanes):
    assert default_lanes(global_batch, num_shards) == lanes


@PROPERTY
@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 16))
def test_eval_slots_give_each_sample_once_in_equal_steps(num_samples, world_size, micro_batch):
    slots = [eval_slots(num_samples, rank, world_size, micro_batch) for rank in range(world_size)]

    assert len({part.shape for part in slots}) == 1
    assert slots[0].shape == (-(-num_samples // (world_size * micro_batch)), micro_batch)
    real = np.concatenate([part[part >= 0] for part in slots])
    assert sorted(real.tolist()) == list(range(num_samples))


def test_eval_requests_skip_empty_shards():
    class Sizes:
        starts = np.array([0, 0, 3, 3, 5, 5])

    class Data:
        num_samples, shards = 5, Sizes

    parts = list(EvalRequests(Data, 0, 1, 4))

    assert [p.shard_ids.tolist() for p in parts] == [[1, 1, 1, 3], [3, -1, -1, -1]]
    assert [p.indexes.tolist() for p in parts] == [[0, 1, 2, 0], [1, -1, -1, -1]]


def test_micro_batch_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match="micro_batch = 4 must divide the 6 examples"):
        TrainRequests(Order([30], 0, 12), 0, 2, 4, 0)


def test_order_of_a_billion_samples_is_small_and_quick(record_property):
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 5001, 400_000)
    total = int(sizes.sum())
    tracemalloc.start()

    order = Order(sizes, 0, 32_768, 512, 16)
    started = time.perf_counter()
    order.samples(order.step_positions(0))
    order.samples(order.step_positions(total // 32_768))  # lies across two epochs
    seek_s = (time.perf_counter() - started) / 2
    kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    started = time.perf_counter()
    order.samples(order.step_positions(12_345))
    batch_s = time.perf_counter() - started

    record_property("seek_s", seek_s)
    record_property("sample_us", batch_s / 32_768 * 1e6)
    print(f"{seek_s=:.4f} {batch_s=:.4f} {kept_bytes=} {peak_bytes=}")
    assert kept_bytes < 30e6
    assert peak_bytes < 50e6


def test_order_of_a_billion_samples_visits_no_sample_twice():
    sizes = np.random.default_rng(1).integers(0, 5001, 400_000)
    order = Order(sizes, 9, 32_768, 4096, 16)
    run = np.arange(300_000)
    scattered = np.random.default_rng(2).integers(0, order.usable, 300_000)
    # All of the last lane, of which the run met the beginning.
    lane = np.arange(4095, order.usable, 4096)
    positions = np.unique(np.concatenate([run, scattered, lane]))

    found = order.samples(positions)

    assert len(np.unique(found.sample_index)) == len(positions)
    assert (found.index < sizes[found.shard_id]).all()
    # Scattered positions meet the whole dataset evenly: six standard deviations.
    samples = found.sample_index[np.isin(positions, scattered)]
    parts = np.bincount(samples * 64 // order.usable, minlength=64)
    assert abs(parts - parts.mean()).max() < 6 * np.sqrt(parts.mean())


def test_order_nodes_read_their_share_of_the_bytes():
    # 4,096 ranks on 512 nodes over 512 lanes: each node owns one lane through an epoch.
    sizes = np.random.default_rng(1).integers(2000, 3000, 120_000)
    order = Order(sizes, 0, 32_768, 512, 16)
    steps = 200
    touched = []

    for node in (0, 17, 511):
        slots = np.concatenate([order.rank_slots(8 * node + r, 4096) for r in range(8)])
        positions = (np.arange(steps)[:, None] * 32_768 + slots).reshape(-1)
        found = order.samples(positions)
        touched.append(set(found.shard_id.tolist()))
        assert len(set(slots % 512)) == 1

    assert all(len(shards) <= 17 for shards in touched)
    assert not touched[0] & touched[1]
    lane_sizes = order.usable // 512
    assert abs(lane_sizes * 512 / order.usable - 1) < 0.1
