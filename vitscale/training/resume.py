"""What a run may go on from: everything else is refused, with both values, before it is loaded."""

from pathlib import Path
from typing import Any

from vitscale.config.errors import UserError
from vitscale.config.recipe import RunConfig
from vitscale.training.run_folder import changed_leaves

# What the tensors of a checkpoint depend on.
_FIXED = (
    "model.variant", "model.img_size", "model.in_chans", "model.num_classes", "model.embed_dim",
    "model.depth", "model.num_heads", "model.mlp_dim", "model.class_token", "model.global_pool",
    "model.pos_embed", "model.pos_embed_at", "model.no_embed_class", "model.qkv_bias",
    "model.qk_norm", "model.reg_tokens", "model.pre_norm", "model.final_norm", "model.fc_norm",
    "model.norm", "model.block", "model.mlp", "model.init_values", "model.head", "optim.name",
    "optim.layer_decay", "optim.weight_decay_head",
)  # fmt: skip


def check_saved(saved: dict[str, Any], config: RunConfig, total_steps: int, path: Path) -> None:
    """Compare a checkpoint's state.json with this run.

    Args:
        saved: The state; the same on all ranks.
        config: This run's resolved recipe.
        total_steps: Its length.
        path: The checkpoint, for messages.

    Raises:
        UserError: Another model or optimizer, or nothing left to train.
    """
    now = config.model_dump(mode="json")
    changes = changed_leaves(saved["recipe"], now)
    fixed = [text for text in changes if text.split(":")[0] in _FIXED]
    averages = [tree["optim"]["ema_decay"] is not None for tree in (saved["recipe"], now)]
    if averages[0] != averages[1]:
        fixed.append(f"averaged weights (optim.ema_decay): {averages[0]} -> {averages[1]}")
    if fixed:
        raise UserError(
            f"{path} cannot be resumed by this run: {'; '.join(fixed)}. Start it as before, or "
            f"begin a new run from its weights: --run-dir NEW --init {path}"
        )
    step = saved["step"]
    if step > total_steps or (step == total_steps and changes):
        raise UserError(
            f"{path} is at step {step} of {total_steps}: nothing is left to train, and the recipe "
            f"changed: {'; '.join(changes)}. Choose another --run-dir"
        )
