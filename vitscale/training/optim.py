"""Optimizers and their parameter groups."""

import torch
from torch import nn

from vitscale.config.recipe import OptimConfig

# Tables and tokens are no kernels; the paper's code decays kernels alone.
NO_DECAY = ("pos_embed", "cls_token")


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Split trainable parameters into those that decay and those that do not.

    Args:
        model: Its parameters keep their order inside each group.
        weight_decay: For matrices and kernels; vectors, tokens and tables get 0.

    Returns:
        Groups for a torch optimizer; an empty one is left out.

    Source:
        Only kernels decay: big_vision, optax weight_decay mask. One-dimensional tensors, positions
        and tokens excluded: timm, param_groups_weight_decay.
    """
    decay: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            plain = param.ndim <= 1 or name.split(".")[-1] in NO_DECAY
            (rest if plain else decay).append(param)
    groups = [
        {"params": decay, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimConfig, *, fused: bool) -> torch.optim.Optimizer:
    """Build the recipe's optimizer; its lr is set anew before every step.

    Args:
        model: What is trained.
        config: The recipe's table.
        fused: Take torch's fused kernels (accelerators).
    """
    groups = param_groups(model, config.weight_decay)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
