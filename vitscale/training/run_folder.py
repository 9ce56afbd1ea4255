"""The run folder: what was asked, what it resolved to, and what came out.

run_dir/
  recipe.toml run.json ds.json env.json      asked, resolved, handed to DeepSpeed, versions
  metrics.jsonl tensorboard/ curves/         numbers and pictures
  quarantine.jsonl                           samples that were found damaged and are replaced
  log-rank00000.txt                          one a rank
  checkpoints/                               see checkpoint.py
  done.json                                  appears when the run is complete
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import vitscale
from vitscale.config.ds_json import Resolved
from vitscale.data.manifest import Manifest
from vitscale.data.quarantine import BadSample

PACKAGES = ("torch", "torchvision", "deepspeed", "numpy", "pillow", "pyarrow", "webdataset")


@dataclass(frozen=True)
class RunFolder:
    """Paths and small files of one run.

    Args:
        path: The folder; made when first written to.
    """

    path: Path

    @property
    def metrics(self) -> Path:
        """metrics.jsonl."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    def log(self, rank: int) -> Path:
        """Log file of a rank."""
        return self.path / f"log-rank{rank:05d}.txt"

    def write_documents(self, resolved: Resolved, recipe_text: str, assignments: list[str]) -> None:
        """Write down what is run and with what."""
        sets = "".join(f"# --set {assignment}\n" for assignment in assignments)
        _write(self.path / "recipe.toml", sets + recipe_text)
        _write_json(self.path / "run.json", resolved.config.model_dump(mode="json"))
        _write_json(self.path / "ds.json", resolved.ds)
        _write_json(self.path / "env.json", _environment())

    @property
    def quarantine(self) -> Path:
        """quarantine.jsonl."""
        return self.path / "quarantine.jsonl"

    def write_quarantine(self, samples: Iterable[BadSample]) -> None:
        """Write the bad samples of the checkpoint that the run goes on from; later ones go."""
        _write(self.quarantine, "".join(_line(bad) for bad in samples))

    def add_quarantined(self, samples: Iterable[BadSample]) -> None:
        """Append bad samples that were just found."""
        with self.quarantine.open("a", encoding="utf-8") as file:
            file.writelines(_line(bad) for bad in samples)

    def mark_done(
        self, resolved: Resolved, manifests: Sequence[Manifest], step: int, results: dict[str, Any]
    ) -> None:
        """Say that the run is complete."""
        digest = recipe_digest(resolved, manifests)
        done = {"recipe_digest": digest, "step": step, "results": results}
        _write_json(self.path / "done.json", done)

    def done(self) -> dict[str, Any] | None:
        """Return step, results and recipe_digest of the run if it is complete."""
        try:
            done = json.loads((self.path / "done.json").read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            return None
        results: dict[str, Any] = done.pop("results")
        return results | done


# Leaves that do not change what is trained, or that the dataset's digest stands for.
_NEUTRAL = (
    "data.train", "data.val", "data.label_column", "data.exclude", "data.num_workers",
    "data.prefetch_batches", "data.cache_dir", "data.cache_limit_bytes", "data.build",
    "data.prefetch_bytes", "data.downloads_per_node",
    "data.on_bad_sample", "data.max_bad_samples", "data.max_bad_in_a_row", "data.stall_limit_s",
    "batch.micro_batch",
    "init.source", "run.log_every", "run.save_every", "run.eval_every",
    "run.keep_last", "run.stop_at", "run.allow_change", "model.grad_checkpointing",
)  # fmt: skip


def recipe_digest(resolved: Resolved, manifests: Sequence[Manifest]) -> str:
    """Name what a run trains: the resolved recipe and the datasets, not how they are handled."""
    tree = resolved.config.model_dump(mode="json")
    for leaf in _NEUTRAL:
        table, key = leaf.split(".")
        tree[table].pop(key)
    tree["datasets"] = [manifest.samples_sha256 for manifest in manifests]
    tree["weights"] = [one.weight for one in resolved.config.data.train_sets]
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def changed_leaves(saved: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """List the leaves that differ between two resolved recipes and change what is trained."""
    lines = []
    for key in sorted(saved.keys() | now.keys()):
        old, new = saved.get(key), now.get(key)
        if f"{prefix}{key}" in _NEUTRAL:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            lines += changed_leaves(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key}: {old} -> {new}")
    return lines


def _line(bad: BadSample) -> str:
    return json.dumps(asdict(bad), sort_keys=True) + "\n"


def _environment() -> dict[str, Any]:
    import torch

    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    devices = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    return {
        "vitscale": vitscale.__version__,
        "git": _git_state(),
        "python": platform.python_version(),
        "packages": versions,
        "host": platform.node(),
        "cpus": len(os.sched_getaffinity(0)),
        "accelerators": devices,
        "torch_threads": torch.get_num_threads(),
        "command": sys.argv,
    }


def _git_state() -> dict[str, Any] | None:
    checkout = Path(vitscale.__file__).resolve().parents[1]

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(checkout), *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        if git("rev-parse", "--show-toplevel") != str(checkout):
            return None  # installed inside somebody else's repository
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    _write(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
