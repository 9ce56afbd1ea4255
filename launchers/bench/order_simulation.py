"""`vitscale bench data --order-only`: the order of a run of any size, without any data."""

import time
import tracemalloc
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitscale.config.errors import UserError, VitscaleError
from vitscale.data.node_share import NodeShare, lane_bounds, node_share
from vitscale.data.order import Order
from vitscale.data.requests import TrainRequests
from vitscale.data.windows import EpochTable
from vitscale.observe.bench_text import table, target

MAX_STATE_BYTES = 50e6
MAX_SEEK_S = 0.010
MAX_SAMPLE_S = 1e-6
MAX_IMBALANCE = 0.10

SEEKS = 50
# Epochs that the seeks are spread over: nearly each needs another table of shards.
EPOCHS = 1000
# Positions that are looked up at once where the time a sample is measured.
LOOKED_UP = 4096
LOOKUPS = 100
SAMPLED_WINDOWS = 100
SAMPLED_POSITIONS = 300_000
# Bytes of a sample on average, and how much that differs from shard to shard.
SAMPLE_BYTES, SAMPLE_SPREAD = 110_000, 0.2

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Setting:
    """A run to simulate.

    Args:
        samples: Samples of the dataset.
        shards: Its shards; their sizes differ up to threefold.
        ranks: Ranks of the run.
        ranks_per_node: Ranks of a node.
        workers: Reader processes of a rank.
        global_batch: Examples of a step; None: eight a rank.
        lanes: Canonical lanes; None: as many as nodes, or the next more that divide the batch.
        seed: Of sizes and order.
    """

    samples: int
    shards: int
    ranks: int
    ranks_per_node: int
    workers: int
    global_batch: int | None
    lanes: int | None
    seed: int

    def resolved(self) -> "Setting":
        """Fill in what was left out.

        Raises:
            UserError: The numbers do not fit.
        """
        counts = (self.samples, self.shards, self.ranks, self.ranks_per_node, self.workers)
        if min(counts) < 1 or self.samples < self.shards:
            raise UserError(
                "--samples, --shards, --ranks, --ranks-per-node and --workers must be at least 1, "
                f"and every shard needs a sample: got {', '.join(map(str, counts))}"
            )
        if self.ranks % self.ranks_per_node:
            raise UserError(
                f"--ranks {self.ranks} is not a multiple of --ranks-per-node {self.ranks_per_node}"
            )
        batch = self.global_batch or 8 * self.ranks
        nodes = self.ranks // self.ranks_per_node
        lanes = self.lanes or next(n for n in range(min(nodes, batch), batch + 1) if batch % n == 0)
        return Setting(**{**asdict(self), "global_batch": batch, "lanes": lanes})


def uneven_shards(setting: Setting) -> tuple[Int64, Int64]:
    """Make up shards.

    Returns:
        Samples and bytes of each.
    """
    rng = np.random.default_rng(setting.seed)
    weights = rng.uniform(0.5, 1.5, setting.shards)
    sizes = 1 + np.floor(weights / weights.sum() * (setting.samples - setting.shards)).astype(
        np.int64
    )
    sizes[: setting.samples - int(sizes.sum())] += 1
    mean_bytes = SAMPLE_BYTES * rng.lognormal(0, SAMPLE_SPREAD, setting.shards)
    return sizes, (sizes * mean_bytes).astype(np.int64)


def simulate(setting: Setting) -> dict[str, Any]:
    """Measure and check the order of a run.

    Args:
        setting: The run, resolved.

    Returns:
        For JSON, and for text_of.

    Raises:
        UserError: The numbers do not fit.
        VitscaleError: A sample is fed twice or never.
    """
    batch = setting.global_batch
    assert batch is not None, "an unresolved setting"
    sizes, num_bytes = uneven_shards(setting)
    tracemalloc.start()
    order = Order(sizes.copy(), setting.seed, batch, setting.lanes)
    # What a rank holds while a batch lies across two epochs and prefetching is in a third.
    for epoch in range(3):
        order.places(np.array([epoch * order.usable], dtype=np.int64))
    state_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    nodes = setting.ranks // setting.ranks_per_node
    share = node_share(order, sizes, num_bytes, 0, nodes, setting.ranks_per_node)
    found: dict[str, Any] = {
        "setting": asdict(setting),
        "nodes": nodes,
        "shuffle_block": order.shuffle_block,
        "state_bytes": state_bytes,
        "seek_s": _seeks(order, setting.seed, EPOCHS),
        "seek_within_epoch_s": _seeks(order, setting.seed, 1),
        "sample_s": _sample_s(order, setting),
        "step_of_rank_s": _step_s(order, setting),
        "examples_of_rank": batch // setting.ranks,
        **_balance(share, num_bytes, nodes),
        **check_exactly_once(order, sizes, setting),
    }
    return {**found, "targets": _targets(found)}


def _seeks(order: Order, seed: int, epochs: int) -> list[float]:
    rng = np.random.default_rng(seed)
    seconds = []
    for _ in range(SEEKS):
        position = rng.integers(epochs * order.usable)
        start = time.perf_counter()
        order.places(np.array([position], dtype=np.int64))
        seconds.append(time.perf_counter() - start)
    return seconds


def _sample_s(order: Order, setting: Setting) -> float:
    """Seconds a sample where one rank looks up the positions of many steps at once."""
    slots = order.rank_slots(0, setting.ranks)
    steps = -(-LOOKED_UP // len(slots))
    positions = (np.arange(steps)[:, None] * order.global_batch + slots).reshape(-1)
    order.places(positions)
    start = time.perf_counter()
    for number in range(1, LOOKUPS + 1):
        order.places(positions + number * steps * order.global_batch)
    return (time.perf_counter() - start) / (LOOKUPS * len(positions))


def _step_s(order: Order, setting: Setting) -> float:
    """Seconds a step of one rank, asked for as training does."""
    micro_batch = order.global_batch // setting.ranks
    requests = iter(TrainRequests(order, 0, setting.ranks, micro_batch, 0))
    next(requests)
    start = time.perf_counter()
    for _ in range(LOOKUPS):
        next(requests)
    return (time.perf_counter() - start) / LOOKUPS


def _balance(share: NodeShare, num_bytes: Int64, nodes: int) -> dict[str, Any]:
    even = float(num_bytes.sum()) / nodes
    result: dict[str, Any] = {"bytes_a_node_even": even}
    for name, values in (("ranged", share.lane_bytes), ("whole", share.shard_bytes)):
        ratios = values / even
        result[f"bytes_a_node_{name}"] = [float(ratios.min()), float(ratios.max())]
    return result | {
        "lanes_a_node": int(share.lanes.max()),
        "shards_a_node": int(share.shards.max()),
    }


def check_exactly_once(order: Order, sizes: Int64, setting: Setting) -> dict[str, Any]:
    """Prove that an epoch feeds every sample once: by arithmetic, and where that ends by sampling.

    Positions visit every place of every lane once; windows cover the lanes without gap or overlap;
    the shards are a permutation of all. That a window's permutation is one is tried on some.

    Args:
        order: The order.
        sizes: Samples of each shard.
        setting: Ranks and seed.

    Returns:
        What was checked.

    Raises:
        VitscaleError: It does not hold.
    """
    rng = np.random.default_rng(setting.seed)
    epoch = int(rng.integers(EPOCHS))
    table = EpochTable(sizes, order.seed, epoch, order.usable, order.lanes, order.shuffle_block)
    windows = check_table(table, sizes, rng)
    count = min(SAMPLED_POSITIONS, order.usable)
    positions = np.unique(rng.integers(order.usable, size=count)) + epoch * order.usable
    samples = order.places(positions).sample_index
    _expect(len(np.unique(samples)) == len(positions), "two positions have one sample")
    slots = [order.rank_slots(rank, setting.ranks) for rank in range(setting.ranks)]
    shared = np.sort(np.concatenate(slots))
    _expect((shared == np.arange(order.global_batch)).all(), "ranks do not share the batch evenly")
    return {
        "epoch_checked": epoch,
        "windows": windows,
        "windows_permuted": SAMPLED_WINDOWS,
        "positions_sampled": len(positions),
    }


def check_table(table: EpochTable, sizes: Int64, rng: np.random.Generator) -> int:
    """Prove that the windows of an epoch cover every sample once.

    Args:
        table: The epoch.
        sizes: Samples of each shard, by shard_id.
        rng: Chooses the windows whose permutation is tried.

    Returns:
        Windows.

    Raises:
        VitscaleError: It does not hold.
    """
    visits = np.bincount(table.shards, minlength=len(sizes))
    _expect((visits == 1).all(), "its shards are no permutation of all")
    _expect((np.diff(table.starts) == sizes[table.shards]).all(), "its shards overlap")
    starts, sizes_of_windows = _tiling(table)
    place_of = np.empty(len(sizes), dtype=np.int64)
    place_of[table.shards] = np.arange(len(sizes))
    for i in rng.integers(len(starts), size=SAMPLED_WINDOWS):
        _check_window(table, place_of, int(starts[i]), int(sizes_of_windows[i]))
    return len(starts)


def _tiling(table: EpochTable) -> tuple[Int64, Int64]:
    """Walk through the windows of all lanes at once; give their starts and sizes."""
    lane_starts, lengths = lane_bounds(table)
    _expect(int(lengths.sum()) == table.usable, "lanes do not cover the epoch")
    lanes = np.flatnonzero(lengths > 0)
    place = np.zeros(len(lanes), dtype=np.int64)
    starts, sizes = [], []
    while lanes.size:
        windows, within = table.windows(place * table.lanes + lanes)
        _expect((windows.start == lane_starts[lanes] + place).all(), "windows leave a gap")
        _expect((within == 0).all(), "windows overlap")
        _expect((windows.size > 0).all(), "a window is empty")
        starts.append(windows.start)
        sizes.append(windows.size)
        place = place + windows.size
        _expect((place <= lengths[lanes]).all(), "a window crosses the end of its lane")
        lanes, place = lanes[place < lengths[lanes]], place[place < lengths[lanes]]
    return np.concatenate(starts), np.concatenate(sizes)


def _check_window(table: EpochTable, place_of: Int64, start: int, size: int) -> None:
    lane_starts, _ = lane_bounds(table)
    lane = int(np.searchsorted(lane_starts, start, side="right")) - 1
    places = np.arange(start - int(lane_starts[lane]), start - int(lane_starts[lane]) + size)
    shard, index = table.at(*table.windows(places * table.lanes + lane))
    found = np.sort(table.starts[place_of[shard]] + index)
    _expect((found == np.arange(start, start + size)).all(), "a window is no permutation")


def _expect(holds: bool | np.bool_, problem: str) -> None:
    if not holds:
        raise VitscaleError(f"the order is wrong: {problem}")


def _targets(found: dict[str, Any]) -> list[dict[str, str]]:
    low, high = found["bytes_a_node_ranged"]
    seek, sample, state = float(np.median(found["seek_s"])), found["sample_s"], found["state_bytes"]
    return [
        target("exactly once", "proven", "proven", True),
        target(
            "bytes a node / even share",
            f"{low:.3f} to {high:.3f}",
            f"within {MAX_IMBALANCE:.0%}",
            max(high - 1, 1 - low) <= MAX_IMBALANCE,
        ),
        target(
            "state of a rank", f"{state / 1e6:.1f} MB", f"< {MAX_STATE_BYTES / 1e6:g} MB",
            state < MAX_STATE_BYTES,
        ),
        target(
            "seek, median", f"{seek * 1e3:.2f} ms", f"< {MAX_SEEK_S * 1e3:g} ms", seek < MAX_SEEK_S
        ),
        target(
            "time a sample", f"{sample * 1e6:.2f} us", f"< {MAX_SAMPLE_S * 1e6:g} us",
            sample < MAX_SAMPLE_S,
        ),
    ]  # fmt: skip


def text_of(found: dict[str, Any]) -> str:
    """Write what `simulate` found."""
    setting = found["setting"]
    within = 1e3 * float(np.median(found["seek_within_epoch_s"]))
    whole = found["bytes_a_node_whole"]
    rows = [
        ("samples, shards", f"{setting['samples']:,}, {setting['shards']:,} (uneven)"),
        (
            "ranks, nodes, readers",
            f"{setting['ranks']:,}, {found['nodes']:,}, {setting['ranks'] * setting['workers']:,}",
        ),
        (
            "global_batch, lanes, shuffle_block",
            f"{setting['global_batch']:,}, {setting['lanes']}, {found['shuffle_block']}; set "
            f"data.lanes = {setting['lanes']} in the recipe",
        ),
        (
            "bytes of a node in an epoch",
            f"{found['bytes_a_node_even'] / 1e9:,.1f} GB when even; whole shards "
            f"{whole[0]:.3f} to {whole[1]:.3f} of it; {found['shards_a_node']:,} shards of "
            f"{found['lanes_a_node']} lanes at most",
        ),
        ("seek within an epoch", f"{within:.2f} ms"),
        ("longest seek", f"{1e3 * max(found['seek_s']):.2f} ms, to another epoch"),
        (
            "a step of one rank",
            f"{found['step_of_rank_s'] * 1e6:.0f} us for {found['examples_of_rank']} examples",
        ),
        (
            "exactly once",
            f"{found['windows']:,} windows tile the lanes of epoch {found['epoch_checked']}; "
            f"{found['windows_permuted']} of them and {found['positions_sampled']:,} positions "
            "tried",
        ),
    ]
    targets = [tuple(row.values()) for row in found["targets"]]
    lines = [*table(("order", ""), rows), "", *table(("target", "found", "wanted", ""), targets)]
    return "\n".join(lines)
