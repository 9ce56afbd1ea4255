"""What `vitscale doctor` looks at: each check gives findings, with figures and advice."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vitscale.config.errors import UserError
from vitscale.config.recipe import RunConfig, nearest_divisors
from vitscale.data.cache import ShardCache
from vitscale.data.dataset import Dataset
from vitscale.data.manifest import index_name
from vitscale.data.node_share import NodeShare, node_share
from vitscale.data.order import Order
from vitscale.data.prefetch import build_walks, choose_prefetch_bytes, node_lanes
from vitscale.data.s3_storage import READ_BYTES
from vitscale.data.shuffle_quality import measure_shuffle

# GET and HEAD requests a second that S3 promises for a prefix. Source: Amazon S3 user guide,
# "Best practices design patterns: optimizing Amazon S3 performance".
STORE_GETS_PER_S = 5500
# Label entropy of a batch that may be missing.
MAX_ENTROPY_LOST = 0.02
# Bytes of a node above the even share, from which on it is worth another number of lanes.
MAX_UNEVEN = 0.10
# Objects that are named in a message; the others are counted.
NAMED = 3
# Memory of a row of a shard's index beside its key, and of a shard in the manifest's tables and
# the order's: counted from their arrays and strings (reader.py, manifest.py, windows.py).
INDEX_ROW_BYTES, SHARD_ROW_BYTES = 40, 450
KEY_BYTES = 12

Level = Literal["ok", "warning", "failure", "damage"]


@dataclass(frozen=True)
class Finding:
    """Something that was found.

    Args:
        level: "warning": it will do less well; "failure": it will not run; "damage": data are not
            there.
        subject: What it is about.
        text: Figures, in a sentence.
        advice: What to do, unless all is well.
    """

    level: Level
    subject: str
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Plan:
    """A run over a dataset.

    Args:
        config: The recipe.
        dataset: The training set.
        order: Its order.
        num_nodes: Nodes.
        num_ranks: Ranks on all nodes.
        images_per_s: Rate of the whole run; None: not known.
    """

    config: RunConfig
    dataset: Dataset
    order: Order
    num_nodes: int
    num_ranks: int
    images_per_s: float | None

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a node."""
        return self.num_ranks // self.num_nodes

    @property
    def micro_batch(self) -> int:
        """Examples of one rank in one forward pass."""
        return self.config.batch.micro_batch or self.order.global_batch // self.num_ranks

    @property
    def is_remote(self) -> bool:
        """Whether shards go through the cache."""
        names = self.dataset.manifest.shards.names
        return self.dataset.storage.local_path(names[0]) is None

    def share(self) -> NodeShare:
        """Count what the nodes read in the first epoch."""
        shards = self.dataset.manifest.shards
        return node_share(
            self.order,
            shards.num_samples,
            shards.num_bytes,
            0,
            self.num_nodes,
            self.ranks_per_node,
        )


def check_objects(plan: Plan) -> Iterator[Finding]:
    """Are all shards there, with their sizes, and their indexes?"""
    storage, shards = plan.dataset.storage, plan.dataset.manifest.shards
    found = storage.sizes()
    wanted = dict(zip(shards.names, shards.num_bytes.tolist(), strict=True))
    missing = [name for name in wanted if name not in found]
    missing += [name for name in map(index_name, wanted) if name not in found]
    other = [
        f"{name} has {found[name]:,} bytes, {size:,} are due"
        for name, size in wanted.items()
        if found.get(name, size) != size
    ]
    for problem, rows in (("missing", missing), ("of another size", other)):
        if rows:
            yield Finding(
                "damage",
                "objects",
                f"{len(rows):,} objects are {problem}: {_named(rows)}",
                f"`vitscale verify {storage.uri} --repair`, or pack again",
            )
    if not missing and not other:
        total = sum(wanted.values())
        text = f"all {len(wanted):,} shards are there, {_size(total)}, and their indexes"
        yield Finding("ok", "objects", text)


def check_epoch(plan: Plan) -> Iterator[Finding]:
    """How long is an epoch?"""
    order = plan.order
    steps = order.steps_per_epoch
    text = (
        f"{order.usable:,} samples of {order.num_samples:,} in {steps:,.2f} steps of "
        f"{order.global_batch:,} an epoch, {order.global_batch // plan.num_ranks} a rank"
    )
    if steps < 1:
        advice = "every batch repeats samples; lower batch.global_batch"
        yield Finding("warning", "epoch", text, advice)
    else:
        yield Finding("ok", "epoch", text)


def check_share(plan: Plan) -> Iterator[Finding]:
    """Do the nodes read about the same, and each only its part?"""
    share, order = plan.share(), plan.order
    total = float(plan.dataset.manifest.num_bytes)
    even = total / plan.num_nodes
    most = float(share.lane_bytes.max())
    text = (
        f"{_size(most)} a node and epoch at most ({_size(float(share.shard_bytes.max()))} with "
        f"whole shards), {_size(even)} when even; {int(share.lanes.max())} of {order.lanes} lanes"
    )
    if most <= even * (1 + MAX_UNEVEN) or plan.num_nodes == 1:
        yield Finding("ok", "bytes of a node", text)
        return
    batch, nodes = order.global_batch, plan.num_nodes
    fits = [n for n in range(nodes, batch + 1, nodes) if batch % n == 0]
    advice = f"nodes share lanes: set data.lanes to a multiple of {nodes} that divides {batch}"
    advice += (
        f", such as {fits[0]}" if fits else f"; there is none, take another batch than {batch}"
    )
    yield Finding("warning", "bytes of a node", text, advice)


def check_cache(plan: Plan) -> Iterator[Finding]:
    """Does the cache hold what a node reads at a time?"""
    if not plan.is_remote:
        yield Finding("ok", "cache", "not needed, shards are read where they are")
        return
    data, dataset = plan.config.data, plan.dataset
    limit = data.cache_limit_bytes
    try:
        cache = ShardCache(dataset.storage, dataset.manifest, data.cache_dir, limit)
        ranks = range(plan.ranks_per_node)
        lanes = node_lanes(plan.order, ranks, plan.num_ranks)
        walks = build_walks(plan.order, [cache], lanes, 0)
        ahead = choose_prefetch_bytes(walks, limit, data.prefetch_bytes)
    except UserError as error:
        advice = "raise data.cache_limit_bytes, lower data.shuffle_block, or use more nodes"
        yield Finding("failure", "cache", str(error), advice)
        return
    window = sum(walk.window_bytes for walk in walks)
    text = (
        f"{_size(window)} are read at a time on a node and {_size(ahead)} fetched ahead; "
        f"data.cache_limit_bytes = {_size(limit)}"
    )
    if int(plan.share().shard_bytes.max()) <= limit and plan.num_nodes == 1:
        text += ", which holds the whole dataset"
    yield Finding("ok", "cache", text)


def check_requests(plan: Plan) -> Iterator[Finding]:
    """Is the store fast enough?"""
    if not plan.is_remote:
        yield Finding("ok", "requests", "none, shards are read where they are")
        return
    manifest, share = plan.dataset.manifest, plan.share()
    sizes = manifest.shards.num_bytes
    # Shards that several nodes touch are fetched by each; a shard brings its index along.
    repeats = float(share.shards.sum()) / max(len(sizes), 1)
    gets = float((np.ceil(sizes / READ_BYTES) + 1).sum()) * repeats
    bytes_a_sample = float(share.shard_bytes.sum()) / manifest.num_samples
    gets_a_sample = gets / manifest.num_samples
    most = STORE_GETS_PER_S / gets_a_sample
    if plan.images_per_s is None:
        text = (
            f"{_size(bytes_a_sample)} an image; {STORE_GETS_PER_S:,} GETs a second, as S3 allows a "
            f"prefix, last for {most:,.0f} images/s; give --rate for more"
        )
        yield Finding("ok", "requests", text)
        return
    rate = plan.images_per_s
    node_bits = 8 * rate * bytes_a_sample / plan.num_nodes
    text = (
        f"{rate * gets_a_sample:,.1f} GETs a second for {rate:,.0f} images/s, of "
        f"{STORE_GETS_PER_S:,} that S3 allows a prefix; {node_bits / 1e9:,.2f} Gbit/s a node"
    )
    if rate > most:
        yield Finding("warning", "requests", text, "pack larger shards (--shard-bytes)")
    else:
        yield Finding("ok", "requests", text)


def check_memory(plan: Plan) -> Iterator[Finding]:
    """What does the loader hold?"""
    data, model, shards = plan.config.data, plan.config.model, plan.dataset.manifest.shards
    share = plan.share()
    lanes_a_rank = -(-int(share.lanes.max()) // plan.ranks_per_node)
    is_open = min(lanes_a_rank * (plan.order.shuffle_block + 1), len(shards))
    rows = is_open * float(shards.num_samples.mean())
    readers = data.num_workers * rows * (INDEX_ROW_BYTES + KEY_BYTES)
    slots = data.num_workers * data.prefetch_batches + 2
    batches = slots * plan.micro_batch * model.in_chans * model.img_size**2
    tables = len(shards) * SHARD_ROW_BYTES
    node = plan.ranks_per_node * (readers + batches + tables)
    text = (
        f"about {_size(node)} a node beside the programs: for each of {plan.ranks_per_node} ranks "
        f"{_size(batches)} of batches in shared memory, {_size(readers)} of indexes in "
        f"{data.num_workers} readers, {_size(tables)} of tables"
    )
    yield Finding("ok", "memory", text)


def check_shuffle(plan: Plan) -> Iterator[Finding]:
    """Are batches mixed as independent draws would be?"""
    found = measure_shuffle(plan.dataset, plan.order, plan.config.run.seed)
    block, lanes = plan.order.shuffle_block, plan.order.lanes
    advice = (
        f"raise data.shuffle_block above {block}"
        + (f" or data.lanes above {lanes}" if lanes < len(plan.dataset.manifest.shards) else "")
        + ", or pack again: `vitscale pack` shuffles over all shards, `vitscale index` keeps the "
        "order that is there"
    )
    text = (
        f"{found.entropy:.3f} bits of label entropy a batch, independent draws have "
        f"{found.iid_entropy:.3f}: {found.entropy_lost:+.1%} lost ({found.num_batches} batches, "
        f"{found.num_classes:,} classes)"
    )
    level: Level = "warning" if found.entropy_lost > MAX_ENTROPY_LOST else "ok"
    yield Finding(level, "shuffle", text, advice if level == "warning" else "")
    text = (
        f"longest run of one class {found.longest_run} slots; independent draws stay within "
        f"{found.iid_longest_run} in 999 of 1000 cases"
    )
    level = "warning" if found.longest_run > found.iid_longest_run else "ok"
    yield Finding(level, "runs", text, advice if level == "warning" else "")


CHECKS: list[Callable[[Plan], Iterator[Finding]]] = [
    check_objects,
    check_epoch,
    check_share,
    check_cache,
    check_requests,
    check_memory,
    check_shuffle,
]


def check_division(
    global_batch: int, micro_batch: int | None, ranks: int, nodes: int
) -> list[Finding]:
    """Do the ranks share the batch evenly? The other checks need that.

    Args:
        global_batch: Examples of a step.
        micro_batch: Examples of a rank in one forward pass; None: all it has.
        ranks: Ranks on all nodes.
        nodes: Nodes.
    """
    found = []
    if ranks % nodes:
        text = f"{ranks} ranks on {nodes} nodes are not the same number on each"
        found.append(Finding("failure", "ranks", text, "change --ranks or --nodes"))
    if global_batch % ranks:
        text = f"batch.global_batch = {global_batch} is not shared evenly by {ranks} ranks"
        advice = f"ranks that divide it: {nearest_divisors(global_batch, ranks)}"
        found.append(Finding("failure", "ranks", text, advice))
    elif micro_batch and (global_batch // ranks) % micro_batch:
        share = global_batch // ranks
        text = f"batch.micro_batch = {micro_batch} does not divide the {share} examples of a rank"
        advice = f"micro-batches that do: {nearest_divisors(share, micro_batch)}"
        found.append(Finding("failure", "ranks", text, advice))
    return found


def _named(rows: list[str]) -> str:
    more = f" and {len(rows) - NAMED:,} more" if len(rows) > NAMED else ""
    return "; ".join(rows[:NAMED]) + more


def _size(num_bytes: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"
