"""The datasets of a training command: found or made, and fitted to the recipe."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import vitscale
from vitscale.config.ds_json import Resolved
from vitscale.config.errors import Stopped, UserError, VitscaleError
from vitscale.config.recipe import BuildSection, RunConfig
from vitscale.data.dataset import open_dataset
from vitscale.data.manifest import MANIFEST_NAME, Manifest, load_manifest
from vitscale.data.storage import open_storage
from vitscale.data.train_sets import build_order, check_same_classes, open_train_sets
from vitscale.data.view import check_trainable
from vitscale.distributed import World
from vitscale.training.guard import StopFlag
from vitscale.training.rhythm import rhythm_of, schedule_of

POLL_S = 0.5
# By these a process knows that an MPI launcher started it.
MPI_VARIABLES = ("PMI_", "PMIX_", "OMPI_", "MV2_COMM_WORLD_")


def absence(leaf: str, uri: str) -> str:
    """Say that a dataset is not there, and the way out."""
    folder = Path(uri.removeprefix("file://")).expanduser()
    if folder.is_dir() and any(folder.iterdir()):
        return (
            f"{uri} is no packed dataset, it has no {MANIFEST_NAME}; if these are pictures, pack "
            f"them (vitscale pack --source imagefolder:{uri} --out NEW) and set {leaf} to NEW"
        )
    return (
        f"no dataset at {uri}; pack it (vitscale pack --source KIND:URI --out {uri}), "
        f"correct {leaf}, or say in [data.build] how it is made"
    )


def datasets_of(config: RunConfig) -> list[tuple[str, str, BuildSection | None]]:
    """List leaf, URI and the way to make it of the datasets that the recipe reads."""
    build = config.data.build
    sets = config.data.train_sets
    if len(sets) == 1:
        datasets = [("data.train", sets[0].uri, build.train if build else None)]
    else:
        datasets = [(f"data.train {one.name}", one.uri, None) for one in sets]
    if config.data.val is not None:
        datasets.append(("data.val", config.data.val, build.val if build else None))
    return datasets


def manifest_or_none(uri: str) -> Manifest | None:
    """Load the manifest of a packed dataset, None where there is no such dataset."""
    storage = open_storage(uri)
    return None if storage.size(MANIFEST_NAME) is None else load_manifest(storage)


def train_manifests(config: RunConfig) -> list[Manifest]:
    """Load what the recipe takes of the training sets, which are there.

    Raises:
        UserError: A label column or list of excluded samples does not fit, or classes differ.
    """
    return [data.manifest for data in open_train_sets(config.data)]


def ensure_data(config: RunConfig, world: World, stop: StopFlag) -> list[Manifest]:
    """Return the manifests of the training sets; missing sets are packed where the recipe says how.

    This is before any process group exists: the first rank packs, the others look for the result.
    """
    for _, uri, section in datasets_of(config):
        if section is None or manifest_or_none(uri) is not None:
            continue
        if world.is_first:
            _pack(uri, section)
        while manifest_or_none(uri) is None:
            if stop.reason:
                raise Stopped(f"{stop.reason} while the first rank packed {uri}")
            time.sleep(POLL_S)
    sets = open_train_sets(config.data)
    if config.data.val is not None:
        val = open_dataset(config.data.val, config.data.label_column)
        check_trainable(config.data.val, val.manifest)
        # An accuracy over labels that mean something else would be noise.
        check_same_classes(
            "data.val", val.storage, val.manifest,
            "data.train", sets[0].storage, sets[0].manifest,
        )  # fmt: skip
    return [data.manifest for data in sets]


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


def fitted(resolved: Resolved, manifests: Sequence[Manifest], *, say: bool) -> Resolved:
    """Fit the recipe to the training sets: the number of classes comes from there.

    Raises:
        UserError: They do not fit; before any rank waits for another.
    """
    config, classes = resolved.config, manifests[0].num_classes
    order = build_order(config.data, manifests, config.run.seed, resolved.batch.global_batch)
    steps = rhythm_of(config, order.usable).total_steps
    warmup_steps = schedule_of(config, steps, order.usable).warmup_steps
    if say and warmup_steps >= steps:
        print(
            f"warning: optim.warmup = {config.optim.warmup!r} is {warmup_steps} steps, the whole "
            f"run {steps}: the learning rate never reaches optim.lr",
            file=sys.stderr,
        )
    wish = config.model.num_classes
    if wish is not None and wish < classes:
        raise UserError(
            f"model.num_classes = {wish}, but {config.data.train_sets[0].uri} has {classes} "
            "classes; leave model.num_classes out"
        )
    if wish is not None:
        return resolved
    model = config.model.model_copy(update={"num_classes": classes})
    return replace(resolved, config=config.model_copy(update={"model": model}))
