"""One training run from a resolved recipe to a finished run folder: puts the parts together."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from vitscale.config.ds_json import Resolved
from vitscale.config.errors import UserError, VitscaleError
from vitscale.data import picture
from vitscale.data.loader import Batch
from vitscale.data.mixing import build_mixing
from vitscale.data.permute import stream
from vitscale.distributed import Collectives, World
from vitscale.evaluation.classification import evaluate_classification
from vitscale.models.build import Model, create_model
from vitscale.models.weight_files import load_file
from vitscale.observe.log import RunLog
from vitscale.observe.metrics import MetricsFile, read_metrics
from vitscale.observe.report import write_curves
from vitscale.observe.writers import TensorBoardWriter, image_grid
from vitscale.training.checkpoint import Checkpoints
from vitscale.training.ema import Ema
from vitscale.training.engine import Engine, check_precision, init_distributed
from vitscale.training.failure import FailureNote, is_agreed
from vitscale.training.guard import StopFlag
from vitscale.training.init_source import read_source
from vitscale.training.loop import Actions, TrainState, seed_stochastic_layers, train
from vitscale.training.losses import build_loss
from vitscale.training.recorder import StepRecorder
from vitscale.training.resume import check_saved
from vitscale.training.rhythm import rhythm_of, schedule_of
from vitscale.training.run_data import RunData
from vitscale.training.run_folder import RunFolder, changed_leaves
from vitscale.training.schedule import due


@dataclass(frozen=True)
class RunRequest:
    """What to run.

    Args:
        resolved: Recipe and DeepSpeed JSON; the number of classes is known.
        folder: The run folder, locked by the first rank.
        resume: "auto", "never" or a checkpoint folder.
        new_head: Fine-tuning: the source's head is replaced by zeros.
        world: This process's place.
        stop: Asks for a stop at the next step.
        recipe_text: The recipe as it was read.
        assignments: Its `--set` overrides.
    """

    resolved: Resolved
    folder: RunFolder
    resume: str
    new_head: bool
    world: World
    stop: StopFlag
    recipe_text: str
    assignments: list[str]


def run_training(request: RunRequest) -> int:
    """Train, or go on training, until the run is complete.

    Returns:
        Exit code 0.

    Raises:
        VitscaleError: With its own exit code: stopped, broken numbers, damaged data, ...
    """
    config, world = request.resolved.config, request.world
    _set_threads(world)
    assert config.run.precision is not None
    check_precision(config.run.precision)
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(True)
    folder = request.folder
    folder.path.mkdir(parents=True, exist_ok=True)
    note = FailureNote(folder.path, world.rank)
    if world.is_first:
        note.clear()
    init_distributed(world, build_shm_op=config.run.cpu_shm_comm)
    # Not earlier: a rank that still waits for the others has nothing to save.
    request.stop.install()
    collectives = Collectives(world)
    note.watch()
    log = RunLog(folder.log(world.rank), echo=world.is_first)
    try:
        _train(request, collectives, log)
    except Exception as error:
        # A collective whose partner is gone raises RuntimeError.
        broken = isinstance(error, RuntimeError) and world.world_size > 1
        peer = note.peer() if broken else None
        if peer is not None:
            raise peer from None
        note.write(error, log)
        raise
    finally:
        note.close()
        log.close()
    return 0


def _train(request: RunRequest, collectives: Collectives, log: RunLog) -> None:
    run = _Run(request, collectives, log)
    together = True
    try:
        run.begin()
        run.loop()
        run.finish()
    except Exception as error:
        together = is_agreed(error)
        raise
    finally:
        run.close()
        if together:  # one that failed alone has nobody to take the group down with
            run.leave_group()


class _Run:
    """The parts of a run that the loop's actions share."""

    def __init__(self, request: RunRequest, collectives: Collectives, log: RunLog) -> None:
        self.request, self.collectives, self.log = request, collectives, log
        self.config = request.resolved.config
        self.world = request.world
        self.data = RunData(self.config, self.world, request.resolved.batch.micro_batch, log)
        self.order = self.data.order
        self.rhythm = rhythm_of(self.config, self.order.usable)
        self.state = TrainState()
        self.loader: Any = None
        self.metrics: MetricsFile | None = None
        self.board: TensorBoardWriter | None = None

    def begin(self) -> None:
        """Build the engine and bring it to where the run goes on."""
        config, request = self.config, self.request
        torch.manual_seed(stream(config.run.seed, "init") & (2**63 - 1))
        model = create_model(config.model)
        self.checkpoints = Checkpoints(
            request.folder.checkpoints,
            self.collectives,
            self.log,
            keep_last=config.run.keep_last,
            metadata=self._metadata(),
            topology={
                "world_size": self.world.world_size,
                "zero_stage": request.resolved.zero_stage,
                "precision": config.run.precision,
            },
        )
        checkpoint = self.checkpoints.find(request.resume)
        saved = self.checkpoints.read_state(checkpoint) if checkpoint is not None else None
        if checkpoint is not None and saved is not None:
            self.checkpoints.check_topology(checkpoint)
            if not self._is_same_everywhere(saved):
                raise UserError(
                    f"the ranks read different states from {checkpoint.path}; the file system "
                    "shows them different files: check that the run folder is shared by all nodes"
                )
            self.data.take_over(saved)
            check_saved(saved, config, self.rhythm.total_steps, checkpoint.path)
        elif config.init.source:
            self._initialise(model, config.init.source)
        if checkpoint is None and self.world.is_first and request.folder.metrics.exists():
            self.log.warn("an earlier start left no checkpoint here: beginning again at step 0")
        ranks, micro_batch = self.world.world_size, request.resolved.batch.micro_batch
        mixing = build_mixing(config, self.order, ranks, micro_batch)
        loss = build_loss(config.loss)
        self.engine = Engine(model, request.resolved, loss, self.world, mixing)
        decay = config.optim.ema_decay
        self.ema = Ema(self.engine.masters(), decay) if decay else None
        if checkpoint is not None and saved is not None:
            self.checkpoints.load(checkpoint, self.engine, self.ema)
            self._restore(saved, checkpoint.path)
        self._open_outputs()
        self._announce(model)

    def _is_same_everywhere(self, state: dict[str, Any]) -> bool:
        """Compare the hash of a state over the ranks."""
        text = json.dumps(state, sort_keys=True).encode()
        own = xxhash.xxh64_intdigest(text)
        first = self.collectives.from_first(own)
        return not self.collectives.any(own != first)

    def _initialise(self, model: Model, source: str) -> None:
        path, file = read_source(source, ema=self.config.init.ema)
        report = load_file(
            model,
            file,
            augment=self.config.augment,
            pos_embed_resize=self.config.init.pos_embed_resize,
            new_head=self.request.new_head,
        )
        self.log.line("init", source=path, kind=file.kind, report=report)

    def _restore(self, saved: dict[str, Any], path: Path) -> None:
        """Take over where the checkpoint stands."""
        self.state = TrainState(saved["step"], saved["seen_examples"])
        if self.world.is_first:
            self.data.load_audits(saved)
        self.log.line("resume", checkpoint=path, step=self.state.step)
        self.checkpoints.set_aside_after(self.state.step)
        changes = changed_leaves(saved["recipe"], self.config.model_dump(mode="json"))
        if changes and self.world.is_first:
            self.log.warn(f"the recipe changed since this checkpoint: {'; '.join(changes)}")

    def _open_outputs(self) -> None:
        if not self.world.is_first:
            return
        folder = self.request.folder
        folder.write_documents(
            self.request.resolved, self.request.recipe_text, self.request.assignments
        )
        folder.write_quarantine(self.data.quarantine.samples)
        self.metrics = MetricsFile(folder.metrics, self.state.step)
        self.board = TensorBoardWriter(folder.path / "tensorboard", self.state.step)

    def _announce(self, model: Model) -> None:
        batch, config = self.request.resolved.batch, self.config
        self.log.line(
            "run",
            run_dir=self.request.folder.path,
            model=config.model.variant,
            img_size=config.model.img_size,
            params=sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()),
            zero_stage=self.request.resolved.zero_stage,
            precision=config.run.precision,
            ranks=batch.world_size,
            global_batch=f"{batch.global_batch}={batch.micro_batch}x{batch.grad_accum}x{batch.world_size}",
            device=self.engine.device,
        )
        self.log.line(
            "data",
            train=",".join(one.uri for one in config.data.train_sets),
            samples=self.order.num_samples,
            classes=self.data.manifests[0].num_classes,
            steps_per_epoch=f"{self.order.steps_per_epoch:.2f}",
            jpeg_decoder="compiled" if picture.fast_path else "Pillow (slower: _pixels not built)",
            total_steps=self.rhythm.total_steps,
        )

    def loop(self) -> None:
        """Train from where the run stands to its last step."""
        config, batch = self.config, self.request.resolved.batch
        if self.state.step >= self.rhythm.total_steps:
            return
        # A kill between a save and its evaluation left that one out.
        if (
            due(self.rhythm.eval_every, self.state.step, self.rhythm.total_steps)
            and self.state.step
        ):
            self._evaluate_once(self.state.step)
        accelerated = self.engine.is_accelerated
        self.loader = self.data.train_loader(self.state.step, pin_memory=accelerated)
        recorder = StepRecorder(
            self.order,
            self.data.audits,
            self.data.quarantine,
            self.collectives,
            self.log,
            self._write_rows,
            self.request.folder.add_quarantined,
            self.loader.counters,
            seen_examples=self.state.seen_examples,
            total_steps=self.rhythm.total_steps,
            tolerate_skips=config.run.precision == "fp16",
        )
        self.recorder = recorder
        schedule = schedule_of(config, self.rhythm.total_steps, self.order.usable)
        self.engine.train(True)
        train(
            self.state,
            self.rhythm,
            schedule,
            self.engine,
            self.ema,
            self._batches(),
            batch.grad_accum,
            batch.global_batch,
            recorder,
            Actions(self._seed_step, self._save, self._evaluate, self._stop_reason),
        )
        self._save(self.state)

    def _batches(self) -> Iterator[Batch]:
        for number, item in enumerate(self.loader):
            if number == 0 and self.state.step == 0 and self.board is not None:
                self.board.image("train/first_batch", image_grid(item.images.numpy()), 0)
            yield item

    def _seed_step(self, step: int) -> None:
        seed_stochastic_layers(stream(self.config.run.seed, "layers", step, self.world.rank))

    def _stop_reason(self) -> str | None:
        if not self.collectives.any(self.request.stop.reason is not None):
            return None
        reasons = [r for r in self.collectives.gather(self.request.stop.reason) if r]
        return reasons[0]

    def _write_rows(self, rows: list[dict[str, Any]]) -> None:
        assert self.metrics is not None
        assert self.board is not None
        self.metrics.write(rows)
        for row in rows:
            self.board.scalars(row)
        self.board.flush()

    def _save(self, state: TrainState) -> None:
        saved = {
            "step": state.step,
            "seen_examples": state.seen_examples,
            "order": self.order.state(state.seen_examples),
            "audit": self.recorder.audit_totals(state.seen_examples),
            "quarantine": self.data.quarantine.state(),
            "recipe": self.config.model_dump(mode="json"),
        }
        if not self._is_same_everywhere(saved):
            raise VitscaleError(
                f"step {state.step}: the ranks do not agree on the state of the run; nothing was "
                "saved. Resume from the last checkpoint"
            )
        path = self.checkpoints.save(self.engine, self.ema, saved)
        self.log.line("saved", checkpoint=path)

    def _evaluate(self, state: TrainState) -> None:
        batches = self.data.val_loader(pin_memory=self.engine.is_accelerated)
        if batches is None:
            return
        self.engine.train(False)
        result = evaluate_classification(self.engine.logits, batches, self.collectives)
        self.engine.train(True)
        row: dict[str, Any] = {"step": state.step, "seen_examples": state.seen_examples}
        row |= {f"val/{name}": value for name, value in result.items()}
        if self.world.is_first:
            self._write_rows([row])
        self.log.line(f"val {state.step}/{self.rhythm.total_steps}", **result)

    def _evaluate_once(self, step: int) -> None:
        """Evaluate unless metrics.jsonl has the result of this step already."""
        rows = read_metrics(self.request.folder.metrics)
        measured = any(row["step"] == step and "val/top1" in row for row in rows)
        if not self.collectives.from_first(measured):
            self._evaluate(self.state)

    def finish(self) -> None:
        """Evaluate at the end, once also when restarted behind the last step, and sum up."""
        folder, last = self.request.folder, self.rhythm.total_steps
        self._evaluate_once(last)
        if self.world.is_first:
            rows = [row for row in read_metrics(folder.metrics) if row["step"] == last]
            results = {k: v for row in rows for k, v in row.items() if k.startswith("val/")}
            for path in write_curves(folder.metrics, folder.path / "curves"):
                self.log.line("curve", file=path)
            folder.mark_done(self.request.resolved, self.data.manifests, last, results)
        self.log.line("done", steps=last, run_dir=folder.path)

    def _metadata(self) -> dict[str, Any]:
        augment = self.config.augment
        return {
            "version": 1,
            "model": self.config.model.model_dump(mode="json"),
            "input": {
                "mean": list(augment.mean),
                "std": list(augment.std),
                "eval_crop": augment.eval_crop,
                "eval_crop_ratio": augment.eval_crop_ratio,
                "antialias": augment.antialias,
            },
            "labels_sha256": self.data.manifests[0].labels_sha256,
        }

    def close(self) -> None:
        """Let go of files and reader processes."""
        if self.loader is not None:
            self.loader.close()
        for output in (self.metrics, self.board):
            if output is not None:
                output.close()

    def leave_group(self) -> None:
        """End the process group, all ranks together; one that failed alone has nobody to meet."""
        if hasattr(self, "engine"):
            self.engine.close()


def _set_threads(world: World) -> None:
    """Share the machine's cores among its ranks where the user has not decided.

    The deepspeed launcher leaves it to torch, which then starts as many threads a rank as there are
    cores, and all ranks together crawl.
    """
    if not os.environ.get("OMP_NUM_THREADS"):
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // world.local_world_size))
