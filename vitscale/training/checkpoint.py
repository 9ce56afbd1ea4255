"""Writing and reading the checkpoints of a run, all ranks together.

A checkpoint is written under a temporary name, hashed and synced by all ranks, and renamed when
every rank agrees; checkpoint_folder.py has its layout. Loading verifies every hash first, again
shared among the ranks; a damaged checkpoint is passed over by all of them alike.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from vitscale.config.errors import NumbersError, UserError
from vitscale.distributed import Collectives
from vitscale.models.weights import write_safetensors
from vitscale.observe.log import RunLog
from vitscale.training.checkpoint_folder import (
    CHECKPOINT_FORMAT_VERSION,
    COMMIT,
    EMA_WEIGHTS,
    LATEST,
    STATE,
    WEIGHTS,
    Checkpoint,
    CheckpointError,
    candidates,
    open_checkpoint,
    sha256_of,
    step_folder,
)
from vitscale.training.ema import Ema
from vitscale.training.engine import Engine


class Checkpoints:
    """Writes, finds and reads the checkpoints of one run.

    Args:
        folder: checkpoints/ of the run folder.
        collectives: All ranks take part in everything here.
        log: Where events go.
        keep_last: Checkpoints that stay.
        metadata: Goes into the weights files: the model, and how its input is made.
        topology: What a resume must have in common.
    """

    def __init__(
        self,
        folder: Path,
        collectives: Collectives,
        log: RunLog,
        *,
        keep_last: int,
        metadata: dict[str, Any],
        topology: dict[str, Any],
    ) -> None:
        self.folder = folder
        self._collectives, self._log = collectives, log
        self._keep_last, self._metadata, self._topology = keep_last, metadata, topology

    def save(self, engine: Engine, ema: Ema | None, state: dict[str, Any]) -> Path:
        """Write and commit a checkpoint; returns when it is the newest one.

        Args:
            engine: With the weights and the optimizer.
            ema: The average, where there is one.
            state: Goes to state.json; holds "step"; equal on all ranks.

        Raises:
            CheckpointError: A rank failed; nothing was published.
        """
        final = self.folder / step_folder(state["step"])
        staging = self.folder / f".tmp-{final.name}"
        with self._together(f"checkpoint {final}"):
            if self._first:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir(parents=True)
        with self._together(f"checkpoint {final}"):
            if not staging.is_dir():
                raise FileNotFoundError(f"{staging} is not there: the run folder must be shared")
        # DeepSpeed meets inside its save: a rank that fails there ends, and the others with it.
        engine.save(staging)
        self._write_weights(engine, staging / WEIGHTS)
        if ema is not None:
            with ema.in_place():
                self._write_weights(engine, staging / EMA_WEIGHTS)
        with self._together(f"checkpoint {final}"):
            if ema is not None:
                shares = {f"{k:04d}": tensor.cpu() for k, tensor in enumerate(ema.average)}
                save_file(shares, staging / self._ema_share())
            if self._first:
                _write_json(staging / STATE, {"version": CHECKPOINT_FORMAT_VERSION, **state})
        files = self._hash_files(staging, final)
        with self._together(f"checkpoint {final}"):
            if self._first:
                self._publish(staging, final, state["step"], files)
        return final

    @property
    def _first(self) -> bool:
        return self._collectives.world.is_first

    def _ema_share(self) -> str:
        return f"ema-rank-{self._collectives.world.rank:05d}.safetensors"

    def _together(self, what: str) -> "_Agreement":
        return _Agreement(self._collectives, what)

    def _write_weights(self, engine: Engine, path: Path) -> None:
        weights = dict(engine.gather_weights())
        broken = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
        broken = self._collectives.from_first(broken)
        if broken:
            raise NumbersError(f"not saved: the weights are not finite any more in {broken[0]}")
        with self._together(f"checkpoint file {path}"):
            if self._first:
                write_safetensors(path, weights, self._metadata)

    def _hash_files(self, staging: Path, final: Path) -> dict[str, dict[str, Any]]:
        """Hash and sync the files, each rank its part of the sorted list."""
        with self._together(f"checkpoint {final}"):
            if self._first:
                for script in staging.glob("zero_to_*.py"):
                    script.unlink()  # DeepSpeed's converter; weights.safetensors is its result
        world = self._collectives.world
        # Together they see every file, also where a listing lags behind on a network file system.
        own = [str(p.relative_to(staging)) for p in staging.rglob("*") if p.is_file()]
        names = sorted({name for part in self._collectives.gather(own) for name in part})
        mine = {}
        with self._together(f"checkpoint {final}"):
            for name in names[world.rank :: world.world_size]:
                path = staging / name
                mine[name] = {
                    "num_bytes": path.stat().st_size,
                    "sha256": sha256_of(path, sync=True),
                }
        parts = self._collectives.gather(mine)
        return {name: entry for part in parts for name, entry in part.items()}

    def _publish(self, staging: Path, final: Path, step: int, files: dict[str, Any]) -> None:
        commit = {
            "version": CHECKPOINT_FORMAT_VERSION,
            "step": step,
            "topology": self._topology,
            "files": files,
        }
        _write_json(staging / COMMIT, commit)
        for folder in (staging / "engine", staging):
            _sync_folder(folder)
        shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step
        staging.rename(final)
        _sync_folder(self.folder)
        pointer = self.folder / f".tmp-{LATEST}"
        pointer.write_text(final.name + "\n", encoding="utf-8")
        pointer.replace(self.folder / LATEST)
        for old in candidates(self.folder)[self._keep_last :]:
            # Uncommit first: a removal that is cut short must not look like damage.
            (old / COMMIT).unlink(missing_ok=True)
            shutil.rmtree(old, ignore_errors=True)
        for left in self.folder.glob(".tmp-step-*"):
            shutil.rmtree(left, ignore_errors=True)

    def find(self, resume: str) -> Checkpoint | None:
        """Find the checkpoint to go on from, verified by all ranks together.

        Args:
            resume: "auto", "never", or a checkpoint folder.

        Returns:
            None for a fresh start.

        Raises:
            UserError: A fresh start was asked for in a folder that has checkpoints.
            CheckpointError: There are checkpoints, and none is sound.
        """
        listed = self._collectives.from_first([str(p) for p in candidates(self.folder)])
        if resume == "never":
            if listed:
                raise UserError(
                    f"--resume never, but {self.folder} holds {Path(listed[0]).name}; "
                    "choose another --run-dir or remove that folder"
                )
            return None
        paths = [Path(p) for p in listed]
        if resume != "auto":
            given = Path(resume).expanduser()
            inside = given / "checkpoints" if (given / "checkpoints").is_dir() else given
            paths = self._collectives.from_first(candidates(inside) or [given])
        for path in paths:
            checkpoint, problems = self._verify(path)
            if checkpoint is not None and not problems:
                return checkpoint
            if self._first:
                self._log.warn(f"checkpoint {path} is damaged: {'; '.join(problems)}")
        if not paths:
            return None
        raise CheckpointError(
            f"none of the checkpoints is sound: {', '.join(str(p) for p in paths)}; restore one, "
            "or start again in another --run-dir"
        )

    def _verify(self, path: Path) -> tuple[Checkpoint | None, list[str]]:
        """Open and hash a checkpoint, each rank its part; all ranks get the same answer."""
        world = self._collectives.world
        checkpoint, problems = None, []
        try:
            checkpoint = open_checkpoint(path)
            problems = checkpoint.damage(world.rank, world.world_size)
        except (CheckpointError, OSError) as error:
            problems = [str(error)]
        found = [text for part in self._collectives.gather(problems) for text in part]
        return checkpoint, sorted(set(found))

    def check_topology(self, checkpoint: Checkpoint) -> None:
        """Refuse what DeepSpeed cannot load: another stage, precision or number of ranks.

        Raises:
            UserError: With both values of everything that differs.
        """
        saved = checkpoint.commit["topology"]
        differing = [
            f"{key} was {saved.get(key)}, now {value}"
            for key, value in self._topology.items()
            if saved.get(key) != value
        ]
        if differing:
            raise UserError(
                f"{checkpoint.path} cannot be resumed by this run: {'; '.join(differing)}. "
                f"Start it as before, or begin a new run from its weights: --init {checkpoint.path}"
            )

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints of later steps: what is saved from now on is another continuation.

        Left where they are, they would count as newer than what this run saves, and be resumed.
        """
        with self._together(f"checkpoints in {self.folder}"):
            for path in candidates(self.folder) if self._first else []:
                if int(path.name[5:]) > step:
                    aside = path.with_name(f"abandoned-{path.name}")
                    shutil.rmtree(aside, ignore_errors=True)
                    path.rename(aside)
                    self._log.warn(f"set aside as {aside}: the run goes on from step {step}")

    def read_state(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Read a verified checkpoint's state.json."""
        state: dict[str, Any] = json.loads((checkpoint.path / STATE).read_text(encoding="utf-8"))
        return state

    def load(self, checkpoint: Checkpoint, engine: Engine, ema: Ema | None) -> None:
        """Load a verified checkpoint into the engine and the average."""
        engine.load(checkpoint.path)
        with self._together(f"checkpoint {checkpoint.path}"):
            if ema is not None:
                shares = load_file(checkpoint.path / self._ema_share())
                ema.load([shares[key] for key in sorted(shares)])


class _Agreement:
    """A block that succeeds on all ranks or fails on all; it holds no collective of its own."""

    def __init__(self, collectives: Collectives, what: str) -> None:
        self._collectives, self._what = collectives, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        text = f"{type(error).__name__}: {error}" if error else None
        failures = [
            f"rank {rank}: {failure}"
            for rank, failure in enumerate(self._collectives.gather(text))
            if failure
        ]
        if failures:
            raise CheckpointError(f"{self._what}: {'; '.join(failures)}") from error


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
