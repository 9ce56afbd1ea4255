"""What the loader is measured beside: other people's loaders, and the work that nobody can avoid.

Started by path, also with another environment's Python: it needs nothing of ours. A case first
imports, writes its own kind of dataset where it has none yet, and starts; then batches are taken
under the clock. All give float32 batches [B, C, H, W] of antialiased random crops, normalised.
"""

import importlib
import io
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Request = dict[str, Any]
# Prepares; its batches are then taken under the clock.
Prepare = Callable[[Request], Iterable[Any]]

RATIO = (3 / 4, 4 / 3)
SHARD_BYTES = 32 << 20
# Images that a process of the limit takes at a time, and how often it is looked whether it lives.
SHARE, LOOK_S = 16, 1.0


def main() -> None:
    """Run the case that the request on the command line names; print its result as JSON."""
    if not __package__:  # by path: our folder is no place to look for other people's modules
        sys.path.pop(0)
    request = json.loads(Path(sys.argv[1]).read_bytes())
    try:
        batches = CASES[request["case"]](request)
    except ImportError as error:
        print(json.dumps({"missing": f"{type(error).__name__}: {error}"}), flush=True)
        return
    print(json.dumps(clocked(batches, request)), flush=True)


def clocked(batches: Iterable[Any], request: Request) -> dict[str, Any]:
    """Take batches under the clock.

    Args:
        batches: At least as many as are asked for; one more makes no difference.
        request: "warm_batches" before the clock starts, then "num_batches".

    Returns:
        "seconds" for the batches; "versions" of the modules that made them.

    Raises:
        RuntimeError: A batch before the clock starts is not of the kind that all are to give.
    """
    iterator = iter(batches)
    for _ in range(request["warm_batches"]):
        _check(next(iterator), request)
    start = time.perf_counter()
    for _ in range(request["num_batches"]):
        next(iterator)
    seconds = time.perf_counter() - start
    names = MODULES.get(request["case"], [])
    found = {name: str(importlib.import_module(name).__version__) for name in names}
    return {"seconds": seconds, "versions": found}


def _check(batch: Any, request: Request) -> None:
    images = batch[0] if isinstance(batch, tuple | list) else batch
    if images is None:  # the limit's
        return
    shape, wanted = tuple(images.shape), (request["batch"], 3, request["side"], request["side"])
    low, high = float(images.min()), float(images.max())
    if shape != wanted or "float32" not in str(images.dtype) or max(-low, high) > 1.01:
        raise RuntimeError(
            f"a batch is {images.dtype} {shape} from {low:g} to {high:g}; float32 {wanted} from -1 "
            "to 1 is due"
        )


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def limit(request: Request) -> Iterator[None]:
    """Decode the same files in as many processes with libjpeg-turbo, whole and to nothing else."""
    simplejpeg = importlib.import_module("simplejpeg")
    fork = multiprocessing.get_context("fork")
    paths = [path for path, _ in request["inputs"]]
    taken, done = fork.Value("q", 0), fork.Semaphore(0)

    def work() -> None:
        while True:
            with taken.get_lock():
                first = taken.value
                taken.value += SHARE
            for number in range(first, first + SHARE):
                simplejpeg.decode_jpeg(_read(paths[number % len(paths)]), "RGB")
                done.release()

    processes = [fork.Process(target=work, daemon=True) for _ in range(request["workers"])]
    for process in processes:
        process.start()

    def batches() -> Iterator[None]:
        while True:
            for _ in range(request["batch"]):
                # One that died would never release it.
                while not done.acquire(timeout=LOOK_S):
                    if not all(process.is_alive() for process in processes):
                        raise RuntimeError("a process of the limit ended")
            yield None

    return batches()


def dali(request: Request) -> Iterator[Any]:
    """NVIDIA DALI on the CPU: crop while decoding, resize, normalise; threads."""
    fn = importlib.import_module("nvidia.dali.fn")
    types = importlib.import_module("nvidia.dali.types")
    pipeline_class = importlib.import_module("nvidia.dali").Pipeline
    pipeline = pipeline_class(
        batch_size=request["batch"], num_threads=request["workers"], device_id=None, seed=0
    )
    files, labels = zip(*request["inputs"], strict=True)
    with pipeline:
        data, label = fn.readers.file(files=files, labels=labels, random_shuffle=True)
        crops = fn.decoders.image_random_crop(
            data,
            device="cpu",
            random_area=request["area"],
            random_aspect_ratio=RATIO,
        )
        small = fn.resize(crops, size=[request["side"]] * 2, antialias=True)
        images = fn.crop_mirror_normalize(
            small,
            dtype=types.FLOAT,
            output_layout="CHW",
            mean=[127.5] * 3,
            std=[127.5] * 3,
            mirror=fn.random.coin_flip(probability=0.5),
        )
        pipeline.set_outputs(images, label)
    pipeline.build()

    def batches() -> Iterator[Any]:
        while True:
            images, _ = pipeline.run()
            yield images.as_array()

    return batches()


def _transform(request: Request, first: str) -> Any:
    """Build torchvision's v2 transforms, of tensors, or of Pillow's pictures: "ToImage"."""
    v2 = importlib.import_module("torchvision.transforms.v2")
    torch = importlib.import_module("torch")
    size, area = request["side"], tuple(request["area"])
    crop = v2.RandomResizedCrop(size, area, RATIO, antialias=True)
    flip = v2.RandomHorizontalFlip()
    # Pillow's resize is the faster one for a picture of its own.
    start = [crop, flip, v2.ToImage()] if first == "ToImage" else [crop, flip]
    half = [0.5] * 3
    return v2.Compose([*start, v2.ToDtype(torch.float32, scale=True), v2.Normalize(half, half)])


def torchvision(request: Request) -> Iterable[Any]:
    """ImageFolder, decode_jpeg and v2 transforms, under torch's DataLoader."""
    torch_data = importlib.import_module("torch.utils.data")
    datasets = importlib.import_module("torchvision.datasets")
    vision_io = importlib.import_module("torchvision.io")
    rgb = vision_io.ImageReadMode.RGB
    dataset = datasets.ImageFolder(
        request["folder"],
        _transform(request, "tensor"),
        loader=lambda path: vision_io.decode_jpeg(vision_io.read_file(path), mode=rgb),
    )
    return _data_loader(torch_data, dataset, request, shuffle=True)


def _data_loader(torch_data: Any, dataset: Any, request: Request, **options: Any) -> Any:
    return torch_data.DataLoader(
        dataset, request["batch"], num_workers=request["workers"], drop_last=True, **options
    )


class PillowExamples:
    """Stored bytes to an example, as these libraries' own examples do it.

    Args:
        request: Sizes.
    """

    def __init__(self, request: Request) -> None:
        self._image = importlib.import_module("PIL.Image")
        self._transform = _transform(request, "ToImage")

    def __call__(self, data: bytes) -> Any:
        """Decode and transform one picture."""
        with self._image.open(io.BytesIO(data)) as picture:
            return self._transform(picture.convert("RGB"))


def webdataset(request: Request) -> Any:
    """WebDataset: tars, a shuffle buffer of 1000, Pillow."""
    library = importlib.import_module("webdataset")
    store = _store(request, "webdataset", lambda folder: _write_tars(library, request, folder))
    example = PillowExamples(request)
    tars = sorted(str(path) for path in store.glob("*.tar"))
    # A reader needs a tar of its own.
    dataset = library.WebDataset(tars, shardshuffle=len(tars), seed=0).shuffle(1000)
    dataset = dataset.to_tuple("jpg", "cls").map_tuple(example, int)
    batches = dataset.batched(request["batch"], partial=False)
    return library.WebLoader(batches, batch_size=None, num_workers=request["workers"])


def _write_tars(library: Any, request: Request, folder: Path) -> None:
    pattern = str(folder / "%06d.tar")
    with library.ShardWriter(pattern, maxsize=SHARD_BYTES, verbose=0) as writer:
        for number, (path, label) in enumerate(request["inputs"]):
            writer.write({"__key__": f"{number:09d}", "jpg": _read(path), "cls": label})


def mosaic(request: Request) -> Any:
    """MosaicML streaming: MDS shards read in place, shuffled, Pillow, torch's DataLoader."""
    streaming = importlib.import_module("streaming")
    torch_data = importlib.import_module("torch.utils.data")
    store = _store(request, "mosaic", lambda folder: _write_mds(streaming, request, folder))
    streaming.base.util.clean_stale_shared_memory()
    example = PillowExamples(request)

    class Examples(streaming.StreamingDataset):  # type: ignore[name-defined]
        def __getitem__(self, at: Any) -> Any:
            sample = super().__getitem__(at)
            return example(sample["jpg"]), sample["cls"]

    dataset = Examples(local=str(store), shuffle=True, batch_size=request["batch"])
    return _data_loader(torch_data, dataset, request)


def _write_mds(streaming: Any, request: Request, folder: Path) -> None:
    columns = {"jpg": "bytes", "cls": "int"}
    with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=SHARD_BYTES) as writer:
        for path, label in request["inputs"]:
            writer.write({"jpg": _read(path), "cls": label})


def litdata(request: Request) -> Any:
    """Lightning's litdata: optimised chunks read in place, shuffled, Pillow, its own loader."""
    library = importlib.import_module("litdata")
    store = _store(request, "litdata", lambda folder: _write_chunks(library, request, folder))
    example = PillowExamples(request)

    class Examples(library.StreamingDataset):  # type: ignore[name-defined]
        def __getitem__(self, at: Any) -> Any:
            sample = super().__getitem__(at)
            return example(sample["jpg"]), sample["cls"]

    dataset = Examples(str(store), shuffle=True, drop_last=True)
    return library.StreamingDataLoader(
        dataset, batch_size=request["batch"], num_workers=request["workers"], drop_last=True
    )


def _write_chunks(library: Any, request: Request, folder: Path) -> None:
    library.optimize(stored, request["inputs"], str(folder), num_workers=1, chunk_bytes=SHARD_BYTES)


def stored(entry: tuple[str, int]) -> dict[str, Any]:
    """Give what litdata stores of an input; its processes look this function up by name."""
    return {"jpg": _read(entry[0]), "cls": entry[1]}


def _store(request: Request, name: str, write: Callable[[Path], None]) -> Path:
    """Give the folder with a library's own kind of dataset; written by the first round."""
    final = Path(request["store"], name)
    if not final.exists():
        partial = final.with_name(f"{name}.partial")
        partial.mkdir()
        # In a process of its own: it may leave settings behind that the reading would inherit.
        process = multiprocessing.get_context("fork").Process(target=write, args=(partial,))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"writing for {name} ended with {process.exitcode}")
        partial.rename(final)
        # Else the disk would be busy under the clock.
        os.sync()
    return final


# Case -> modules whose versions are told.
MODULES = {
    "dali": ["nvidia.dali"],
    "torchvision": ["torch", "torchvision"],
    "webdataset": ["webdataset", "PIL"],
    "mosaic": ["streaming"],
    "litdata": ["litdata"],
}
CASES: dict[str, Prepare] = {
    "limit": limit,
    "dali": dali,
    "torchvision": torchvision,
    "webdataset": webdataset,
    "mosaic": mosaic,
    "litdata": litdata,
}

if __name__ == "__main__":
    main()
