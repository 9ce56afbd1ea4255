"""What pretrain and finetune share: flags, the check of all input, and the way into the run."""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers.dry_run import describe
from launchers.training_data import (
    absence,
    datasets_of,
    ensure_data,
    fitted,
    manifest_or_none,
    train_manifests,
)
from vitscale.config.ds_json import Resolved, load_ds_json, resolve
from vitscale.config.errors import EXIT_FAILED, UserError, VitscaleError, exit_code_of
from vitscale.config.load import find_config, is_told, load_recipe
from vitscale.config.recipe import RunConfig
from vitscale.data.manifest import Manifest
from vitscale.distributed import World, end_process, world_from_env
from vitscale.training.guard import LauncherWatch, RunLock, StopFlag
from vitscale.training.run_folder import RunFolder, recipe_digest


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
        parser.add_argument(
            "--recipe",
            default=self.default_recipe,
            help="TOML: what is trained; default: %(default)s",
        )
        parser.add_argument(
            "--ds-config",
            default="configs/zero2.json",
            help="JSON: how DeepSpeed executes it; default: %(default)s",
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
            manifests = ensure_data(resolved.config, world, stop)
            resolved = fitted(resolved, manifests, say=world.is_first)
            folder = RunFolder(run_dir)
            if options.resume == "auto" and _already_done(folder, resolved, manifests, world):
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
        # Threads that spin while they wait make a shared CPU ten times slower, and gain nothing on
        # an idle one. OpenMP reads this when torch is loaded.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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
    manifests: list[Manifest] = []
    notes = []
    try:
        uris = [one.uri for one in resolved.config.data.train_sets]
        are_there = all(manifest_or_none(uri) is not None for uri in uris)
        notes = _missing_files(resolved.config, run_dir, resume)
        if are_there:
            manifests = train_manifests(resolved.config)
            resolved = fitted(resolved, manifests, say=True)
    except UserError:
        raise
    except VitscaleError as error:  # a store that cannot be reached from here
        notes = [str(error)]
    print(describe(resolved, run_dir, manifests))
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
        f"{leaf}: {absence(leaf, uri)}"
        for leaf, uri, section in datasets_of(config)
        if section is None and manifest_or_none(uri) is None
    ]
    source = config.init.source
    # A run that goes on from a checkpoint of its own does not look at the source again.
    starts = resume == "never" or (resume == "auto" and not (run_dir / "checkpoints").is_dir())
    if starts and source is not None and not Path(source).expanduser().exists():
        problems.append(
            f"init.source: no run, checkpoint or file at {source!r}; correct it or train that first"
        )
    return problems


def _already_done(
    folder: RunFolder, resolved: Resolved, manifests: Sequence[Manifest], world: World
) -> bool:
    """Say so and return True when this very run is complete; all ranks read the same file."""
    results = folder.done()
    if results is None:
        return False
    if results.pop("recipe_digest") != recipe_digest(resolved, manifests):
        raise UserError(
            f"{folder.path} holds a complete run of {results['step']} steps, of another recipe or "
            f"dataset. Choose another --run-dir; to train it further all the same: --resume "
            f"{folder.path}"
        )
    shown = " ".join(f"{k}={v:.5g}" for k, v in results.items() if isinstance(v, int | float))
    if world.is_first:
        print(f"already complete: run_dir={folder.path} {shown}", flush=True)
    return True
