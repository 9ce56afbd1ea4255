"""Weights of any known kind, recognised by their content, under timm's names."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from pydantic import ValidationError
from torch import Tensor

from vitscale.config.augment import AugmentConfig
from vitscale.config.errors import UserError
from vitscale.config.model import ModelConfig
from vitscale.config.variants import is_resnet, resolve_shape
from vitscale.models.build import Model
from vitscale.models.deepspeed_files import is_deepspeed, read_deepspeed
from vitscale.models.google_names import from_google, is_google
from vitscale.models.hf_names import config_from_hf, from_hf, is_hf
from vitscale.models.npz import ZIP_DAMAGE, read_npz
from vitscale.models.pos_embed import ResizeMode
from vitscale.models.torch_files import read_torch, without_prefixes
from vitscale.models.weights import LoadReport, load_weights, read_safetensors

_HF_CONFIG, _HF_INPUT = "config.json", "preprocessor_config.json"
_HF_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# What decides a model's numbers and does not show in its tensors.
_ARITHMETIC = ("act", "norm", "norm_eps")


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """The content of a file or folder.

    Args:
        tensors: Under timm's names; what its kind does not explain under its own names.
        kind: In words.
        model: The model as the file's family has it; None: the file does not say.
        augment: Like it, how the input is made; only normalisation, for files that are not ours.
        metadata: What our own files carry.
        dropped: In the file and no weight of the model: name -> why.
    """

    tensors: dict[str, Tensor]
    kind: str
    model: ModelConfig | None = None
    augment: AugmentConfig | None = None
    metadata: dict[str, Any] | None = None
    dropped: dict[str, str] = field(default_factory=dict)


def is_foreign_folder(path: Path) -> bool:
    """Whether it is a folder of Hugging Face or DeepSpeed."""
    if not path.is_dir():
        return False
    return (path / _HF_CONFIG).is_file() or is_deepspeed(path)


def read_weights(path: str | Path) -> WeightsFile:
    """Read weights: safetensors, .npz, .pth, or a folder of Hugging Face or DeepSpeed.

    Raises:
        UserError: Nothing there, of no known kind, or damaged.
    """
    path = Path(path).expanduser()
    if is_deepspeed(path):
        return _of_torch(read_deepspeed(path), path.parent, "DeepSpeed's folder")
    if path.is_dir():
        path = _hf_weights(path)
    if not path.is_file():
        raise UserError(f"no weights file at {path}")
    tensors, metadata, kind = _read_file(path)
    if kind == "npz":
        if not is_google(tensors):
            raise UserError(f"{path} is an .npz of no known model: {_some(tensors)}")
        tensors, model, dropped = from_google(tensors)
        # Source: vision_transformer, input_pipeline.py; big_vision: pictures from -1 to 1.
        return WeightsFile(tensors, "Google's .npz", model, AugmentConfig(), dropped=dropped)
    if metadata is not None:
        return _own(path, tensors, metadata)
    return _of_torch(tensors, path.parent, kind)


def _of_torch(tensors: dict[str, Tensor], folder: Path, kind: str) -> WeightsFile:
    if is_hf(tensors):
        return _hugging_face(folder, tensors)
    return WeightsFile(tensors, f"timm's names in {kind}")


def _read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None, str]:
    """Read tensors as they are named there, and say what kind of file it is."""
    with path.open("rb") as file:
        start = file.read(9)
    if start[8:9] == b"{":
        tensors, metadata = read_safetensors(path)
        return without_prefixes(tensors), metadata, "safetensors"
    if start.startswith(b"PK"):
        try:
            with ZipFile(path) as archive:
                names = archive.namelist()
        except ZIP_DAMAGE as error:
            raise UserError(f"{path} is not a whole file: a damaged archive: {error}") from error
        if any(name.endswith(".npy") for name in names):
            return read_npz(path), None, "npz"
        return read_torch(path), None, "torch"
    # Pickle's first two bytes; torch's old format begins so.
    if start[:1] == b"\x80":
        return read_torch(path), None, "torch"
    raise UserError(
        f"{path} is not a whole file of weights: neither safetensors nor .npz nor torch's .pth"
    )


def _some(tensors: Mapping[str, Tensor]) -> str:
    names = sorted(tensors)
    return f"{len(names)} arrays, {', '.join(names[:4])}" + (", ..." if len(names) > 4 else "")


def _own(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> WeightsFile:
    try:
        # Through JSON: there lists are tuples.
        model = ModelConfig.model_validate_json(json.dumps(metadata["model"]))
        augment = AugmentConfig.model_validate_json(json.dumps(metadata["input"]))
    except (KeyError, ValidationError) as error:
        raise UserError(
            f"{path} describes a model that this vitscale does not have: {error}"
        ) from error
    return WeightsFile(tensors, "vitscale's safetensors", model, augment, metadata)


def _hf_weights(folder: Path) -> Path:
    found = (folder / name for name in _HF_WEIGHTS if (folder / name).is_file())
    path = next(found, None)
    if path is None:
        raise UserError(
            f"{folder} has neither {' nor '.join(_HF_WEIGHTS)}; weights in several parts are not "
            "read: save them with max_shard_size of more than they have"
        )
    return path


def _hugging_face(folder: Path, tensors: dict[str, Tensor]) -> WeightsFile:
    tensors, dropped = from_hf(tensors)
    kind = "Hugging Face's ViT"
    if not (folder / _HF_CONFIG).is_file():
        return WeightsFile(tensors, f"{kind} without {_HF_CONFIG}", dropped=dropped)
    model = config_from_hf(_json(folder / _HF_CONFIG), tensors)
    augment = None
    if (folder / _HF_INPUT).is_file():
        document = _json(folder / _HF_INPUT)
        # Theirs where it is not said: transformers, image_processing_vit.py.
        mean, std = (document.get(key, [0.5] * 3) for key in ("image_mean", "image_std"))
        try:
            augment = AugmentConfig(mean=tuple(mean), std=tuple(std))
        except (ValidationError, TypeError) as error:
            raise UserError(f"{folder / _HF_INPUT}: {error}") from error
    return WeightsFile(tensors, kind, model, augment, dropped=dropped)


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(document, dict):
        raise UserError(f"{path} holds no table")
    return document


def load_file(
    model: Model,
    file: WeightsFile,
    *,
    augment: AugmentConfig | None = None,
    pos_embed_resize: ResizeMode = "google",
    new_head: bool,
) -> LoadReport:
    """Copy a file's weights into a model, explaining every key; on an error nothing is changed.

    Args:
        model: Its parameters must be whole, not partitioned.
        file: From read_weights.
        augment: How the model's input is made, compared with the file's; None: not compared.
        pos_embed_resize: Arithmetic for a position table of another grid.
        new_head: Drop the file's whole head and start with a classifier of zeros.

    Raises:
        UserError: The file is for another arithmetic, or a key has no explanation.
    """
    notes = check_family(file, model.config, augment, new_head=new_head)
    report = load_weights(model, file.tensors, pos_embed_resize=pos_embed_resize, new_head=new_head)
    report.dropped.update(file.dropped)
    report.notes.extend(notes)
    return report


def check_family(
    file: WeightsFile, config: ModelConfig, augment: AugmentConfig | None, *, new_head: bool
) -> list[str]:
    """Compare what the tensors do not show: arithmetic, heads, pooling and input range.

    Args:
        file: Where the weights come from.
        config: The model that they are for.
        augment: How its input is made; None: not compared.
        new_head: The head is new, so the pooling may be, too.

    Returns:
        What the file does not say, for the log.

    Raises:
        UserError: Contradictions; all are listed with both values.
    """
    problems = []
    if augment is not None and file.augment is not None:
        for name in ("mean", "std"):
            theirs, ours = list(getattr(file.augment, name)), list(getattr(augment, name))
            if theirs != ours:
                problems.append(f"augment.{name} = {ours}, {theirs} in the file")
    if file.model is not None:
        theirs_numbers = _arithmetic(file.model, new_head)
        ours_numbers = _arithmetic(config, new_head)
        problems += [
            f"model.{name} = {json.dumps(ours_numbers[name])}, {json.dumps(value)} in the file"
            for name, value in theirs_numbers.items()
            if name in ours_numbers and ours_numbers[name] != value
        ]
    if problems:
        raise UserError(
            f"the weights ({file.kind}) are for another arithmetic: {'; '.join(problems)}; "
            "set what the file has"
        )
    unsaid = {"model": _ARITHMETIC, "augment": ("mean", "std")}
    missing: Sequence[str] = [
        f"{table}.{name}"
        for table, names in unsaid.items()
        if getattr(file, table) is None
        for name in names
    ]
    return (
        [f"the file does not say {', '.join(missing)}: as the recipe has them"] if missing else []
    )


def _arithmetic(config: ModelConfig, new_head: bool) -> dict[str, Any]:
    if is_resnet(config.variant):
        return {}
    values: dict[str, Any] = {name: getattr(config, name) for name in _ARITHMETIC}
    values["num_heads"] = resolve_shape(config).num_heads
    average = config.global_pool == "avg"
    values["fc_norm"] = average if config.fc_norm is None else config.fc_norm
    if config.class_token or config.reg_tokens:
        values["no_embed_class"] = config.no_embed_class
    if not new_head:
        values["global_pool"] = config.global_pool
    return values
