"""The recipe: what is trained, as a typed, frozen tree that refuses what it does not know.

A recipe is a TOML file with these tables. Two kinds of leaf may be left out: those with a default
here, and those marked "or from the DeepSpeed JSON", which ds_json.py fills or matches.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from vitscale.config.augment import AugmentConfig
from vitscale.config.duration import Duration
from vitscale.config.model import ModelConfig
from vitscale.config.section import Section


def _checked_duration(text: Any) -> Any:
    if isinstance(text, int | float) and not isinstance(text, bool):
        raise ValueError(f'a duration needs a unit, such as "{text}steps" or "{text}epochs"')
    if isinstance(text, str):
        Duration.parse(text)
    return text


DurationText = Annotated[str, BeforeValidator(_checked_duration)]
Positive = Annotated[int, Field(gt=0)]
# Examples at a time: the bound catches slips, and keeps the search for better numbers short.
BatchSize = Annotated[int, Field(gt=0, lt=2**31)]


class BuildSection(Section):
    """Arguments of `vitscale pack` for one split."""

    # "KIND:URI", one or several.
    source: str | list[str]
    image: Literal["keep", "resize"] = "keep"
    # Longest shorter side after resizing, px.
    side: Positive = 512
    # JPEG quality of resized images.
    quality: Annotated[int, Field(ge=1, le=100)] = 90
    check: Literal["none", "header", "full"] = "header"
    shard_bytes: str = "256MB"
    # Inputs that may fail: a count or a percentage.
    max_bad: str = "0"
    workers: Positive = 1
    seed: Annotated[int, Field(ge=0)] = 0


class BuildConfig(Section):
    """How to make data.train and data.val where they do not exist yet."""

    train: BuildSection | None = None
    val: BuildSection | None = None


class TrainSet(Section):
    """One dataset of a mixture."""

    # A packed dataset: a folder, file:// or s3://bucket/prefix.
    uri: str
    # Its name in messages, metrics and checkpoints; absent: set0, set1 and so on.
    name: str | None = None
    # Its share of the examples against the other weights; in all or none of the datasets.
    weight: Annotated[float, Field(gt=0)] | None = None
    # As data.label_column and data.exclude.
    label_column: str | None = None
    exclude: str | None = None


class DataConfig(Section):
    """Which datasets are read, and how."""

    # Packed datasets: a folder, file:// or s3://bucket/prefix; or several, as [[data.train]]
    # tables with uri, weight and so on.
    train: Annotated[
        Annotated[str, Tag("<uri>")]
        | Annotated[list[TrainSet], Field(min_length=1), Tag("<sets>")],
        Discriminator(lambda value: "<uri>" if isinstance(value, str) else "<sets>"),
    ]
    val: str | None = None
    # Label column that is trained and evaluated on, stored or added; absent: the first stored one.
    # Samples without a label in an added column are left out.
    label_column: str | None = None
    # List of samples of data.train that are left out, as `vitscale dedup` writes it.
    exclude: str | None = None
    # Shares of several datasets without weights: samples to this power. 1 mixes by size, 0 evenly.
    mix_temperature: Annotated[float, Field(ge=0)] = 1.0
    # Random crops of a JPEG are decoded at full size, or at the smallest of 1/8, 1/4 and 1/2 that
    # leaves img_size px on both sides: faster for big pictures, and the pixels are others.
    jpeg_scale: Literal["exact", "fast"] = "exact"
    # Reader processes of one rank; 0 reads in the training process.
    num_workers: Annotated[int, Field(ge=0)] = 2
    # Micro-batches that each reader process prepares ahead.
    prefetch_batches: Positive = 2
    # Canonical lanes of the order; absent: the largest divisor of global_batch up to 64.
    lanes: Positive | None = None
    # Shards within which samples are shuffled.
    shuffle_block: Positive = 16
    # End of an epoch inside a batch: go on into the next epoch, or leave the remainder out.
    tail: Literal["carry", "drop"] = "carry"
    # A sample whose bytes are damaged or no picture ends the run, or another one of its window
    # stands in for it and the run remembers it.
    on_bad_sample: Literal["stop", "substitute"] = "stop"
    # Samples that a run may lose in all, and one directly after the other.
    max_bad_samples: Annotated[int, Field(ge=0)] = 1000
    max_bad_in_a_row: Positive = 32
    # Waiting for data that ends the run, s: before the collectives of the other ranks time out.
    stall_limit_s: Annotated[float, Field(ge=1, le=1700)] = 900.0
    # Copies of remote shards, shared by the ranks of a node.
    cache_dir: str = "~/.cache/vitscale/shards"
    cache_limit_bytes: Positive = 200_000_000_000
    # Bytes of remote shards that a node fetches before they are read; absent: the next window of
    # shuffle_block shards of each of its lanes, as far as the cache has room.
    prefetch_bytes: Positive | None = None
    # Downloads of shards at a time, of all ranks and jobs of a node that share cache_dir.
    downloads_per_node: Positive = 8
    build: BuildConfig | None = None

    @property
    def train_sets(self) -> list[TrainSet]:
        """The training sets, each with a name."""
        if isinstance(self.train, str):
            own = TrainSet(uri=self.train, label_column=self.label_column, exclude=self.exclude)
            return [own.model_copy(update={"name": "set0"})]
        return [
            one.model_copy(update={"name": one.name or f"set{k}"})
            for k, one in enumerate(self.train)
        ]


class LossConfig(Section):
    """What is minimised."""

    # "sigmoid" is a binary cross-entropy a class.
    name: Literal["softmax", "sigmoid"] = "softmax"
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    # Sigmoid only: the classes of an example are summed, or averaged (DeiT III).
    over_classes: Literal["sum", "mean"] = "sum"
    # Sigmoid only: both classes of a mixed example count in full (DeiT III).
    multi_hot: bool = False

    def problems(self) -> Iterator[str]:
        """Yield what is wrong between fields that are each right."""
        if self.name == "sigmoid" and self.label_smoothing:
            yield (
                f"loss.label_smoothing = {self.label_smoothing} has no meaning with "
                'loss.name = "sigmoid"; set it to 0 or use "softmax"'
            )
        if self.name == "softmax" and (self.over_classes != "sum" or self.multi_hot):
            yield (
                f'loss.over_classes = "{self.over_classes}" and loss.multi_hot = '
                f'{str(self.multi_hot).lower()} are for loss.name = "sigmoid"; leave them out'
            )


# Leaf of [optim] -> the schedules that it is for.
_SCHEDULE_OF = {
    "timescale": ("rsqrt",),
    "cooldown": ("rsqrt", "wsd"),
    "drop_at": ("step",),
    "drop_factor": ("step",),
    "min_lr": ("linear", "cosine", "rsqrt", "wsd"),
}


class OptimConfig(Section):
    """Optimizer, learning rate and averaging."""

    # "adafactor" is that of arXiv:2106.04560; "muon" moves the matrices of the blocks, AdamW with
    # the same learning rate the rest.
    name: Literal["adamw", "sgd", "lamb", "lion", "adafactor", "muon"] = "adamw"
    # Peak learning rate.
    lr: Annotated[float, Field(gt=0)]
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
    eps: Annotated[float, Field(gt=0)] = 1e-8
    # SGD, Adafactor, and Muon, where 0.95 is usual.
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    # Of kernels. Decoupled, multiplied by the learning rate, as the paper's values are; SGD: L2;
    # LAMB: part of the step whose length it sets.
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    # Of the head's kernel; absent: weight_decay.
    weight_decay_head: Annotated[float, Field(ge=0)] | None = None
    # Learning rate of a block over that of the block above it; absent: all the same.
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    # Largest norm of the whole gradient, 0 for no clipping; or from the DeepSpeed JSON.
    grad_clip_norm: Annotated[float, Field(ge=0)] | None = None
    # "rsqrt": 1 / sqrt(1 + steps / timescale); "step": lower from drop_at on; "wsd": constant
    # until the cooldown.
    schedule: Literal["constant", "linear", "cosine", "rsqrt", "step", "wsd"] = "cosine"
    # Linear warm-up from 0.
    warmup: DurationText = "0steps"
    # Learning rate at the end of the schedule.
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    # "rsqrt" only.
    timescale: DurationText = "10000steps"
    # "rsqrt" and "wsd": the last part of the run, in which the rate falls to min_lr on a line.
    cooldown: DurationText = "0steps"
    # "step" only: when the rate is multiplied by drop_factor.
    drop_at: list[DurationText] = Field(default_factory=list)
    drop_factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    # Decay a step of the averaged weights ("Polyak averaging"; the paper: 0.9999); absent: none.
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None

    def problems(self) -> Iterator[str]:
        """Yield what is wrong between fields that are each right."""
        if self.min_lr > self.lr:
            yield f"optim.min_lr = {self.min_lr} is above optim.lr = {self.lr}"
        for name, schedules in _SCHEDULE_OF.items():
            value = getattr(self, name)
            if self.schedule not in schedules and value != type(self).model_fields[
                name
            ].get_default(call_default_factory=True):
                yield (
                    f"optim.{name} = {value!r} has no meaning with optim.schedule = "
                    f'"{self.schedule}"; it is for {" and ".join(schedules)}'
                )
        if self.schedule == "wsd" and Duration.parse(self.cooldown).value == 0:
            yield 'optim.schedule = "wsd" needs optim.cooldown, such as "20%"'
        if self.schedule == "step" and not self.drop_at:
            yield 'optim.schedule = "step" needs optim.drop_at, such as ["30epochs", "60epochs"]'


class BatchConfig(Section):
    """Batch sizes; gradient accumulation follows from them and the number of ranks."""

    # Examples of one step over all ranks; or from the DeepSpeed JSON.
    global_batch: BatchSize | None = None
    # Examples of one rank in one forward pass; or from the DeepSpeed JSON; in neither: global_batch
    # divided by the number of ranks.
    micro_batch: BatchSize | None = None


class InitConfig(Section):
    """Where the first weights come from; absent: random."""

    # A run folder, a checkpoint folder or a .safetensors file (the same as --init).
    source: str | None = None
    # Take the averaged weights of the source.
    ema: bool = False
    # How position tables are brought to another grid: "google" is the paper's code (linear,
    # corners aligned), "timm" and "hf" are what those libraries do.
    pos_embed_resize: Literal["google", "timm", "hf"] = "google"


class RunSection(Section):
    """Length, rhythm and numerics of the run."""

    duration: DurationText
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    # bf16, fp16 or fp32; or from the DeepSpeed JSON; in neither: fp32.
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    # Steps between two log lines; every step has its row in metrics.jsonl all the same.
    log_every: Positive = 10
    # Absent: only at the end.
    eval_every: DurationText | None = None
    # Absent: only at the end and when stopped.
    save_every: DurationText | None = None
    # Checkpoints that are kept.
    keep_last: Positive = 2
    # Stop there as if preempted (exit code 75); the schedule keeps its full length.
    stop_at: DurationText | None = None
    # Ask torch for deterministic kernels; CPU runs are bitwise repeatable anyway.
    deterministic: bool = False
    # Leaves that may differ from those of the checkpoint that the run goes on from, where that is
    # else refused: "data.train.weight".
    allow_change: list[Literal["data.train.weight"]] = Field(default_factory=list)
    # Compile DeepSpeed's shared-memory collective for several ranks on one CPU: a minute or two
    # at the first start, and a C++ compiler.
    cpu_shm_comm: bool = False


class RunConfig(Section):
    """The whole recipe."""

    model: ModelConfig = ModelConfig()
    data: DataConfig
    augment: AugmentConfig = AugmentConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig
    batch: BatchConfig = BatchConfig()
    init: InitConfig = InitConfig()
    run: RunSection

    def problems(self) -> Iterator[str]:
        """Yield what is wrong between fields that are each right."""
        yield from self.model.problems()
        if self.model.in_chans not in (1, 3):
            yield f"model.in_chans = {self.model.in_chans}: there are 1 (grey) and 3 (RGB)"
        yield from self.augment.problems()
        yield from self.optim.problems()
        yield from self.loss.problems()
        if self.data.build is not None and self.data.build.val and self.data.val is None:
            yield (
                "data.build.val is given but data.val does not say where to; give both or neither"
            )
        yield from self._mixture_problems()
        batch, lanes = self.batch.global_batch, self.data.lanes
        if batch and lanes and batch % lanes:
            yield (
                f"data.lanes = {lanes} must divide batch.global_batch = {batch}; "
                f"the nearest that do: {nearest_divisors(batch, lanes)}"
            )
        for name in ("eval_every", "save_every", "stop_at", "duration"):
            text = getattr(self.run, name)
            if text is None:
                continue
            duration = Duration.parse(text)
            if duration.value == 0:
                yield f'run.{name} = "{text}" must be longer than nothing'
            if name == "duration" and duration.unit == "%":
                yield f'run.duration = "{text}": a run cannot be a percentage of itself'

    def _mixture_problems(self) -> Iterator[str]:
        if isinstance(self.data.train, str):
            return
        sets = self.data.train_sets
        names = [one.name for one in sets]
        if len(set(names)) < len(names):
            yield f"data.train: the names {names} repeat; give every dataset another `name`"
        weighted = [one.name for one in sets if one.weight is not None]
        if weighted and len(weighted) < len(sets):
            yield (
                f"data.train: {', '.join(map(str, weighted))} have a weight and the others none; "
                "give all of them one, or none"
            )
        if weighted and self.data.mix_temperature != 1.0:
            yield (
                f"data.mix_temperature = {self.data.mix_temperature} has no meaning beside weights "
                "in data.train; remove one of them"
            )
        for leaf in ("label_column", "exclude"):
            if getattr(self.data, leaf) is not None:
                yield f"data.{leaf}: several datasets have each their own, in [[data.train]]"


def nearest_divisors(number: int, wish: int) -> str:
    """Name the divisors of a number that are nearest to a wish."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    divisors = {d for low in small for d in (low, number // low)}
    nearest = sorted(divisors, key=lambda d: (abs(d - wish), d))[:3]
    return ", ".join(str(d) for d in sorted(nearest))
