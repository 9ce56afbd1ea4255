"""Weights in torch's own files, with whatever lies around them; nothing is ever executed."""

import argparse
import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitscale.config.errors import UserError

# Keys under which training programs keep the weights, tried in this order.
_WRAPPERS = ("state_dict", "model", "module")
# What torch.nn.parallel and torch.compile put before every name.
_PREFIXES = ("module.", "_orig_mod.")


# What the restricted reader raises on bytes that are no pickle of weights.
_DAMAGE = (
    RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError,
    struct.error, zipfile.BadZipFile,
)  # fmt: skip


class _Inert:
    """Stands in for an object that lies beside the weights: takes any content, does nothing."""

    def __init__(self, *_args: object) -> None:
        pass

    def __setstate__(self, _state: object) -> None:
        pass


def read_torch(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a .pth or .pt file, without wrappers and prefixes.

    Raises:
        UserError: Not a file of torch, one that holds code or foreign classes, or no weights in it.
    """
    return _unwrapped(load_inert(path), path)


def load_inert(path: Path, *, mmap: bool = False) -> Any:
    """Load with torch's restricted reader; options and DeepSpeed's state become inert objects.

    Args:
        path: What torch.save wrote.
        mmap: Read a tensor's numbers when they are used; not for the old format.

    Raises:
        UserError: Not a whole file of torch, or one that holds code or foreign classes.
    """
    try:
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (ValueError, RuntimeError):  # the old format, which is not a zip archive
        foreign = []
    except (pickle.UnpicklingError, EOFError) as error:
        raise UserError(f"{path} is not a whole file of torch: {error}") from error
    harmless = [name for name in foreign if _is_harmless(name)]
    try:
        # An open file: by its name alone torch would take it for safetensors.
        with (
            torch.serialization.safe_globals([(_Inert, name) for name in harmless]),
            path.open("rb") as file,
        ):
            return torch.load(
                path if mmap else file, mmap=mmap, map_location="cpu", weights_only=True
            )
    except pickle.UnpicklingError as error:
        # The old format is only known to hold one when torch stumbles over it.
        names = [name for name in foreign if name not in harmless]
        names = names or re.findall(r"GLOBAL ([\w.]+)", str(error))
        if not names:
            raise UserError(f"{path} is not a whole file of torch: {error}") from error
        raise UserError(
            f"{path} holds more than weights: reading {', '.join(sorted(set(names)))} could run "
            "any code. Save its state_dict alone, or as safetensors"
        ) from error
    except _DAMAGE as error:
        raise UserError(f"{path} is not a whole file of torch: {error}") from error


def _is_harmless(name: str) -> bool:
    namespace = f"{argparse.__name__}.{argparse.Namespace.__name__}"
    return name == namespace or name.startswith("deepspeed.")


def _unwrapped(content: Any, path: Path) -> dict[str, Tensor]:
    tensors = content
    for _ in range(len(_WRAPPERS)):
        inner = (
            tensors[key]
            for key in _WRAPPERS
            if isinstance(tensors, Mapping) and isinstance(tensors.get(key), Mapping)
        )
        tensors = next(inner, tensors)
    if not isinstance(tensors, Mapping) or not tensors:
        raise UserError(f"{path} has no state_dict, alone or under {', '.join(_WRAPPERS)}")
    strange = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
    if strange:
        raise UserError(
            f"{path} has {', '.join(map(str, strange[:8]))} among its weights, which are no "
            f"tensors; wanted is a state_dict, alone or under {', '.join(_WRAPPERS)}"
        )
    return without_prefixes(tensors)


def without_prefixes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take off what wrapping modules put before all names, in any order."""
    found = dict(tensors)
    while found:
        shared = (p for p in _PREFIXES if all(name.startswith(p) for name in found))
        prefix = next(shared, None)
        if prefix is None:
            break
        found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return found
