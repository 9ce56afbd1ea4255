"""The DeepSpeed JSON: read strictly, and filled from or matched with the recipe.

DeepSpeed 0.19.8 ignores misspelt top-level keys, reads `"bf16": {"enabled": "auto"}` as off and
clips at 1.0 when `gradient_clipping` is absent. So nothing is left to it: unknown keys are refused
here, "auto" never reaches it, and whatever has a meaning is written out in the effective JSON.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitscale.config.ds_keys import sound_part
from vitscale.config.recipe import RunConfig, nearest_divisors

# Parameters of an optimizer block, which are leaves of the recipe's [optim] table too.
OPTIMIZER_PARAMS = ("lr", "betas", "eps", "weight_decay", "momentum")


@dataclass(frozen=True)
class Batch:
    """The batch arithmetic of a run: global_batch = micro_batch * grad_accum * world_size."""

    global_batch: int
    micro_batch: int
    grad_accum: int
    world_size: int


@dataclass(frozen=True)
class Resolved:
    """A recipe and a DeepSpeed JSON that agree.

    Args:
        config: The recipe with every shared leaf filled.
        ds: What goes to deepspeed.initialize; holds no "auto".
        batch: The batch arithmetic.
    """

    config: RunConfig
    ds: dict[str, Any]
    batch: Batch

    @property
    def zero_stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        return int(self.ds["zero_optimization"]["stage"])


def load_ds_json(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Read a DeepSpeed JSON; a key given twice is a problem, not the last one's victory.

    Returns:
        Its sound part, which can still be matched with a recipe, and all problems found.
    """
    twice: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice.extend(sorted({key for key in keys if keys.count(key) > 1}))
        return dict(pairs)

    try:
        ds = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return {}, [f"{path} is not JSON: {error}"]
    if not isinstance(ds, dict):
        return {}, [f"{path} must hold one JSON object, got {type(ds).__name__}"]
    problems = [f"key {key!r} is given twice; keep one" for key in twice]
    sound = sound_part(ds, problems)
    return sound, [f"{path}: {text}" for text in problems]


class _Match:
    """Fill-or-match of one recipe with one JSON, collecting what does not agree."""

    def __init__(
        self, config: RunConfig, ds: dict[str, Any], recipe_name: str, ds_name: str
    ) -> None:
        self.config, self.ds = config, ds
        self.recipe_name, self.ds_name = recipe_name, ds_name
        self.problems: list[str] = []

    def shared(self, ds_key: str, leaf: str, value: Any) -> Any:
        """Return the agreed value of a leaf that both documents may set."""
        given = self.ds.get(ds_key)
        if given is None or given == "auto":
            return value
        if value is None or value == given:
            return given
        self.conflict(leaf, value, ds_key, given)
        return value

    def conflict(self, leaf: str, value: Any, ds_key: str, given: Any) -> None:
        self.problems.append(
            f"{leaf} = {value} in {self.recipe_name} contradicts {ds_key} = {given} in "
            f"{self.ds_name}; change one, or leave it out of the JSON"
        )

    def precision(self) -> str:
        wish = self.config.run.precision
        enabled = {kind: self.ds.get(kind, {}).get("enabled") for kind in ("bf16", "fp16")}
        if enabled["bf16"] is True and enabled["fp16"] is True:
            self.problems.append(f"{self.ds_name}: bf16 and fp16 are both enabled; keep one")
        given = next((kind for kind, on in enabled.items() if on is True), None)
        if given is None and any(on is False for on in enabled.values()):
            given = "fp32" if wish in (None, "fp32") or enabled.get(wish) is False else None
        if wish is not None and given is not None and wish != given:
            self.conflict("run.precision", wish, "bf16/fp16", given)
        return wish or given or "fp32"

    def batch(self, world_size: int) -> Batch | None:
        batch = self.config.batch
        total = self.shared("train_batch_size", "batch.global_batch", batch.global_batch)
        micro = self.shared(
            "train_micro_batch_size_per_gpu", "batch.micro_batch", batch.micro_batch
        )
        accum = self.shared("gradient_accumulation_steps", "grad_accum", None)
        if total is None:
            self.problems.append(
                f"batch.global_batch is missing: set it in {self.recipe_name}, or train_batch_size "
                f"in {self.ds_name}"
            )
            return None
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
        if micro is None:
            share = world_size * (accum or 1)
            if total % share:
                times = f" in {accum} gradient_accumulation_steps" if accum else ""
                self.problems.append(
                    f"batch.global_batch = {total} cannot be split over {ranks}{times}; "
                    f"the nearest that can: {_multiples(total, share)}"
                )
                return None
            micro = total // share
        if total % (micro * world_size):
            self.problems.append(
                f"batch.global_batch = {total} cannot be split into micro-batches of "
                f"batch.micro_batch = {micro} on {ranks}; {_advice(total, micro, world_size)}"
            )
            return None
        derived = total // (micro * world_size)
        if accum is not None and accum != derived:
            self.problems.append(
                f"gradient_accumulation_steps = {accum} in {self.ds_name}, but global_batch "
                f"{total} / (micro_batch {micro} * {ranks}) = {derived}; leave it out"
            )
        return Batch(total, micro, derived, world_size)

    def optimizer(self) -> None:
        block, optim = self.ds.get("optimizer", {}), self.config.optim
        kind = block.get("type")
        if kind is not None and kind.lower() != optim.name:
            self.conflict("optim.name", optim.name, "optimizer.type", kind)
        for key, given in block.get("params", {}).items():
            if key == "torch_adam" or given == "auto":
                continue
            if key not in OPTIMIZER_PARAMS:
                self.problems.append(
                    f"{self.ds_name}: optimizer.params.{key} is not taken; the recipe's [optim] "
                    f"table owns the optimizer"
                )
                continue
            leaf = getattr(optim, key)
            if (list(leaf) if isinstance(leaf, tuple) else leaf) != given:
                self.conflict(f"optim.{key}", leaf, f"optimizer.params.{key}", given)

    def accumulation(self, stage: int, precision: str) -> None:
        given = self.ds.get("data_types", {}).get("grad_accum_dtype")
        if stage == 0 and given not in (None, precision):
            self.problems.append(
                f"{self.ds_name}: data_types.grad_accum_dtype = {given} with {precision} weights "
                "needs zero_optimization.stage 1 or more; leave it out, or raise the stage"
            )


def _advice(total: int, micro: int, world_size: int) -> str:
    """Say which batch sizes would do."""
    if total % world_size:
        sizes = _multiples(total, world_size)
        return f"the nearest global batches for {world_size} ranks: {sizes}"
    share = total // world_size
    return f"micro-batches that fit: {nearest_divisors(share, micro)}"


def _multiples(number: int, factor: int) -> str:
    """Name the multiples of a factor next to a number, below and above."""
    below = number // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)


def resolve(
    config: RunConfig, ds: dict[str, Any], world_size: int, recipe_name: str, ds_name: str
) -> tuple[Resolved | None, list[str]]:
    """Bring both documents together.

    Args:
        config: The recipe.
        ds: The JSON as read by load_ds_json: its sound part.
        world_size: Ranks of the run.
        recipe_name: What messages call the recipe.
        ds_name: What messages call the JSON.

    Returns:
        The agreed run, or None, and every contradiction found.
    """
    match = _Match(config, ds, recipe_name, ds_name)
    batch = match.batch(world_size)
    precision = match.precision()
    clip = match.shared("gradient_clipping", "optim.grad_clip_norm", config.optim.grad_clip_norm)
    match.optimizer()
    stage = ds.get("zero_optimization", {}).get("stage", 0)
    match.accumulation(stage, precision)
    if batch is None:
        return None, match.problems
    clip = 0.0 if clip is None else float(clip)
    agreed = config.model_copy(
        update={
            "batch": config.batch.model_copy(
                update={"global_batch": batch.global_batch, "micro_batch": batch.micro_batch}
            ),
            "optim": config.optim.model_copy(update={"grad_clip_norm": clip}),
            "run": config.run.model_copy(update={"precision": precision}),
        }
    )
    match.problems += agreed.problems()  # a batch size from the JSON may contradict data.lanes
    if match.problems:
        return None, match.problems
    return Resolved(agreed, _effective(ds, agreed, batch, stage), batch), []


def _effective(ds: dict[str, Any], config: RunConfig, batch: Batch, stage: int) -> dict[str, Any]:
    """Write out everything that DeepSpeed would otherwise decide on its own."""
    effective = copy.deepcopy(ds)
    effective.pop("optimizer", None)  # vitscale hands over the optimizer object
    precision = config.run.precision
    effective["train_batch_size"] = batch.global_batch
    effective["train_micro_batch_size_per_gpu"] = batch.micro_batch
    effective["gradient_accumulation_steps"] = batch.grad_accum
    effective["gradient_clipping"] = config.optim.grad_clip_norm
    for kind in ("bf16", "fp16"):
        effective.setdefault(kind, {})["enabled"] = precision == kind
    # DeepSpeed would accumulate in the model's dtype; its stage 0 cannot do otherwise.
    wide = stage > 0 or precision == "fp32"
    types = effective.setdefault("data_types", {})
    types.setdefault("grad_accum_dtype", "fp32" if wide else precision)
    effective.setdefault("zero_optimization", {})["stage"] = stage
    effective.setdefault("steps_per_print", 2**31 - 1)  # vitscale prints its own line
    if config.optim.name != "adamw":
        effective["zero_allow_untested_optimizer"] = True
    if effective["zero_optimization"].get("offload_optimizer"):
        # DeepSpeed insists on its own compiled optimizer there unless told that torch's will do.
        effective.setdefault("zero_force_ds_cpu_optimizer", False)
    return effective
