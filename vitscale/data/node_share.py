"""What each node reads in an epoch: the bytes of the lanes that its ranks take their slots from.

A lane is cut out of the epoch's sequence of shards, so its first and last shard may also belong to
its neighbours. Its samples are shuffled within windows: a node that has any slot of a lane needs
all of the lane's bytes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitscale.data.order import Order
from vitscale.data.windows import EpochTable

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class NodeShare:
    """What the nodes of a run read in one epoch; arrays with a value a node."""

    # Lanes that the node reads from.
    lanes: Int64
    # Bytes of these lanes, and of all shards that they touch.
    lane_bytes: NDArray[np.float64]
    shard_bytes: Int64
    # Shards that they touch.
    shards: Int64


def lanes_of_nodes(order: Order, num_nodes: int, ranks_per_node: int) -> list[Int64]:
    """Find the lanes that each node reads from.

    Args:
        order: The order of the run.
        num_nodes: Nodes.
        ranks_per_node: Ranks on each, neighbouring ones.

    Returns:
        Ascending lanes, for every node.
    """
    world_size = num_nodes * ranks_per_node
    found = []
    for node in range(num_nodes):
        ranks = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        slots = np.concatenate([order.rank_slots(rank, world_size) for rank in ranks])
        found.append(np.unique(slots % order.lanes))
    return found


def lane_bounds(table: EpochTable) -> tuple[Int64, Int64]:
    """Find where each lane begins in the epoch's sequence of samples, and how many it feeds."""
    lanes = np.arange(table.lanes, dtype=np.int64)
    whole, rest = divmod(table.usable, table.lanes)
    lengths = whole + (lanes < rest)
    return np.cumsum(lengths) - lengths, lengths


def node_share(
    order: Order,
    shard_samples: Int64,
    shard_bytes: Int64,
    epoch: int,
    num_nodes: int,
    ranks_per_node: int,
) -> NodeShare:
    """Count what every node reads in an epoch.

    Args:
        order: The order of the run.
        shard_samples: Samples of each shard, by shard_id.
        shard_bytes: Bytes of each shard.
        epoch: Which epoch.
        num_nodes: Nodes.
        ranks_per_node: Ranks on each.

    Returns:
        The shares.
    """
    block = order.shuffle_block
    table = EpochTable(shard_samples, order.seed, epoch, order.usable, order.lanes, block)
    ends_bytes = np.concatenate([[0], np.cumsum(shard_bytes[table.shards])])
    starts, lengths = lane_bounds(table)
    ends = starts + lengths
    by_place = np.interp([starts, ends], table.starts, ends_bytes)
    first = np.searchsorted(table.starts, starts, side="right") - 1
    last = np.searchsorted(table.starts, ends, side="left")
    # A dataset with fewer samples than lanes leaves lanes empty.
    last = np.where(lengths > 0, last, first)
    lanes = lanes_of_nodes(order, num_nodes, ranks_per_node)
    whole, touched = [], []
    for own in lanes:
        shards = _union(first[own], last[own])
        touched.append(len(shards))
        whole.append(int(shard_bytes[table.shards[shards]].sum()))
    return NodeShare(
        lanes=np.array([len(own) for own in lanes]),
        lane_bytes=np.array([float((by_place[1] - by_place[0])[own].sum()) for own in lanes]),
        shard_bytes=np.array(whole, dtype=np.int64),
        shards=np.array(touched, dtype=np.int64),
    )


def _union(first: Int64, last: Int64) -> Int64:
    """Give the places that lie in any of some stretches."""
    parts = [np.arange(a, b, dtype=np.int64) for a, b in zip(first, last, strict=True)]
    return np.unique(np.concatenate(parts))
