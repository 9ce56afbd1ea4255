"""The loader's own cases, started by path, each in a fresh process."""

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(
        Path(__file__).resolve().parents[2]
    )  # the checkout's root instead of the script's folder

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from PIL import Image

import vitscale
from launchers.bench.peers import Request, clocked
from vitscale.config.errors import VitscaleError
from vitscale.config.recipe import AugmentConfig, DataConfig
from vitscale.data.audit import hash_key
from vitscale.data.augment import inception_box
from vitscale.data.cache import ShardCache
from vitscale.data.dataset import Dataset
from vitscale.data.decode import decode_rgb
from vitscale.data.loader import TrainLoader, build_train_loader
from vitscale.data.normalise import Normalise
from vitscale.data.order import Located
from vitscale.data.permute import stream
from vitscale.data.picture import train_example
from vitscale.data.reader import ShardReader
from vitscale.data.train_sets import build_order, open_train_sets

# A worker's batch is made in this time, even of a big machine's many workers.
READY_AFTER_S = 60.0
RESUME_TIMES = 5
RESUME_AT = 0.9
# Shares of the run after which memory is looked at.
MEMORY_SAMPLES = 50
MEMORY_SETTLED = 5


@dataclass(frozen=True)
class Setup:
    """The public way to a loader, from a request."""

    request: Request

    @property
    def augment(self) -> AugmentConfig:
        """How examples are made."""
        return AugmentConfig(crop_scale=tuple(self.request["area"]), antialias=True)

    @property
    def data(self) -> DataConfig:
        """Where they come from."""
        return DataConfig(
            train=self.request["uri"],
            num_workers=self.request["workers"],
            jpeg_scale=self.request.get("jpeg_scale", "exact"),
            cache_dir=self.request["cache_dir"],
        )

    def start(
        self, start_step: int = 0, num_workers: int | None = None
    ) -> tuple[TrainLoader, list[Dataset], Any]:
        """Open everything; give the loader, the datasets and the order."""
        batch, data = self.request["batch"], self.data
        sets = open_train_sets(data)
        order = build_order(data, [one.manifest for one in sets], 0, batch)
        loader = build_train_loader(
            data,
            self.augment,
            sets,
            order=order,
            img_size=self.request["side"],
            in_chans=3,
            rank=0,
            world_size=1,
            micro_batch=batch,
            start_step=start_step,
            seed=0,
            num_workers=num_workers,
        )
        return loader, sets, order


class Normalised:
    """What the training process does to a batch: float32 in memory that is kept, as a device's is.

    Args:
        setup: Sizes.
    """

    def __init__(self, setup: Setup) -> None:
        import torch

        batch, side = setup.request["batch"], setup.request["side"]
        self._buffer = torch.empty((batch, 3, side, side))
        augment = setup.augment
        self._normalise = Normalise(augment.mean, augment.std, 3, "cpu", torch.float32)

    def __call__(self, images: Any) -> Any:
        """Normalise a batch; the result is valid until the next one."""
        return self._normalise(images, out=self._buffer)


def loader(request: Request) -> dict[str, Any]:
    """Batches of the loader, normalised in the process that takes them."""
    setup = Setup(request)
    batches, _, _ = setup.start()
    normalised = Normalised(setup)
    with contextlib.closing(batches):
        return clocked((normalised(batch.images) for batch in batches), request)


def breakdown(request: Request) -> dict[str, Any]:
    """Microseconds an image of every stage, in one process; the hand-over with one reader."""
    setup = Setup(request)
    batches, (dataset,), order = setup.start(num_workers=0)
    reader, normalised, clock = _reader(setup, dataset), Normalised(setup), _Clock()
    with contextlib.closing(batches), contextlib.closing(reader):
        for step in range(1 + request["num_batches"]):
            # The first batch only opens shards and fills caches of the processor.
            clock.is_running = step > 0
            places = order.places(order.step_positions(step))
            # Who comes second finds the bytes in the processor's caches: it is each in turn.
            if step % 2:
                _in_parts(setup, reader, places, clock)
            with clock("all"):
                batch = next(batches)
            with clock("normalise"):
                normalised(batch.images)
            if step % 2 == 0:
                _in_parts(setup, reader, places, clock)
    spent = clock.seconds
    made = spent["read"] + spent["decode, crop, resize, flip"]
    stages = {
        "fetch": spent["read"] - spent["verify"],
        "verify": spent["verify"],
        "decode, crop, resize, flip": spent["decode, crop, resize, flip"],
        "collate": spent["all"] - made,
        "hand-over": _hand_over_s(setup, request["num_batches"]),
        "normalise": spent["normalise"],
    }
    images = request["num_batches"] * request["batch"]
    micros = {name: 1e6 * seconds / images for name, seconds in stages.items()}
    return {"seconds": sum(stages.values()), "stages_us": micros}


def _in_parts(setup: Setup, reader: ShardReader, places: Located, clock: "_Clock") -> None:
    """Do the work of a batch stage by stage, in the order in which readers do it."""
    side = setup.request["side"]
    out = np.empty((3, side, side), np.uint8)
    for i in np.lexsort((places.index, places.shard_id)).tolist():
        with clock("read"):
            record = reader.read(int(places.shard_id[i]), int(places.index[i]))
        with clock("verify"):
            xxhash.xxh3_64_intdigest(record.image)
        with clock("decode, crop, resize, flip"):
            _example(setup, record.image, int(places.sample_index[i]), out)


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.is_running = True

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        spent = time.perf_counter() - start
        if self.is_running:
            self.seconds[name] = self.seconds.get(name, 0.0) + spent


def _reader(setup: Setup, dataset: Dataset) -> ShardReader:
    data = setup.data
    storage, manifest = dataset.storage, dataset.manifest
    cache = ShardCache(storage, manifest, data.cache_dir, data.cache_limit_bytes)
    return ShardReader(storage, manifest, cache, max_open=len(manifest.shards))


def _example(setup: Setup, image: bytes, sample: int, out: NDArray[np.uint8]) -> None:
    rng = np.random.default_rng(stream(0, "augment", 0, sample))
    train_example(image, out, setup.augment, setup.data.jpeg_scale, rng)


def _hand_over_s(setup: Setup, num_batches: int) -> float:
    """Seconds that it takes to get so many batches that are ready."""
    batches, _, _ = setup.start(num_workers=1)
    seconds = 0.0
    with contextlib.closing(batches):
        for _ in range(num_batches):
            end = time.monotonic() + READY_AFTER_S
            while not batches.readers.num_ready:
                if time.monotonic() > end:
                    raise VitscaleError(f"no batch was made in {READY_AFTER_S:g} s")
                time.sleep(0.001)
            start = time.perf_counter()
            next(batches)
            seconds += time.perf_counter() - start
    return seconds


def fidelity(request: Request) -> dict[str, Any]:
    """Distance to Pillow's antialiased resize of the same crops of the whole picture, in levels."""
    setup, start = Setup(request), time.perf_counter()
    config, side = setup.augment, request["side"]
    out = np.empty((3, side, side), np.uint8)
    levels = []
    for sample, (path, _) in enumerate(request["inputs"]):
        image = Path(path).read_bytes()
        _example(setup, image, sample, out)
        pixels = decode_rgb(image, 3)
        rng = np.random.default_rng(stream(0, "augment", 0, sample))
        flip = rng.random() < config.hflip
        height, width = pixels.shape[:2]
        box = inception_box(height, width, config.crop_scale, config.crop_ratio, rng)
        corners = (box.left, box.top, box.left + box.width, box.top + box.height)
        wanted = Image.fromarray(pixels).resize((side, side), Image.Resampling.BILINEAR, corners)
        expected = np.asarray(wanted)[:, ::-1] if flip else np.asarray(wanted)
        distance = np.abs(out.transpose(1, 2, 0).astype(np.int16) - expected)
        levels.append(float(distance.mean()))
    return {
        "seconds": time.perf_counter() - start,
        "mean_levels": float(np.mean(levels)),
        "worst_levels": max(levels),
    }


def resume(request: Request) -> dict[str, Any]:
    """Seconds from opening the dataset to the first batch, at the start and late in an epoch."""
    setup = Setup(request)
    _first_batch_s(setup, 0)  # modules are imported and files read
    late = int(request["num_inputs"] * RESUME_AT) // request["batch"]
    starts, resumed = [], []
    for _ in range(RESUME_TIMES):
        starts.append(_first_batch_s(setup, 0))
        resumed.append(_first_batch_s(setup, late))
    seconds = sum(starts) + sum(resumed)
    return {"seconds": seconds, "start_s": starts, "resumed_s": resumed, "resumed_step": late}


def _first_batch_s(setup: Setup, step: int) -> float:
    start = time.perf_counter()
    batches, (dataset,), order = setup.start(start_step=step)
    with contextlib.closing(batches):
        batch = next(batches)
        seconds = time.perf_counter() - start
        due = order.samples(order.step_positions(step)).sample_index
        wanted = [hash_key(dataset[int(sample)].key) for sample in due]
        found = batch.key_hash.numpy().view(np.uint64).tolist()
    if found != wanted:
        raise VitscaleError(f"the first batch after step {step} holds other samples than are due")
    return seconds


def memory(request: Request) -> dict[str, Any]:
    """Memory of the process and its readers while many batches pass, in bytes."""
    batches, _, _ = Setup(request).start()
    start, every = time.perf_counter(), max(1, request["num_batches"] // MEMORY_SAMPLES)
    found = []
    with contextlib.closing(batches):
        for number in range(1, request["num_batches"] + 1):
            next(batches)
            if number % every == 0:
                found.append(proportional_bytes([p.pid for p in batches.readers.processes]))
    return {"seconds": time.perf_counter() - start, "bytes": found[MEMORY_SETTLED:]}


def proportional_bytes(children: list[int | None]) -> int:
    """Give the memory of this process and others; what several share is divided among them.

    Raises:
        VitscaleError: The system does not say it.
    """
    total = 0
    for pid in ("self", *children):
        path = Path(f"/proc/{pid}/smaps_rollup")
        if not path.exists():
            raise VitscaleError(f"memory is read from {path}, which this system does not have")
        rows = path.read_text().splitlines()
        total += next(int(row.split()[1]) for row in rows if row.startswith("Pss:")) * 1024
    return total


CASES: dict[str, Callable[[Request], dict[str, Any]]] = {
    "loader": loader,
    "breakdown": breakdown,
    "fidelity": fidelity,
    "resume": resume,
    "memory": memory,
}


def main() -> None:
    """Run the case that the request on the command line names; print its result as JSON."""
    request = json.loads(Path(sys.argv[1]).read_bytes())
    found = CASES[request["case"]](request)
    print(json.dumps({**found, "versions": {"vitscale": vitscale.__version__}}), flush=True)


if __name__ == "__main__":
    main()
