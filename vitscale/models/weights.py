"""Weights in and out: a report for every key on the way in, reproducible bytes on the way out.

A file is plain safetensors with timm's names and float32 tensors. Its only metadata key is
"vitscale", sorted JSON: the format does not promise an order of several keys.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitscale.config.errors import UserError
from vitscale.models.build import Model
from vitscale.models.pos_embed import ResizeMode, resize_pos_embed, sincos2d_pos_embed
from vitscale.models.vit import VisionTransformer

_METADATA_KEY = "vitscale"
# Problems that one message lists.
_SHOWN = 8
_HEAD_PARTS = ("head.", "pre_logits.")
# The classifier of a transformer, and of a ResNet.
_CLASSIFIERS = {"head.weight", "head.bias", "head.fc.weight", "head.fc.bias"}


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What became of every key of the file and of the model."""

    # Copied as they are.
    loaded: list[str] = field(default_factory=list)
    # Copied at another length: key -> how.
    resized: dict[str, str] = field(default_factory=dict)
    # Not from the file: key -> what they hold.
    new: dict[str, str] = field(default_factory=dict)
    # In the file, not in the model: key -> why.
    dropped: dict[str, str] = field(default_factory=dict)
    # What else the user should know.
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """One line for the log: counts, each key that was not simply loaded, and the notes."""
        parts = [f"loaded={len(self.loaded)}"]
        for name in ("resized", "new", "dropped"):
            entries: dict[str, str] = getattr(self, name)
            notes = ", ".join(f"{key} ({why})" for key, why in sorted(entries.items()))
            parts.append(f"{name}={len(entries)}" + (f" [{notes}]" if notes else ""))
        if self.notes:
            parts.append(f"notes={len(self.notes)} [{'; '.join(self.notes)}]")
        return " ".join(parts)


def load_weights(
    model: Model,
    state_dict: Mapping[str, Tensor],
    *,
    pos_embed_resize: ResizeMode = "google",
    new_head: bool,
) -> LoadReport:
    """Copy weights into a model, explaining every key; on an error the model is as before.

    Args:
        model: Its parameters must be whole, not partitioned.
        state_dict: timm's names.
        pos_embed_resize: Arithmetic for a position table of another grid.
        new_head: Drop the whole head of the file, hidden layer included, and start with a
            classifier of zeros (arXiv:2010.11929 section 3.2).

    Raises:
        UserError: Keys that are missing, unknown or of the wrong shape, values that are not finite,
            or new_head on a model with the hidden head layer; all are listed.
    """
    report = LoadReport()
    plan, problems = _plan(model, state_dict, pos_embed_resize, new_head, report)
    if problems:
        shown, more = problems[:_SHOWN], len(problems) - _SHOWN
        raise UserError(
            "the weights do not fit the model: "
            + "; ".join(shown)
            + (f"; and {more} more of the kind" if more > 0 else "")
        )
    own = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in plan.items():
            own[name].copy_(tensor)
    report.notes.extend(_notes(state_dict, new_head))
    return report


def _notes(state_dict: Mapping[str, Tensor], new_head: bool) -> list[str]:
    notes = []
    for dtype in (torch.float16, torch.bfloat16):
        if count := sum(tensor.dtype == dtype for tensor in state_dict.values()):
            notes.append(f"{count} tensors are {str(dtype).removeprefix('torch.')} in the file")
    # The 21k models of 2020 were published with their heads set to zero.
    kernels = [state_dict[n] for n in ("head.weight", "head.fc.weight") if n in state_dict]
    if not new_head and any(not kernel.any() for kernel in kernels):
        notes.append("the head is all zero: it classifies nothing")
    return notes


def _plan(
    model: Model,
    state_dict: Mapping[str, Tensor],
    resize: ResizeMode,
    new_head: bool,
    report: LoadReport,
) -> tuple[dict[str, Tensor], list[str]]:
    """Decide what each key of the model gets; fill the report; list what is unexplained."""
    own = model.state_dict()
    plan: dict[str, Tensor] = {}
    problems: list[str] = []
    classifier = own.keys() & _CLASSIFIERS
    if new_head and (model.config.head == "mlp" or model.num_classes == 0):
        problems.append(
            'new_head needs model.head = "linear" and model.num_classes > 0, not '
            f'"{model.config.head}" and {model.num_classes}'
        )
    for name, tensor in sorted(state_dict.items()):
        if not tensor.is_floating_point():
            problems.append(f"{name} is {tensor.dtype}, not a floating-point tensor")
        elif not torch.isfinite(tensor).all():
            problems.append(f"{name} holds NaN or Inf")
        elif new_head and name.startswith(_HEAD_PARTS):
            report.dropped[name] = "replaced by the new head"
        elif model.num_classes == 0 and name.startswith("head."):
            report.dropped[name] = "the model has no classifier"
        elif name not in own:
            hint = " (pass new_head, or set model.head)" if name.startswith(_HEAD_PARTS) else ""
            problems.append(f"{name} is unknown to the model{hint}")
        elif name == "pos_embed" and isinstance(model, VisionTransformer):
            _plan_pos_embed(model, tensor, resize, plan, problems, report)
        else:
            _plan_tensor(name, tensor, own, plan, problems, report)
    for name in sorted(own.keys() - state_dict.keys() - classifier):
        if name == "pos_embed" and model.config.pos_embed == "sincos2d":
            report.new[name] = "fixed sincos2d table"
        else:
            problems.append(f"{name} is missing in the file")
    for name in sorted(classifier):
        if new_head:
            plan[name] = torch.zeros_like(own[name])
            report.new[name] = "zeros"
        elif name not in state_dict:
            problems.append(f"{name} is missing in the file (pass new_head for a fresh one)")
    return plan, problems


def _plan_tensor(
    name: str,
    tensor: Tensor,
    own: Mapping[str, Tensor],
    plan: dict[str, Tensor],
    problems: list[str],
    report: LoadReport,
) -> None:
    if tensor.shape == own[name].shape:
        plan[name] = tensor
        report.loaded.append(name)
        return
    hint = " (pass new_head for other classes)" if name.startswith("head.") else ""
    problems.append(
        f"{name} has shape {tuple(tensor.shape)} in the file, "
        f"{tuple(own[name].shape)} in the model{hint}"
    )


def _plan_pos_embed(
    model: VisionTransformer,
    table: Tensor,
    resize: ResizeMode,
    plan: dict[str, Tensor],
    problems: list[str],
    report: LoadReport,
) -> None:
    name, own, shape = "pos_embed", model.pos_embed, model.shape
    assert own is not None
    if table.ndim != 3 or table.shape[0] != 1 or table.shape[2] != shape.embed_dim:
        problems.append(
            f"{name} has shape {tuple(table.shape)} in the file, {tuple(own.shape)} in the model"
        )
        return
    try:
        resized = resize_pos_embed(table, shape.grid_size, shape.num_prefix_rows, resize)
    except UserError as error:
        problems.append(str(error))
        return
    if model.config.pos_embed == "sincos2d":
        # The formula gives the exact table of any grid, so the file's one is only checked.
        side = round((table.shape[1] - shape.num_prefix_rows) ** 0.5)
        exact = sincos2d_pos_embed((side, side), shape.embed_dim, shape.num_prefix_rows)
        # 0.01: the table may have been stored in bfloat16.
        if not torch.allclose(table.float().cpu(), exact, rtol=0, atol=0.01):
            problems.append(
                f"{name} of the file is not the sincos2d table that the model has; "
                'set model.pos_embed = "learned"'
            )
        elif table.shape == own.shape:
            report.loaded.append(name)
        else:
            report.resized[name] = f"sincos2d table of {shape.grid_size[0]} x {shape.grid_size[1]}"
        return
    plan[name] = resized
    if table.shape == own.shape:
        report.loaded.append(name)
    else:
        report.resized[name] = f"{table.shape[1]} to {own.shape[1]} rows, {resize}"


def read_safetensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Read the tensors of a file, on the CPU, and what write_safetensors stored with them.

    Returns:
        The tensors, and the metadata or None where another program wrote the file.

    Raises:
        UserError: No such file, or it is not a whole safetensors file.
    """
    if not Path(path).is_file():
        raise UserError(f"no weights file at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            text = (file.metadata() or {}).get(_METADATA_KEY)
            return tensors, None if text is None else json.loads(text)
    except (SafetensorError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not a whole safetensors file: {error}") from error


def write_safetensors(
    path: str | Path, state_dict: Mapping[str, Tensor], metadata: Mapping[str, Any]
) -> None:
    """Write float32 tensors; the same weights and metadata give the same bytes.

    The file appears whole or not at all.

    Args:
        path: Its folder must exist; a file of that name is replaced.
        state_dict: Any floating dtype, any device.
        metadata: What JSON can hold; no clock, or the bytes are not reproducible.
    """
    text = json.dumps(metadata, sort_keys=True, separators=(",", ":"), allow_nan=False)
    write_tensors(path, state_dict, (_METADATA_KEY, text))


def write_tensors(
    path: str | Path, state_dict: Mapping[str, Tensor], entry: tuple[str, str]
) -> None:
    """Write float32 tensors with one metadata entry; whole or not at all, reproducibly."""
    path = Path(path)
    # clone: safetensors refuses tensors that share memory.
    tensors = {
        name: state_dict[name].detach().to("cpu", torch.float32).clone().contiguous()
        for name in sorted(state_dict)
    }
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata=dict([entry]))
        _fsync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
