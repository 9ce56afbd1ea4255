"""What the DeepSpeed JSON may hold: every key, the kind of its value, and why some are refused.

The keys are those of DeepSpeed 0.19.8; a test compares them with the installed one.
"""

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """The values that a key takes.

    Args:
        text: Says so in messages.
        accepts: Decides.
    """

    text: str
    accepts: Callable[[Any], bool]


# What a table may hold; ANY_TABLE is not looked into.
Known = dict[str, "Kind | Known"]
ANY_TABLE: Known = {}


def one_of(*choices: Any) -> Kind:
    """Return the kind that takes these values and no others; true is not 1."""
    text = f"{', '.join(repr(c) for c in choices[:-1])} or {choices[-1]!r}"
    return Kind(text, lambda value: any(value == c and type(value) is type(c) for c in choices))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    # DeepSpeed's own examples write 5e8 for sizes.
    return _is_number(value) and value == int(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


BOOL = Kind("true or false", lambda value: isinstance(value, bool))
INT = Kind("a whole number", _is_int)
COUNT = Kind("a whole number from 1 to 2147483647", lambda v: _is_int(v) and 0 < v < 2**31)
SIZE = Kind("a whole number, 0 or more", lambda value: _is_whole(value) and value >= 0)
BUCKET = Kind("a whole number above 0", lambda value: _is_whole(value) and value > 0)
POSITIVE = Kind("a number above 0", lambda value: _is_number(value) and value > 0)
NOT_NEGATIVE = Kind("a number, 0 or more", lambda value: _is_number(value) and value >= 0)
FRACTION = Kind("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
TEXT = Kind("text", lambda value: isinstance(value, str))
TEXTS = Kind(
    "a list of texts",
    lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
)

OFFLOAD_PARAM: Known = {
    "device": one_of("none", "cpu", "nvme"),
    "nvme_path": TEXT,
    "buffer_count": SIZE,
    "buffer_size": SIZE,
    "max_in_cpu": SIZE,
    "pin_memory": BOOL,
}
OFFLOAD_OPTIMIZER: Known = {
    "device": one_of("none", "cpu", "nvme"),
    "nvme_path": TEXT,
    "buffer_count": SIZE,
    "pin_memory": BOOL,
    "pipeline_read": BOOL,
    "pipeline_write": BOOL,
    "fast_init": BOOL,
    "ratio": FRACTION,
}
# Source: DeepSpeed 0.19.8, runtime/zero/config.py.
ZERO: Known = {
    "stage": one_of(0, 1, 2, 3),
    "contiguous_gradients": BOOL,
    "reduce_scatter": BOOL,
    "reduce_bucket_size": BUCKET,
    "use_multi_rank_bucket_allreduce": BOOL,
    "allgather_partitions": BOOL,
    "allgather_bucket_size": SIZE,
    "overlap_comm": BOOL,
    "offload_param": OFFLOAD_PARAM,
    "offload_optimizer": OFFLOAD_OPTIMIZER,
    "sub_group_size": SIZE,
    "stage3_prefetch_bucket_size": SIZE,
    "stage3_param_persistence_threshold": SIZE,
    "stage3_model_persistence_threshold": SIZE,
    "stage3_max_live_parameters": SIZE,
    "stage3_max_reuse_distance": SIZE,
    "stage3_module_granularity_threshold": SIZE,
    "stage3_use_all_reduce_for_fetch_params": BOOL,
    "stage3_allgather_sequential": BOOL,
    "round_robin_gradients": BOOL,
    "zero_hpz_partition_size": SIZE,
    "zero_quantized_weights": BOOL,
    "zero_quantized_nontrainable_weights": BOOL,
    "zero_quantized_gradients": BOOL,
    "memory_efficient_linear": BOOL,
    "log_trace_cache_warnings": BOOL,
    "enable_sanity_checks": BOOL,
}
TOP: Known = {
    "train_batch_size": COUNT,
    "train_micro_batch_size_per_gpu": COUNT,
    "gradient_accumulation_steps": COUNT,
    "gradient_clipping": NOT_NEGATIVE,
    "bf16": {"enabled": BOOL, "immediate_grad_update": BOOL, "check_grad_overflow": BOOL},
    "fp16": {
        "enabled": BOOL,
        "loss_scale": NOT_NEGATIVE,
        "initial_scale_power": SIZE,
        "loss_scale_window": COUNT,
        "hysteresis": SIZE,
        "consecutive_hysteresis": BOOL,
        "min_loss_scale": NOT_NEGATIVE,
    },
    "data_types": {"grad_accum_dtype": one_of("fp32", "bf16", "fp16")},
    "zero_optimization": ZERO,
    "zero_force_ds_cpu_optimizer": BOOL,
    "communication_data_type": one_of("fp32", "bf16", "fp16"),
    "prescale_gradients": BOOL,
    "gradient_predivide_factor": POSITIVE,
    "optimizer": {"type": TEXT, "params": ANY_TABLE},
    "activation_checkpointing": {
        "partition_activations": BOOL,
        "cpu_checkpointing": BOOL,
        "contiguous_memory_optimization": BOOL,
        "number_checkpoints": COUNT,
        "synchronize_checkpoint_boundary": BOOL,
        "profile": BOOL,
    },
    "aio": {
        "block_size": COUNT,
        "queue_depth": COUNT,
        "intra_op_parallelism": COUNT,
        "single_submit": BOOL,
        "overlap_events": BOOL,
        "use_gds": BOOL,
    },
    "flops_profiler": {
        "enabled": BOOL,
        "profile_step": COUNT,
        "module_depth": INT,
        "top_modules": COUNT,
        "detailed": BOOL,
        "output_file": TEXT,
        "recompute_fwd_factor": NOT_NEGATIVE,
    },
    "comms_logger": {
        "enabled": BOOL,
        "verbose": BOOL,
        "prof_all": BOOL,
        "debug": BOOL,
        "prof_ops": TEXTS,
    },
    "steps_per_print": COUNT,
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
# Keys that both documents have: JSON key -> recipe leaf. Only these may be "auto".
SHARED = {
    "train_batch_size": "batch.global_batch",
    "train_micro_batch_size_per_gpu": "batch.micro_batch",
    "gradient_accumulation_steps": "batch.grad_accum (derived)",
    "gradient_clipping": "optim.grad_clip_norm",
}


def sound_part(
    table: dict[str, Any], problems: list[str], known: Known = TOP, prefix: str = ""
) -> dict[str, Any]:
    """Return the part of a DeepSpeed JSON whose keys are known and whose values are of their kind.

    Args:
        table: The JSON, or a table inside it.
        problems: Gets a sentence for everything that is left out.
        known: What the table may hold.
        prefix: Path of the table, with a dot behind it.
    """
    sound = {}
    for key, value in table.items():
        path = prefix + key
        if not prefix and key in REFUSED:
            problems.append(f"{path!r} is not taken: {REFUSED[key]}")
        elif key not in known:
            problems.append(_unknown(path, known))
        elif isinstance(kind := known[key], dict):
            if not isinstance(value, dict):
                problems.append(f"{path} must be a table, got {value!r}; or leave it out")
            else:
                sound[key] = value if not kind else sound_part(value, problems, kind, f"{path}.")
        elif value == "auto" and path in SHARED:
            sound[key] = value
        elif value == "auto":
            problems.append(
                f'{path} = "auto" cannot be resolved; DeepSpeed itself would quietly take '
                f"something else: give {kind.text}, or leave it out"
            )
        elif not kind.accepts(value):
            problems.append(f"{path} must be {kind.text}, got {value!r}")
        else:
            sound[key] = value
    return sound


def _unknown(path: str, known: Known) -> str:
    *tables, key = path.split(".")
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if close:
        return f"unknown key {path!r}; did you mean {close[0]!r}?"
    where = f" in {'.'.join(tables)}" if tables else ""
    return f"unknown key {path!r}; known{where}: {', '.join(known)}"
