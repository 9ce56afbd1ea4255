"""The training data of a recipe: one dataset or several, and the order over them."""

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from vitscale.config.errors import UserError
from vitscale.config.recipe import DataConfig, TrainSet
from vitscale.data.audit import EpochAudit
from vitscale.data.dataset import Dataset, open_dataset
from vitscale.data.manifest import Manifest, load_class_names
from vitscale.data.mixture import Mixture, Source
from vitscale.data.order import Order, default_lanes
from vitscale.data.permute import stream
from vitscale.data.storage import Storage
from vitscale.data.view import check_trainable


def open_train_sets(config: DataConfig) -> list[Dataset]:
    """Open what the recipe trains on.

    Args:
        config: The recipe's [data].

    Returns:
        The datasets, as the recipe lists them.

    Raises:
        UserError: One is not there, has no such label column, or has other classes than the first.
    """
    found: list[Dataset] = []
    for one in config.train_sets:
        data = open_dataset(one.uri, one.label_column, one.exclude)
        check_trainable(one.uri, data.manifest)
        if found:
            check_same_classes(
                f"data.train {one.name}", data.storage, data.manifest,
                "the first one", found[0].storage, found[0].manifest,
            )  # fmt: skip
        found.append(data)
    return found


def check_same_classes(
    name: str, storage: Storage, manifest: Manifest, first: str, other: Storage, known: Manifest
) -> None:
    """Refuse a dataset whose labels mean something else.

    Args:
        name: What it is, for the message.
        storage: The dataset.
        manifest: Its manifest.
        first: What it is compared with.
        other: That dataset.
        known: Its manifest.

    Raises:
        UserError: The class lists differ; names the first difference.
    """
    if manifest.labels_sha256 == known.labels_sha256:
        return
    names = load_class_names(other, known), load_class_names(storage, manifest)
    if names[0] == names[1]:
        return
    pairs = zip_longest(*names, fillvalue="nothing")
    label, (one, two) = next((k, pair) for k, pair in enumerate(pairs) if pair[0] != pair[1])
    raise UserError(
        f"{name} = {storage.uri} has other classes than {first} = {other.uri}: {len(names[1])} and "
        f"{len(names[0])}, and label {label} is {two!r} in one and {one!r} in the other. Pack both "
        "from folders with the same classes"
    )


def build_order(
    config: DataConfig, manifests: Sequence[Manifest], seed: int, global_batch: int
) -> Order | Mixture:
    """Build the order of a run.

    Args:
        config: The recipe's [data].
        manifests: Of its datasets.
        seed: Seed of the run.
        global_batch: Examples of one step over all ranks.

    Returns:
        The order of the one dataset, or the mixture of several.

    Raises:
        UserError: The values contradict each other.
    """
    lanes = config.lanes
    if lanes is None:
        # As many whole lanes as the smallest dataset allows.
        shards = min(int(np.count_nonzero(m.shards.num_samples)) for m in manifests)
        lanes = default_lanes(global_batch, shards)
    orders = [
        Order(
            manifest.shards.num_samples,
            seed if len(manifests) == 1 else stream(seed, "source", k),
            global_batch,
            lanes,
            config.shuffle_block,
            config.tail,
            dataset_digest=manifest.samples_sha256,
        )
        for k, manifest in enumerate(manifests)
    ]
    if len(orders) == 1:
        return orders[0]
    weights = _weights(config, config.train_sets, manifests)
    return Mixture(
        [
            Source(str(one.name), order, weight)
            for one, order, weight in zip(config.train_sets, orders, weights, strict=True)
        ]
    )


def _weights(
    config: DataConfig, sets: Sequence[TrainSet], manifests: Sequence[Manifest]
) -> list[float]:
    return [
        one.weight or float(manifest.num_samples) ** config.mix_temperature
        for one, manifest in zip(sets, manifests, strict=True)
    ]


def build_audits(order: Order | Mixture, manifests: Sequence[Manifest]) -> list[EpochAudit]:
    """Expect of every dataset what its manifest promises.

    Args:
        order: The order of the run.
        manifests: Of its datasets.
    """
    orders = [order] if isinstance(order, Order) else [source.order for source in order.sources]
    return [
        EpochAudit.expecting(manifest, own) for manifest, own in zip(manifests, orders, strict=True)
    ]
