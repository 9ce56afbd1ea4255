"""A checkpoint on disk: what makes it whole and where its weights are; without torch.

    checkpoints/
      step-00000060/
        engine/                    DeepSpeed's files, one set a rank
        weights.safetensors        the fp32 weights put together: evaluated, exported, fine-tuned
        ema.safetensors            the averaged ones, where the run averages
        ema-rank-00000.safetensors this rank's share of the average
        state.json                 step, seen_examples, data state, audit, recipe
        COMMIT.json                size and sha256 of every other file, topology; written last
      latest                       name of the newest committed folder

A folder without a valid COMMIT.json is not a checkpoint.
"""

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitscale.config.errors import UserError, VitscaleError

CHECKPOINT_FORMAT_VERSION = 1
COMMIT, STATE, LATEST = "COMMIT.json", "state.json", "latest"
WEIGHTS, EMA_WEIGHTS = "weights.safetensors", "ema.safetensors"
_CHUNK_BYTES = 1 << 22


class CheckpointError(VitscaleError):
    """A checkpoint could not be written or read; the message says where and why."""


def step_folder(step: int) -> str:
    """Return the folder name of a step."""
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint folder.

    Args:
        path: The folder.
        commit: Its COMMIT.json.
    """

    path: Path
    commit: dict[str, Any]

    @property
    def step(self) -> int:
        """Finished updates."""
        return int(self.commit["step"])

    def damage(self, part: int = 0, parts: int = 1) -> list[str]:
        """Compare files with the commit record; of several callers each takes its part."""
        problems = []
        for name, entry in sorted(self.commit["files"].items())[part::parts]:
            file = self.path / name
            if not file.is_file():
                problems.append(f"{name} is missing")
            elif file.stat().st_size != entry["num_bytes"]:
                problems.append(f"{name} has {file.stat().st_size} bytes, not {entry['num_bytes']}")
            elif sha256_of(file) != entry["sha256"]:
                problems.append(f"{name} does not have its hash")
        return problems


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a committed folder without reading its files.

    Raises:
        CheckpointError: It is not committed, or by another format version.
    """
    try:
        commit = json.loads((path / COMMIT).read_text(encoding="utf-8"))
        version = commit["version"]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not a finished checkpoint: it has no {COMMIT}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / COMMIT} is damaged: {error}") from error
    if version != CHECKPOINT_FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has checkpoint format {version}; this vitscale reads format "
            f"{CHECKPOINT_FORMAT_VERSION}"
        )
    return Checkpoint(path, commit)


def candidates(folder: Path) -> list[Path]:
    """Return checkpoint folders, newest first; the pointer only breaks no tie, names do."""
    steps = [p for p in folder.glob("step-*") if p.is_dir() and p.name[5:].isdigit()]
    return sorted(steps, key=lambda p: int(p.name[5:]), reverse=True)


def find_weights(source: str, *, ema: bool) -> Path:
    """Find a weights file: in a run folder, a checkpoint folder, or as given.

    Raises:
        UserError: Nothing there, or no averaged weights.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(f"no run, checkpoint or file at {source!r}")
    if (path / COMMIT).exists():
        found = [path]
    else:
        found = candidates(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    for folder in found:
        try:
            checkpoint = open_checkpoint(folder)
        except CheckpointError as error:
            print(f"warning: passing over {error}", file=sys.stderr)
            continue
        name = EMA_WEIGHTS if ema else WEIGHTS
        entry = checkpoint.commit["files"].get(name)
        if entry is None:
            raise UserError(
                f"{folder} has no {name}"
                + ("; the run was made without optim.ema_decay" if ema else "")
            )
        if (folder / name).is_file() and sha256_of(folder / name) == entry["sha256"]:
            return folder / name
        print(f"warning: passing over {folder}: {name} is not what was saved", file=sys.stderr)
    raise UserError(f"no sound checkpoint under {source!r}")


def sha256_of(path: Path, *, sync: bool = False) -> str:
    """Hash a file, and hand it to the disk if asked."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        if sync:
            os.fsync(file.fileno())
    return digest.hexdigest()
