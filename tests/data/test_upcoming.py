"""What some lanes will read: the walk in the order of need against the order itself."""

import itertools
import time

import numpy as np
import pytest

from vitscale.data.order import Order
from vitscale.data.prefetch import node_lanes
from vitscale.data.upcoming import Upcoming, stretch_bytes


def random_order(rng):
    lanes = int(rng.choice([1, 2, 3, 4, 8, 16]))
    sizes = rng.integers(0, int(rng.choice([4, 40])), int(rng.integers(1, 25)))
    sizes[0] += lanes * 2 + 1
    tail = str(rng.choice(["carry", "drop"]))
    batch = lanes * int(rng.integers(1, 3))
    return Order(sizes, int(rng.integers(99)), batch, lanes, int(rng.integers(1, 5)), tail)


def read_by(order, lanes, start, end):
    """Position, epoch, shard and index of what some lanes read."""
    positions = np.arange(start, end)
    positions = positions[np.isin(positions % order.usable % order.lanes, lanes)]
    found = order.places(positions)
    return zip(positions, found.epoch, found.shard_id, found.index, strict=True)


@pytest.mark.parametrize("seed", range(60))
def test_upcoming_names_every_shard_before_it_is_read_and_no_other(seed):
    rng = np.random.default_rng(seed)
    order = random_order(rng)
    first = int(rng.integers(order.lanes))
    lanes = range(first, int(rng.integers(first, order.lanes)) + 1)
    start = int(rng.integers(3 * order.usable))
    end = start + 2 * order.usable
    upcoming = Upcoming(order, lanes)

    needs = list(itertools.takewhile(lambda need: need.position < end, upcoming.after(start)))

    assert [need.position for need in needs] == sorted(need.position for need in needs)
    named: dict[tuple[int, int], list] = {}
    for need in needs:
        named.setdefault((need.epoch, need.shard_id), []).append(need)
        assert need.samples == upcoming.samples(need.epoch, need.shard_id)
    used = set()
    for position, epoch, shard_id, index in read_by(order, lanes, start, end):
        fits = [n for n in named[epoch, shard_id] if n.position <= position < n.end_position]
        assert fits
        assert index in fits[0].samples
        used.add((epoch, shard_id))
    # Of a window that goes on behind the end, or beyond what "drop" feeds, not all is read here.
    surplus = {key for key in named if key not in used and named[key][0].end_position <= end}
    assert order.tail == "drop" or not surplus


@pytest.mark.parametrize("seed", range(20))
def test_upcoming_stretches_of_all_lanes_cover_the_shards_once(seed):
    order = random_order(np.random.default_rng(seed))
    apart = [Upcoming(order, [lane]) for lane in range(order.lanes)]
    for shard_id, size in enumerate(order.shard_sizes.tolist()):
        stretches = [one.samples(0, shard_id) for one in apart]
        cut = [s for s in stretches if len(s) < size]
        seen = list(itertools.chain(*cut))
        assert len(seen) == len(set(seen))
        assert all(len(s) <= size / 2 for s in cut)
        assert set(seen) == set(range(size)) or len(cut) < order.lanes


def test_upcoming_of_a_node_joins_neighbouring_lanes():
    order = Order([100], 3, 8, 8, 2)

    assert Upcoming(order, [2]).samples(0, 0) == range(26, 39)
    assert Upcoming(order, [2, 3]).samples(0, 0) == range(26, 52)
    assert Upcoming(order, [0, 1, 2, 3, 4]).samples(0, 0) == range(100), "more than half"


def test_upcoming_lanes_of_nodes_are_disjoint_and_all():
    order = Order([100] * 9, 3, 64, 16, 2)
    nodes = [node_lanes(order, range(2 * n, 2 * n + 2), 8) for n in range(4)]

    assert sorted(itertools.chain(*nodes)) == list(range(16))
    assert nodes[1] == [4, 5, 6, 7]


def test_upcoming_of_very_many_shards_begins_in_a_moment_anywhere():
    order = Order(np.full(400_000, 2500), 1, 4096, 64, 16)
    upcoming = Upcoming(order, range(8))
    start = time.monotonic()

    needs = list(itertools.islice(upcoming.after(order.usable * 3 // 2), 8 * 17))

    assert time.monotonic() - start < 5
    assert len({need.shard_id for need in needs}) == len(needs)
    assert {need.epoch for need in needs} == {1}


def test_stretch_bytes_of_some_samples_spans_them():
    offsets, sizes = np.array([512, 2048, 4096]), np.array([100, 700, 50])

    assert stretch_bytes(offsets, sizes, range(3)) == (0, None)
    assert stretch_bytes(offsets, sizes, range(1, 3)) == (2048, 4146)
    assert stretch_bytes(offsets, sizes, range(0, 1)) == (512, 612)
