"""Optimizers and their parameter groups."""

import re
from typing import Any

import torch
from torch import nn

from vitscale.config.errors import UserError
from vitscale.config.recipe import OptimConfig
from vitscale.training.adafactor import Adafactor
from vitscale.training.lamb import Lamb
from vitscale.training.lion import Lion
from vitscale.training.muon import Muon

# In front of the blocks: the bottom layer of layer-wise decay. Norms behind them go with the last
# block, as in timm; all else - pooling, head - is the top.
_STEM = re.compile(r"(cls_token|reg_token|pos_embed|patch_embed|norm_pre)\b|pos_embed_2d\.")
_BLOCK = re.compile(r"(?:blocks|block_positions)\.(\d+)\.")
_LAST_NORM = re.compile(r"norm\.")
# Optimizers whose rule looks at whole weights, which a rank has to put together.
SHAPED = ("lamb", "adafactor", "muon")


def is_kernel(name: str, param: nn.Parameter) -> bool:
    """Return whether a parameter multiplies: no bias, scale, token or table."""
    return param.ndim > 1 and name.split(".")[-1] == "weight"


def layer_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """Give what each parameter's learning rate is multiplied by: less, the deeper it lies.

    Args:
        model: With `blocks`.
        layer_decay: Ratio of one layer's rate to that of the layer above it.

    Returns:
        By name: 1 for the head, layer_decay for the last block, and so on down to the stem.

    Raises:
        UserError: The model has no blocks.

    Source:
        arXiv:2106.08254 (BEiT), appendix; the layers: timm, param_groups_layer_decay.
    """
    names = [name for name, _ in model.named_parameters()]
    found = {name: _BLOCK.match(name) for name in names}
    depth = 1 + max((int(match[1]) for match in found.values() if match), default=-1)
    if not depth:
        raise UserError(
            f"optim.layer_decay = {layer_decay} needs a model with blocks, and this one has none; "
            "leave it out"
        )

    def layer(name: str) -> int:
        if match := found[name]:
            return int(match[1]) + 1
        if _STEM.match(name):
            return 0
        return depth if _LAST_NORM.match(name) else depth + 1

    return {name: layer_decay ** (depth + 1 - layer(name)) for name in names}


def param_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Split trainable parameters by decay, learning rate and rule.

    Args:
        model: Its parameters keep their order inside each group.
        config: weight_decay is for kernels, weight_decay_head for those of the head; vectors,
            tokens and tables get 0.

    Returns:
        Groups for an optimizer: first all that decay. `lr_scale` is what the schedule's rate is
        multiplied by; with Muon, `use_muon` says which rule a group follows.

    Raises:
        UserError: The model has no blocks, and the recipe needs them.

    Source:
        Only kernels decay: big_vision, optax weight_decay mask. One-dimensional tensors, positions
        and tokens excluded: timm, param_groups_weight_decay. A decay of the head's own:
        arXiv:2106.04560. Muon for the matrices of the blocks alone: Keller Jordan,
        kellerjordan.github.io/posts/muon.
    """
    scales = layer_scales(model, config.layer_decay) if config.layer_decay else {}
    muon = config.name == "muon"
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        kernel = is_kernel(name, param)
        own_head = kernel and name.startswith("head.") and config.weight_decay_head is not None
        decay = config.weight_decay_head if own_head else config.weight_decay
        by_muon = muon and kernel and param.ndim == 2 and name.startswith("blocks.")
        scale = scales.get(name, 1.0)
        settings = {"weight_decay": decay if kernel else 0.0, "lr_scale": scale}
        if muon:
            settings["use_muon"] = by_muon
        key = (not kernel, own_head, not by_muon, scale)
        groups.setdefault(key, {"params": [], **settings})["params"].append(param)
    if muon and not any(group["use_muon"] for group in groups.values()):
        raise UserError(
            'optim.name = "muon" is for the matrices of a Transformer\'s blocks, and this model '
            "has none; choose another optimizer"
        )
    return [groups[key] for key in sorted(groups)]


def check_offload(name: str, ds: dict[str, Any]) -> None:
    """Refuse an optimizer that cannot run where DeepSpeed would put it.

    Args:
        name: Of the recipe.
        ds: The DeepSpeed JSON.

    Raises:
        UserError: It needs whole weights, and the ranks cannot exchange what lies in host memory.
    """
    device = ds["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
    if name in SHAPED and device != "none":
        raise UserError(
            f'optim.name = "{name}" looks at whole weights, which zero_optimization.'
            f"offload_optimizer.device = {device} takes off the device; leave offload_optimizer "
            "out, or use adamw, sgd or lion"
        )


def build_optimizer(model: nn.Module, config: OptimConfig, *, fused: bool) -> torch.optim.Optimizer:
    """Build the recipe's optimizer; its lr is set anew before every step.

    Args:
        model: What is trained.
        config: The recipe's table.
        fused: Take torch's fused kernels (accelerators).

    Raises:
        UserError: The optimizer is not for this model.
    """
    groups = param_groups(model, config)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)
    if config.name == "lion":
        return Lion(groups, config.lr, config.betas)
    if config.name == "lamb":
        return Lamb(groups, config.lr, config.betas, config.eps)
    if config.name == "adafactor":
        return Adafactor(groups, config.lr, config.momentum, config.betas[1])
    if config.name == "muon":
        return Muon(groups, config.lr, config.momentum, config.betas, config.eps)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
