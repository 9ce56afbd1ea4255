"""The DeepSpeed JSON: read strictly, and filled from or matched with the recipe.

DeepSpeed 0.19.8 ignores misspelt top-level keys, reads `"bf16": {"enabled": "auto"}` as off and
clips at 1.0 when `gradient_clipping` is absent. So nothing is left to it: unknown keys are refused
here, "auto" never reaches it, and whatever has a meaning is written out in the effective JSON.
"""

import copy
import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitscale.config.recipe import RunConfig

BOOL, INT, NUMBER, TEXT = "true or false", "a whole number", "a number", "text"

OFFLOAD_PARAM = {
    "device": TEXT,
    "nvme_path": TEXT,
    "buffer_count": INT,
    "buffer_size": NUMBER,
    "max_in_cpu": NUMBER,
    "pin_memory": BOOL,
}
OFFLOAD_OPTIMIZER = {
    "device": TEXT,
    "nvme_path": TEXT,
    "buffer_count": INT,
    "pin_memory": BOOL,
    "pipeline_read": BOOL,
    "pipeline_write": BOOL,
    "fast_init": BOOL,
    "ratio": NUMBER,
}
# Keys of DeepSpeed 0.19.8 (runtime/zero/config.py); a test compares them with the installed one.
ZERO = {
    "stage": INT,
    "contiguous_gradients": BOOL,
    "reduce_scatter": BOOL,
    "reduce_bucket_size": NUMBER,
    "use_multi_rank_bucket_allreduce": BOOL,
    "allgather_partitions": BOOL,
    "allgather_bucket_size": NUMBER,
    "overlap_comm": BOOL,
    "offload_param": OFFLOAD_PARAM,
    "offload_optimizer": OFFLOAD_OPTIMIZER,
    "sub_group_size": NUMBER,
    "stage3_prefetch_bucket_size": NUMBER,
    "stage3_param_persistence_threshold": NUMBER,
    "stage3_model_persistence_threshold": NUMBER,
    "stage3_max_live_parameters": NUMBER,
    "stage3_max_reuse_distance": NUMBER,
    "stage3_module_granularity_threshold": NUMBER,
    "stage3_use_all_reduce_for_fetch_params": BOOL,
    "stage3_allgather_sequential": BOOL,
    "round_robin_gradients": BOOL,
    "zero_hpz_partition_size": INT,
    "zero_quantized_weights": BOOL,
    "zero_quantized_nontrainable_weights": BOOL,
    "zero_quantized_gradients": BOOL,
    "memory_efficient_linear": BOOL,
    "log_trace_cache_warnings": BOOL,
    "enable_sanity_checks": BOOL,
}
ANY_TABLE: dict[str, Any] = {}
TOP: dict[str, Any] = {
    "train_batch_size": INT,
    "train_micro_batch_size_per_gpu": INT,
    "gradient_accumulation_steps": INT,
    "gradient_clipping": NUMBER,
    "bf16": {"enabled": BOOL, "immediate_grad_update": BOOL, "check_grad_overflow": BOOL},
    "fp16": {
        "enabled": BOOL,
        "loss_scale": NUMBER,
        "initial_scale_power": INT,
        "loss_scale_window": INT,
        "hysteresis": INT,
        "consecutive_hysteresis": BOOL,
        "min_loss_scale": NUMBER,
    },
    "data_types": {"grad_accum_dtype": TEXT},
    "zero_optimization": ZERO,
    "zero_force_ds_cpu_optimizer": BOOL,
    "communication_data_type": TEXT,
    "prescale_gradients": BOOL,
    "gradient_predivide_factor": NUMBER,
    "optimizer": {"type": TEXT, "params": ANY_TABLE},
    "activation_checkpointing": {
        "partition_activations": BOOL,
        "cpu_checkpointing": BOOL,
        "contiguous_memory_optimization": BOOL,
        "number_checkpoints": INT,
        "synchronize_checkpoint_boundary": BOOL,
        "profile": BOOL,
    },
    "aio": {
        "block_size": INT,
        "queue_depth": INT,
        "intra_op_parallelism": INT,
        "single_submit": BOOL,
        "overlap_events": BOOL,
        "use_gds": BOOL,
    },
    "flops_profiler": {
        "enabled": BOOL,
        "profile_step": INT,
        "module_depth": INT,
        "top_modules": INT,
        "detailed": BOOL,
        "output_file": TEXT,
        "recompute_fwd_factor": NUMBER,
    },
    "comms_logger": {
        "enabled": BOOL,
        "verbose": BOOL,
        "prof_all": BOOL,
        "debug": BOOL,
        "prof_ops": ANY_TABLE,
    },
    "steps_per_print": INT,
    "wall_clock_breakdown": BOOL,
    "memory_breakdown": BOOL,
    "dump_state": BOOL,
}
# Known to DeepSpeed, and why vitscale does not take them.
REFUSED = {
    "scheduler": "the recipe owns the schedule: set optim.schedule and optim.warmup there",
    "amp": "DeepSpeed 0.19 removed it: use bf16 or fp16",
    "torch_autocast": "use bf16 or fp16",
    "elasticity": "DeepSpeed 0.19 removed it",
    "checkpoint": "vitscale writes and commits checkpoints itself: see run.save_every",
    "tensorboard": "vitscale writes its own curves to the run folder",
    "csv_monitor": "vitscale writes metrics.jsonl in the run folder",
    "gradient_allreduce_op": "vitscale averages gradients",
    "zero_allow_untested_optimizer": "vitscale sets it where the recipe's optimizer needs it",
}
OPTIMIZER_TYPES = {"adamw": {"adamw"}, "sgd": {"sgd"}}
# Parameters of an optimizer block that the recipe owns, by their recipe leaf.
OPTIMIZER_PARAMS = {
    "lr": "lr",
    "betas": "betas",
    "eps": "eps",
    "weight_decay": "weight_decay",
    "momentum": "momentum",
}


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
    """Read a DeepSpeed JSON; a key given twice is a problem, not the last one's victory."""
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
    problems = [f"{path}: key {key!r} is given twice" for key in twice]
    return ds, problems + [f"{path}: {text}" for text in _check_table(ds, TOP, "")]


def _check_table(table: dict[str, Any], known: dict[str, Any], prefix: str) -> Iterator[str]:
    """Yield a sentence for every key that is unknown or holds the wrong kind of value."""
    for key, value in table.items():
        path = f"{prefix}{key}"
        if not prefix and key in REFUSED:
            yield f"{path!r} is not taken: {REFUSED[key]}"
        elif key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            where = f" in {prefix.rstrip('.')}" if prefix else ""
            hint = (
                f"; did you mean {close[0]!r}?" if close else f"; known{where}: {', '.join(known)}"
            )
            yield f"unknown key {path!r}{hint}"
        elif isinstance(known[key], dict):
            if value == "auto":
                yield f"{path} must be a table, not 'auto'; leave it out instead"
            elif not isinstance(value, dict):
                yield f"{path} must be a table, got {value!r}"
            elif known[key] is not ANY_TABLE and value is not None:
                yield from _check_table(value, known[key], f"{path}.")
        elif value == "auto":
            if path not in SHARED:
                yield (
                    f'{path} = "auto" cannot be resolved; DeepSpeed itself would quietly take '
                    f"something else: give {known[key]}, or leave it out"
                )
        elif not _is_kind(value, known[key]):
            yield f"{path} must be {known[key]}, got {value!r}"


def _is_kind(value: Any, kind: str) -> bool:
    if kind == BOOL:
        return isinstance(value, bool)
    if kind == TEXT:
        return isinstance(value, str)
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (kind == NUMBER and isinstance(value, float))


# Keys that both documents have: JSON path -> recipe leaf.
SHARED = {
    "train_batch_size": "batch.global_batch",
    "train_micro_batch_size_per_gpu": "batch.micro_batch",
    "gradient_accumulation_steps": "batch.grad_accum (derived)",
    "gradient_clipping": "optim.grad_clip_norm",
}


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
        if micro is None:
            micro = total // (world_size * (accum or 1))
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
        if micro < 1 or total % (micro * world_size):
            self.problems.append(
                f"batch.global_batch = {total} cannot be split into micro-batches of "
                f"{max(micro, 1)} on {ranks}; {_advice(total, micro, world_size)}"
            )
            return None
        derived = total // (micro * world_size)
        if accum is not None and accum != derived:
            self.problems.append(
                f"gradient_accumulation_steps = {accum} in {self.ds_name}, but global_batch "
                f"{total} / (micro_batch {micro} * {ranks}) = {derived}; it is derived: leave it out"
            )
        return Batch(total, micro, derived, world_size)

    def optimizer(self) -> None:
        block = self.ds.get("optimizer")
        if not isinstance(block, dict):
            return
        optim = self.config.optim
        kind = block.get("type")
        if kind is not None and str(kind).lower() not in OPTIMIZER_TYPES[optim.name]:
            self.conflict("optim.name", optim.name, "optimizer.type", kind)
        params = block.get("params")
        for key, given in (params if isinstance(params, dict) else {}).items():
            if key == "torch_adam" or given == "auto":
                continue
            if key not in OPTIMIZER_PARAMS:
                self.problems.append(
                    f"{self.ds_name}: optimizer.params.{key} is not taken; the recipe's [optim] "
                    f"table owns the optimizer"
                )
                continue
            leaf = getattr(optim, OPTIMIZER_PARAMS[key])
            if (list(leaf) if isinstance(leaf, tuple) else leaf) != given:
                self.conflict(f"optim.{key}", leaf, f"optimizer.params.{key}", given)


def _advice(total: int, micro: int, world_size: int) -> str:
    """Say which batch sizes would do."""
    if total % world_size:
        low = total // world_size * world_size
        sizes = f"{low} or {low + world_size}" if low else f"{world_size}"
        return f"the nearest global batches for {world_size} ranks: {sizes}"
    share = total // world_size
    fits = sorted((d for d in range(1, share + 1) if share % d == 0), key=lambda d: abs(d - micro))
    return f"micro-batches that fit: {', '.join(str(d) for d in sorted(fits[:4]))}"


def resolve(
    config: RunConfig, ds: dict[str, Any], world_size: int, recipe_name: str, ds_name: str
) -> tuple[Resolved | None, list[str]]:
    """Bring both documents together.

    Args:
        config: The recipe.
        ds: The JSON as read by load_ds_json.
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
    zero = ds.get("zero_optimization") or {}
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if stage not in (0, 1, 2, 3):
        match.problems.append(
            f"{ds_name}: zero_optimization.stage = {stage!r}; there are 0, 1, 2, 3"
        )
    if match.problems or batch is None:
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
    effective = _effective(ds, agreed, batch, stage)
    late = list(agreed.problems())  # a batch size from the JSON may contradict data.lanes
    return (None, late) if late else (Resolved(agreed, effective, batch), [])


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
    effective["zero_optimization"] = {**(ds.get("zero_optimization") or {}), "stage": stage}
    effective.setdefault("steps_per_print", 2**31 - 1)  # vitscale prints its own line
    if config.optim.name != "adamw":
        effective["zero_allow_untested_optimizer"] = True
    return effective
