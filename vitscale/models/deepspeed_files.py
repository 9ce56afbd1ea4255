"""Weights in the folders that DeepSpeed saves, put together from its ranks' parts; without it.

    latest                                              name of the newest tag
    TAG/mp_rank_00_model_states.pt                      stages 0 to 2: all weights, as computed with
    TAG/zero_pp_rank_R_mp_rank_00_model_states.pt       stage 3: a file a rank, with shapes
    TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt  stages 1 to 3: a rank's float32 weights

Source:
    DeepSpeed 0.19: utils/zero_to_fp32.py.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitscale.config.errors import UserError
from vitscale.models.torch_files import load_inert, without_prefixes

_ALL_WEIGHTS = "mp_rank_00_model_states.pt"
_RANK_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_(model|optim)_states\.pt")


def _tag_folder(folder: Path) -> Path:
    latest = folder / "latest"
    if not latest.is_file():
        return folder
    # A name, not a path: the file is another program's.
    return folder / Path(latest.read_text(encoding="utf-8", errors="replace").strip()).name


def _rank_files(folder: Path, kind: str) -> list[Path]:
    """Return the ranks' files in the order of the ranks."""
    found = ((_RANK_STATES.fullmatch(path.name), path) for path in folder.iterdir())
    ranked = [(int(match[1]), path) for match, path in found if match and match[2] == kind]
    return [path for _, path in sorted(ranked)]


def is_deepspeed(folder: Path) -> bool:
    """Whether DeepSpeed saved there: in the folder itself, or in the one that `latest` names."""
    tag = _tag_folder(folder)
    return tag.is_dir() and ((tag / _ALL_WEIGHTS).is_file() or bool(_rank_files(tag, "model")))


def read_deepspeed(folder: Path) -> dict[str, Tensor]:
    """Read the weights of any ZeRO stage; in float32 where the optimizer's files are there.

    Args:
        folder: What was saved to, with its `latest`, or one tag's folder in it.

    Raises:
        UserError: A rank's file is missing or damaged, or the model was split over ranks.
    """
    tag = _tag_folder(folder)
    if any(tag.glob("*mp_rank_01_*")):
        raise UserError(f"{tag} is of a model split over ranks (tensor parallel): not read")
    optim_files = _rank_files(tag, "optim")
    parts = [load_inert(path, mmap=True) for path in optim_files]
    whole = tag / _ALL_WEIGHTS
    try:
        if whole.is_file():
            states = load_inert(whole, mmap=True)
            tensors = dict(states["module"])
            if parts:
                _check_count(parts, tag)
                tensors |= _of_stages_1_and_2(states["param_shapes"], parts)
        else:
            models = [load_inert(path, mmap=True) for path in _rank_files(tag, "model")]
            _check_count(parts, tag)
            _check_count(parts, tag, len(models))
            tensors = _of_stage_3(models, parts)
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise UserError(
            f"{tag} is not laid out as DeepSpeed 0.19 does: {type(error).__name__} {error}"
        ) from error
    # The optimizer's tensors want gradients.
    return without_prefixes({name: tensor.detach() for name, tensor in tensors.items()})


def _check_count(parts: Sequence[Any], tag: Path, found: int | None = None) -> None:
    """Compare the number of files with the number of ranks that wrote."""
    found = len(parts) if found is None else found
    counts = parts[0]["optimizer_state_dict"]["partition_count"] if parts else 1
    wanted = max(counts) if isinstance(counts, list) else counts
    if found != wanted:
        raise UserError(f"{tag} has the files of {found} ranks; {wanted} have saved: copy them all")


def _of_stages_1_and_2(
    param_shapes: Sequence[Mapping[str, torch.Size]], parts: Sequence[Any]
) -> dict[str, Tensor]:
    """Cut each group's weights, all ranks' shares laid end to end, into its tensors."""
    optims = [part["optimizer_state_dict"] for part in parts]
    shares = [optim["single_partition_of_fp32_groups"] for optim in optims]
    paddings = optims[0].get("param_alignment_paddings")
    tensors = {}
    for group, shapes in enumerate(param_shapes):
        flat = torch.cat([share[group] for share in shares])
        gaps = paddings[group] if paddings else [0] * len(shapes)
        offset = 0
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            tensors[name] = flat.narrow(0, offset, shape.numel()).view(shape)
            offset += shape.numel() + gap
    return tensors


def _of_stage_3(models: Sequence[Any], parts: Sequence[Any]) -> dict[str, Tensor]:
    """Join each tensor from its equal, padded shares on all ranks."""
    first = models[0]
    flats = [torch.cat(part["optimizer_state_dict"]["fp32_flat_groups"]) for part in parts]
    tensors: dict[str, Tensor] = {name: first["module"][name] for name in first["buffer_names"]}
    offset = 0
    for shapes in first["param_shapes"]:
        for name, shape in shapes.items():
            length = math.ceil(shape.numel() / len(flats))
            shares = [flat.narrow(0, offset, length) for flat in flats]
            tensors[name] = torch.cat(shares)[: shape.numel()].view(shape)
            offset += length
    for name, shape in (first["frozen_param_shapes"] or {}).items():
        shares = [model["frozen_param_fragments"][name] for model in models]
        tensors[name] = torch.cat(shares)[: shape.numel()].view(shape)
    for name, source in dict(first["shared_params"]).items():
        tensors[name] = tensors[source]
    return tensors
