"""The recipe: what is trained, as a typed, frozen tree that refuses what it does not know.

A recipe is a TOML file with these tables. Two kinds of leaf may be left out: those with a default
here, and those marked "or from the DeepSpeed JSON", which ds_json.py fills or matches.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from vitscale.config.duration import Duration
from vitscale.config.variants import resolve_shape


def _checked_duration(text: Any) -> Any:
    if isinstance(text, int | float) and not isinstance(text, bool):
        raise ValueError(f'a duration needs a unit, such as "{text}steps" or "{text}epochs"')
    if isinstance(text, str):
        Duration.parse(text)
    return text


DurationText = Annotated[str, BeforeValidator(_checked_duration)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(gt=0)]
# Examples at a time: the bound catches slips, and keeps the search for better numbers short.
BatchSize = Annotated[int, Field(gt=0, lt=2**31)]
Rgb = tuple[float, float, float]


class Section(BaseModel):
    """Base of all tables: unknown keys refused, nothing coerced, nothing changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    """Shape of the Vision Transformer and its head."""

    # Size letter and patch side in px: "Ti/16", "B/32", "H/14"; any patch side is allowed.
    variant: str = "B/16"
    # Input side, px; a multiple of the patch.
    img_size: Positive = 224
    in_chans: Positive = 3
    # Classes of the head; absent: as many as the training set has.
    num_classes: Annotated[int, Field(ge=0)] | None = None
    # Overrides of the variant's size.
    embed_dim: Positive | None = None
    depth: Positive | None = None
    num_heads: Positive | None = None
    mlp_dim: Positive | None = None
    class_token: bool = True
    # What the head reads: the class token, or the average over the patch tokens.
    global_pool: Literal["token", "avg"] = "token"
    pos_embed: Literal["learned", "sincos2d"] = "learned"
    qkv_bias: bool = True
    # "mlp" is the paper's pre-training head: one hidden layer with tanh (arXiv:2010.11929, 3.1).
    head: Literal["linear", "mlp"] = "linear"
    # Initial bias of the head; -10 suits the sigmoid loss over many classes.
    head_bias: float = 0.0
    # "gelu" is the erf form (timm), "gelu_tanh" the approximation that the paper's code uses.
    act: Literal["gelu", "gelu_tanh"] = "gelu"
    norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    # Dropout after the position embedding, the attention projection and both MLP layers.
    drop_rate: Annotated[float, Field(ge=0, lt=1)] = 0.0
    # Recompute the blocks' activations in the backward pass: less memory, about a third more work.
    grad_checkpointing: bool = False


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


class DataConfig(Section):
    """Which datasets are read, and how."""

    # Packed datasets: a folder, file:// or s3://bucket/prefix.
    train: str
    val: str | None = None
    # Label column that is trained and evaluated on, stored or added; absent: the first stored one.
    # Samples without a label in an added column are left out.
    label_column: str | None = None
    # List of samples of data.train that are left out, as `vitscale dedup` writes it.
    exclude: str | None = None
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
    # Copies of remote shards, shared by the ranks of a node.
    cache_dir: str = "~/.cache/vitscale/shards"
    cache_limit_bytes: Positive = 200_000_000_000
    build: BuildConfig | None = None


class AugmentConfig(Section):
    """From the stored picture to the model's input."""

    # "inception": random area and aspect (arXiv:1409.4842); "resize": the whole picture, squared.
    train_crop: Literal["inception", "resize"] = "inception"
    # Area of the crop as a fraction of the picture: least, most.
    crop_scale: tuple[Fraction, Fraction] = (0.05, 1.0)
    # Width over height of the crop: least, most.
    crop_ratio: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (0.75, 4 / 3)
    # Probability of a horizontal flip.
    hflip: Fraction = 0.5
    # "center": shorter side to img_size / eval_crop_ratio, then the middle; "resize": squared.
    eval_crop: Literal["center", "resize"] = "center"
    # 224 of 256 px, as in the paper's code base.
    eval_crop_ratio: Annotated[float, Field(gt=0, le=1)] = 0.875
    # Normalisation of values in 0..1; one half each gives the paper's -1..1.
    mean: Rgb = (0.5, 0.5, 0.5)
    std: Rgb = (0.5, 0.5, 0.5)


class LossConfig(Section):
    """What is minimised."""

    # "sigmoid" is a binary cross-entropy a class, summed over the classes.
    name: Literal["softmax", "sigmoid"] = "softmax"
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0


class OptimConfig(Section):
    """Optimizer, learning rate and averaging."""

    name: Literal["adamw", "sgd"] = "adamw"
    # Peak learning rate.
    lr: Annotated[float, Field(gt=0)]
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
    eps: Annotated[float, Field(gt=0)] = 1e-8
    # SGD only.
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    # AdamW: decoupled, multiplied by the learning rate, as the paper's values are; SGD: L2.
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    # Largest norm of the whole gradient, 0 for no clipping; or from the DeepSpeed JSON.
    grad_clip_norm: Annotated[float, Field(ge=0)] | None = None
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    # Linear warm-up from 0.
    warmup: DurationText = "0steps"
    # Learning rate at the end of the schedule.
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    # Decay a step of the averaged weights ("Polyak averaging"; the paper: 0.9999); absent: none.
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None


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
        try:
            resolve_shape(self.model)
        except ValueError as error:
            yield str(error)
        if self.model.in_chans not in (1, 3):
            yield f"model.in_chans = {self.model.in_chans}: there are 1 (grey) and 3 (RGB)"
        for name in ("crop_scale", "crop_ratio"):
            least, most = getattr(self.augment, name)
            if least > most:
                yield f"augment.{name} = [{least}, {most}]: the first value must not be the larger"
        if min(self.augment.std) <= 0:
            yield f"augment.std = {list(self.augment.std)}: every value must be above 0"
        if self.optim.min_lr > self.optim.lr:
            yield f"optim.min_lr = {self.optim.min_lr} is above optim.lr = {self.optim.lr}"
        if self.loss.name == "sigmoid" and self.loss.label_smoothing:
            yield (
                f"loss.label_smoothing = {self.loss.label_smoothing} has no meaning with "
                'loss.name = "sigmoid"; set it to 0 or use "softmax"'
            )
        if self.data.build is not None and self.data.build.val and self.data.val is None:
            yield (
                "data.build.val is given but data.val does not say where to; give both or neither"
            )
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


def nearest_divisors(number: int, wish: int) -> str:
    """Name the divisors of a number that are nearest to a wish."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    divisors = {d for low in small for d in (low, number // low)}
    nearest = sorted(divisors, key=lambda d: (abs(d - wish), d))[:3]
    return ", ".join(str(d) for d in sorted(nearest))
