"""What pretrain and finetune share: flags, the check of all input, and the way into the run."""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import vitscale
from launchers.dry_run import describe
from vitscale.config.ds_json import Resolved, load_ds_json, resolve
from vitscale.config.errors import EXIT_FAILED, Stopped, UserError, VitscaleError, exit_code_of
from vitscale.config.load import find_config, is_told, load_recipe
from vitscale.config.recipe import BuildSection, RunConfig
from vitscale.data.manifest import MANIFEST_NAME, Manifest, load_class_names, load_manifest
from vitscale.data.order import Order
from vitscale.data.storage import Storage, open_storage
from vitscale.distributed import World, end_process, world_from_env
from vitscale.training.guard import LauncherWatch, RunLock, StopFlag
from vitscale.training.run_folder import RunFolder

POLL_S = 0.5
# By these a process knows that an MPI launcher started it.
MPI_VARIABLES = ("PMI_", "PMIX_", "OMPI_", "MV2_COMM_WORLD_")


@dataclass(frozen=True)
class TrainingCommand:
    """A command that trains.

    Args:
        verb: Its name.
        summary: First paragraph of the help.
        epilog: Examples for the help.
        default_recipe: Recipe when none is given.
        new_head: Whether the initial weights lose their head.
    """

    verb: str
    summary: str
    epilog: str
    default_recipe: str
    new_head: bool

    def main(self, argv: list[str] | None) -> int:
        """Run the command and return its exit code."""
        options = self._parser().parse_args(argv)
        try:
            world = world_from_env()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        try:
            code = exit_code_of(lambda: self._run(options, world), quiet=not world.is_first)
        except Exception:  # a fault of ours; the ordinary way out would hang on a broken group
            traceback.print_exc()
            code = EXIT_FAILED
        end_process(code)
        return code

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=f"vitscale {self.verb}",
            description=self.summary,
            epilog=self.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.add_argument("--recipe", default=self.default_recipe, help="TOML: what is trained")
        parser.add_argument(
            "--ds-config", default="configs/zero2.json", help="JSON: how DeepSpeed executes it"
        )
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="TABLE.KEY=VALUE",
            help='override a leaf of the recipe; may be repeated; "none" unsets',
        )
        parser.add_argument(
            "--run-dir", help="folder of the run; default: runs/RECIPE-DSCONFIG by their names"
        )
        parser.add_argument(
            "--resume",
            default="auto",
            metavar="auto|never|PATH",
            help="go on from the newest checkpoint of the run folder, never, or from PATH",
        )
        parser.add_argument(
            "--init", metavar="RUN|CHECKPOINT|FILE", help="initial weights; same as init.source"
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="check the input and say what would be run"
        )
        # The deepspeed launcher adds it; the environment says the same.
        parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
        return parser

    def _run(self, options: argparse.Namespace, world: World) -> int:
        recipe_path, ds_path = _find_both(options.recipe, options.ds_config)
        assignments = list(options.set)
        if options.init:
            assignments.append(f"init.source={json.dumps(options.init)}")
        run_dir = Path(options.run_dir or f"runs/{recipe_path.stem}-{ds_path.stem}").expanduser()
        resolved = self._resolve(recipe_path, ds_path, assignments, options, run_dir, world)
        if options.dry_run:
            if world.is_first:
                _print_plan(resolved, run_dir, options.resume)
            return 0
        stop = StopFlag()
        watch = LauncherWatch(stop)
        watch.start()
        try:
            manifest = _ensure_data(resolved.config, world, stop)
            resolved = _with_classes(resolved, manifest)
            folder = RunFolder(run_dir)
            if options.resume == "auto" and _already_done(folder, resolved, manifest, world):
                return 0
            recipe_text = recipe_path.read_text(encoding="utf-8")
            return self._train(options, resolved, folder, stop, recipe_text, assignments, world)
        finally:
            watch.close()

    def _resolve(
        self,
        recipe_path: Path,
        ds_path: Path,
        assignments: list[str],
        options: argparse.Namespace,
        run_dir: Path,
        world: World,
    ) -> Resolved:
        """Read and match both documents; every problem of them and the flags goes into one error.

        Contradictions are told although there are other problems too, unless they follow from them.
        """
        config, problems = load_recipe(recipe_path, assignments)
        sound_recipe = not problems
        ds, ds_problems = load_ds_json(ds_path)
        problems += ds_problems
        resolved = None
        if config is not None:
            resolved, more = resolve(config, ds, world.world_size, recipe_path.name, ds_path.name)
            problems += [text for text in more if not is_told(text, problems)]
            problems += self._problems(config)
        if not options.dry_run:
            problems += _resume_problems(options.resume)
            # Leaves of an unsound recipe may not be what is meant: their files are not looked for.
            if config is not None and sound_recipe:
                problems += _missing_files(config, run_dir, options.resume)
        if problems or resolved is None:
            listed = "\n".join(f"  - {text}" for text in problems)
            raise UserError(
                f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in "
                f"{recipe_path}, {ds_path} and the flags:\n{listed}"
            )
        return resolved

    def _problems(self, config: RunConfig) -> list[str]:
        problems = []
        if self.new_head and not config.init.source:
            problems.append(
                "finetune needs weights to start from: --init RUN_DIR, CHECKPOINT or FILE"
            )
        if self.new_head and config.model.head == "mlp":
            problems.append(
                'model.head = "mlp" is for pre-training; fine-tuning puts a new linear head on'
            )
        return problems

    def _train(
        self,
        options: argparse.Namespace,
        resolved: Resolved,
        folder: RunFolder,
        stop: StopFlag,
        recipe_text: str,
        assignments: list[str],
        world: World,
    ) -> int:
        lock = RunLock(folder.path)
        if world.is_first:
            folder.path.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        # Loads torch and DeepSpeed, which takes seconds: only now that all input is right.
        from vitscale.training.run import RunRequest, run_training

        try:
            return run_training(
                RunRequest(
                    resolved=resolved,
                    folder=folder,
                    resume=options.resume,
                    new_head=self.new_head,
                    world=world,
                    stop=stop,
                    recipe_text=recipe_text,
                    assignments=assignments,
                )
            )
        finally:
            lock.release()


def _print_plan(resolved: Resolved, run_dir: Path, resume: str) -> None:
    """Say what would be run, and what is not there for it; a store need not be reachable."""
    manifest, notes = None, []
    try:
        manifest = _manifest_or_none(resolved.config.data.train)
        notes = _missing_files(resolved.config, run_dir, resume)
    except VitscaleError as error:
        notes = [str(error)]
    print(describe(resolved, run_dir, manifest))
    for note in notes:
        print(f"\nto do: {note}")


def _find_both(recipe: str, ds_config: str) -> tuple[Path, Path]:
    """Find both documents; when both are missing, one message says so."""
    found: list[Path] = []
    problems = []
    for path in (recipe, ds_config):
        try:
            found.append(find_config(path))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return found[0], found[1]


def _resume_problems(resume: str) -> list[str]:
    if resume in ("auto", "never") or Path(resume).expanduser().is_dir():
        return []
    return [f"--resume {resume!r} is neither auto, never nor a checkpoint folder"]


def _missing_files(config: RunConfig, run_dir: Path, resume: str) -> list[str]:
    """Say which datasets and weights are not there and cannot be made."""
    problems = [
        f"{leaf}: no dataset at {uri}; pack it (vitscale pack --source KIND:URI --out {uri}), "
        f"correct {leaf}, or say in [data.build] how it is made"
        for leaf, uri, section in _datasets(config)
        if section is None and _manifest_or_none(uri) is None
    ]
    source = config.init.source
    # A run that goes on from a checkpoint of its own does not look at the source again.
    starts = resume == "never" or (resume == "auto" and not (run_dir / "checkpoints").is_dir())
    if starts and source is not None and not Path(source).expanduser().exists():
        problems.append(
            f"init.source: no run, checkpoint or file at {source!r}; correct it or train that first"
        )
    return problems


def _datasets(config: RunConfig) -> list[tuple[str, str, BuildSection | None]]:
    """List leaf, URI and the way to make it of the datasets that the recipe reads."""
    build = config.data.build
    datasets = [("data.train", config.data.train, build.train if build else None)]
    if config.data.val is not None:
        datasets.append(("data.val", config.data.val, build.val if build else None))
    return datasets


def _manifest_or_none(uri: str) -> Manifest | None:
    storage = open_storage(uri)
    return None if storage.size(MANIFEST_NAME) is None else load_manifest(storage)


def _already_done(folder: RunFolder, resolved: Resolved, manifest: Manifest, world: World) -> bool:
    """Say so and return True when this very run is complete; all ranks read the same file."""
    results = folder.done(resolved, manifest.digest)
    if results is None:
        return False
    shown = " ".join(f"{k}={v:.5g}" for k, v in results.items() if isinstance(v, int | float))
    if world.is_first:
        print(f"already complete: run_dir={folder.path} {shown}", flush=True)
    return True


def _ensure_data(config: RunConfig, world: World, stop: StopFlag) -> Manifest:
    """Return the training set's manifest; missing sets are packed where the recipe says how.

    This is before any process group exists: the first rank packs, the others look for the result.
    """
    for _, uri, section in _datasets(config):
        if section is None or _manifest_or_none(uri) is not None:
            continue
        if world.is_first:
            _pack(uri, section)
        while _manifest_or_none(uri) is None:
            if stop.reason:
                raise Stopped(f"{stop.reason} while the first rank packed {uri}")
            time.sleep(POLL_S)
    train = open_storage(config.data.train)
    manifest = load_manifest(train)
    if config.data.val is not None:
        val = open_storage(config.data.val)
        _check_same_classes(train, manifest, val, load_manifest(val))
    return manifest


def _check_same_classes(train: Storage, manifest: Manifest, val: Storage, other: Manifest) -> None:
    """Refuse a validation set whose labels mean something else: its accuracy would be noise."""
    if manifest.labels_sha256 == other.labels_sha256:
        return
    names = load_class_names(train, manifest), load_class_names(val, other)
    pairs = zip_longest(*names, fillvalue="nothing")
    label, (one, two) = next((k, pair) for k, pair in enumerate(pairs) if pair[0] != pair[1])
    raise UserError(
        f"data.val = {val.uri} has other classes than data.train = {train.uri}: {len(names[1])} "
        f"and {len(names[0])}, and label {label} is {two!r} in one and {one!r} in the other. "
        "Pack both from folders with the same classes"
    )


def _pack(uri: str, section: BuildSection) -> None:
    sources = [section.source] if isinstance(section.source, str) else section.source
    words = [word for source in sources for word in ("--source", source)]
    words += ["--out", uri, "--image", section.image, "--side", str(section.side)]
    words += ["--quality", str(section.quality), "--check", section.check]
    words += ["--shard-bytes", section.shard_bytes, "--max-bad", section.max_bad]
    words += ["--workers", str(section.workers), "--seed", str(section.seed)]
    print(f"packing {uri} from {', '.join(sources)}", flush=True)
    # A process of its own, which must not take itself for one of the MPI ranks that we may be.
    root = str(Path(vitscale.__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    kept = {k: v for k, v in os.environ.items() if not k.startswith(MPI_VARIABLES)}
    environment = {**kept, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-m", "data_prep.pack", *words], env=environment)
    if done.returncode:
        raise _PackError(uri, done.returncode)


class _PackError(VitscaleError):
    """The packer ended with an error, which it has explained."""

    def __init__(self, uri: str, code: int) -> None:
        super().__init__(f"packing {uri} ended with exit code {code}")
        self.exit_code = code


def _with_classes(resolved: Resolved, manifest: Manifest) -> Resolved:
    """Take the number of classes from the training set, or check that the recipe's is enough."""
    config, classes = resolved.config, manifest.num_classes
    # Raises what does not fit the dataset, before any rank waits for another.
    Order(
        manifest.shards.num_samples,
        config.run.seed,
        resolved.batch.global_batch,
        config.data.lanes,
        config.data.shuffle_block,
        config.data.tail,
    )
    wish = config.model.num_classes
    if wish is not None and wish < classes:
        raise UserError(
            f"model.num_classes = {wish}, but {config.data.train} has {classes} classes; "
            "leave model.num_classes out"
        )
    if wish is not None:
        return resolved
    model = config.model.model_copy(update={"num_classes": classes})
    return replace(resolved, config=config.model_copy(update={"model": model}))
