"""The data of a training run: its datasets, their order, what is bad in them, and the loaders."""

from typing import Any

from vitscale.config.recipe import RunConfig
from vitscale.data.dataset import open_dataset
from vitscale.data.loader import EvalLoader, TrainLoader, build_eval_loader, build_train_loader
from vitscale.data.manifest import Manifest
from vitscale.data.mixture import Mixture
from vitscale.data.quarantine import Quarantine
from vitscale.data.stall import StallWatch
from vitscale.data.train_sets import build_audits, build_order, open_train_sets
from vitscale.distributed import World
from vitscale.observe.log import RunLog


class RunData:
    """What a run reads.

    Args:
        config: The resolved recipe.
        world: This process's place.
        micro_batch: Examples of one micro-batch.
        log: Where a wait for data is told.
    """

    def __init__(self, config: RunConfig, world: World, micro_batch: int, log: RunLog) -> None:
        self._config, self._world, self._micro_batch = config, world, micro_batch
        self._log = log
        data = config.data
        self.sets = open_train_sets(data)
        self.val = open_dataset(data.val, data.label_column) if data.val else None
        assert config.batch.global_batch is not None
        self.order = build_order(data, self.manifests, config.run.seed, config.batch.global_batch)
        self.audits = build_audits(self.order, self.manifests)
        self.quarantine = Quarantine(data.max_bad_samples, data.max_bad_in_a_row)

    @property
    def manifests(self) -> list[Manifest]:
        """Of the training sets."""
        return [one.manifest for one in self.sets]

    def take_over(self, saved: dict[str, Any]) -> None:
        """Bring quarantine and order to where a checkpoint left them.

        Args:
            saved: Its state.json; the same on all ranks.

        Raises:
            UserError: The batches would be others.
        """
        self.quarantine.load(saved.get("quarantine", []))
        self.order.quarantine([bad.sample_index for bad in self.quarantine.samples])
        if isinstance(self.order, Mixture):
            may_change = "data.train.weight" in self._config.run.allow_change
            self.order.go_on_from(saved["order"], may_change_weights=may_change)
        else:
            self.order.check_state(saved["order"])

    def load_audits(self, saved: dict[str, Any]) -> None:
        """Go on counting from a checkpoint; on one rank only."""
        for audit, totals in zip(self.audits, saved["audit"], strict=True):
            audit.load({int(epoch): values for epoch, values in totals.items()})

    def train_loader(self, start_step: int, *, pin_memory: bool) -> TrainLoader:
        """Start the readers of the training set, watched; close the loader when done.

        Args:
            start_step: Completed updates.
            pin_memory: Whether batches go to an accelerator.
        """
        config = self._config
        loader = build_train_loader(
            config.data,
            config.augment,
            self.sets,
            order=self.order,
            img_size=config.model.img_size,
            in_chans=config.model.in_chans,
            rank=self._world.rank,
            world_size=self._world.world_size,
            micro_batch=self._micro_batch,
            start_step=start_step,
            seed=config.run.seed,
            pin_memory=pin_memory,
            node_ranks=self._world.node_ranks,
        )
        loader.on_wait = StallWatch(
            self._world.rank,
            config.data.stall_limit_s,
            loader.states,
            loader.readers.print_stacks,
            self._log.warn,
        )
        return loader

    def val_loader(self, *, pin_memory: bool) -> EvalLoader | None:
        """Build the loader of the validation set, where the recipe has one."""
        if self.val is None:
            return None
        config = self._config
        return build_eval_loader(
            config.data,
            config.augment,
            self.val.storage,
            self.val.manifest,
            img_size=config.model.img_size,
            in_chans=config.model.in_chans,
            rank=self._world.rank,
            world_size=self._world.world_size,
            micro_batch=self._micro_batch,
            pin_memory=pin_memory,
        )
