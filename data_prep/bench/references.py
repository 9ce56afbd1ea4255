"""What the packer is measured beside: other people's writers, and the work that nobody can avoid.

Started by path, also with another environment's Python: it needs nothing of ours. A case first
imports and prepares, then does its work under the clock.
"""

import contextlib
import http.server
import importlib
import importlib.metadata
import io
import json
import multiprocessing
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Request = dict[str, Any]
# Done under the clock; may answer fields of the result, also its own "seconds".
Work = Callable[[], dict[str, Any] | None]
SCRATCH_NAME = "pages.scratch"


def main() -> None:
    """Run the case that the request on the command line names; print its result as JSON."""
    if not __package__:  # by path: our folder is no place to look for other people's modules
        sys.path.pop(0)
    answer(CASES, json.loads(Path(sys.argv[1]).read_bytes()))


def answer(cases: dict[str, Callable[[Request], Work]], request: Request) -> None:
    """Run a case and print its result as the last line.

    Args:
        cases: Name -> what prepares the case; it imports, and raises ImportError where something is
            not installed.
        request: "case", "work" (an empty folder), "num_bytes" that are written, and what the case
            needs besides.
    """
    try:
        work = cases[request["case"]](request)
    except ImportError as error:
        print(json.dumps({"missing": f"{type(error).__name__}: {error}"}), flush=True)
        return
    warm_pages(Path(request["work"]), request["num_bytes"] * 5 // 4)
    start, start_cpu = time.perf_counter(), _cpu_s()
    found = work() or {}
    seconds, cpu = time.perf_counter() - start, _cpu_s() - start_cpu
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, **found}), flush=True)


def _cpu_s() -> float:
    """Give the seconds of CPU time of this process, and of its children that have ended."""
    return sum(os.times()[:4])


def warm_pages(folder: Path, num_bytes: int) -> None:
    """Write a file and remove it, so that what is written next finds memory that was in use.

    A virtual machine may have given its free memory back, and then the first writer pays for it.
    """
    path, block = folder / SCRATCH_NAME, bytes(8 << 20)
    with open(path, "wb", buffering=0) as file:
        for _ in range(-(-num_bytes // len(block))):
            file.write(block)
        os.fsync(file.fileno())
    path.unlink()


def versions(*names: str) -> dict[str, Any]:
    """Give a result's field with the versions of distributions."""
    return {"versions": {name: importlib.metadata.version(name) for name in names}}


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _rows(request: Request) -> list[tuple[str, int, str]]:
    """Give path, class and key of every input."""
    return [(path, label, f"{n:09d}") for n, (path, label) in enumerate(request["inputs"])]


def _in_processes(processes: int, body: Callable[[int], None]) -> None:
    fork = multiprocessing.get_context("fork")
    started = [fork.Process(target=body, args=(number,)) for number in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"a process of the case ended with {process.exitcode}")


def shard_writer(request: Request) -> Work:
    """WebDataset's ShardWriter, one process."""
    webdataset = importlib.import_module("webdataset")

    def work() -> dict[str, Any]:
        pattern = os.path.join(request["work"], "%06d.tar")
        size = request["shard_bytes"]
        with webdataset.ShardWriter(pattern, maxsize=size, maxcount=10**9, verbose=0) as writer:
            for path, label, key in _rows(request):
                writer.write({"__key__": key, "jpg": _read(path), "cls": label})
        return versions("webdataset")

    return work


def mds_writer(request: Request) -> Work:
    """MosaicML streaming's MDSWriter, one process, neither compressed nor hashed."""
    streaming = importlib.import_module("streaming")
    columns = {"jpg": "bytes", "cls": "int"}

    def work() -> dict[str, Any]:
        out = os.path.join(request["work"], "out")
        size = request["shard_bytes"]
        with streaming.MDSWriter(out=out, columns=columns, size_limit=size) as writer:
            for path, label, _ in _rows(request):
                writer.write({"jpg": _read(path), "cls": label})
        return versions("mosaicml-streaming")

    return work


def plain_tarfile(request: Request) -> Work:
    """Python's tarfile, one process."""

    def work() -> None:
        shard: tarfile.TarFile | None = None
        for path, label, key in _rows(request):
            if shard is None or shard.offset > request["shard_bytes"]:
                if shard:
                    shard.close()
                shard = tarfile.TarFile(os.path.join(request["work"], f"{key}.tar"), "w")
            for extension, content in (("cls", str(label).encode()), ("jpg", _read(path))):
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))
        if shard:
            shard.close()

    return work


def tar_command(request: Request) -> Work:
    """The `tar` command, which neither labels nor looks at anything."""
    names = os.path.join(request["work"], "names")
    Path(names).write_bytes(b"".join(os.fsencode(path) + b"\0" for path, _ in request["inputs"]))
    out = os.path.join(request["work"], "all.tar")
    # Old names are absolute paths: without -P tar would say so.
    command = ["tar", "-c", "-P", "-f", out, "--null", "-T", names]

    def work() -> None:
        subprocess.run(command, check=True)

    return work


def shard_writer_pillow(request: Request) -> Work:
    """Resize with Pillow, decoding at a fraction, and write with ShardWriter."""
    webdataset = importlib.import_module("webdataset")
    image = importlib.import_module("PIL.Image")

    def small(data: bytes) -> bytes:
        with image.open(io.BytesIO(data)) as picture:
            size = _small_size(picture.width, picture.height, request["side"])
            picture.draft("RGB", size)
            made = picture.convert("RGB").resize(size, image.Resampling.LANCZOS)
        out = io.BytesIO()
        made.save(out, "JPEG", quality=request["quality"])
        return out.getvalue()

    def body(number: int) -> None:
        pattern = os.path.join(request["work"], f"{number}-%06d.tar")
        with webdataset.ShardWriter(pattern, maxsize=request["shard_bytes"], verbose=0) as writer:
            for path, label, key in _rows(request)[number :: request["processes"]]:
                writer.write({"__key__": key, "jpg": small(_read(path)), "cls": label})

    def work() -> dict[str, Any]:
        _in_processes(request["processes"], body)
        return versions("webdataset", "pillow")

    return work


def turbo(request: Request) -> Work:
    """The limit of resizing: decode at a fraction, average, encode; nothing is kept."""
    cv2 = importlib.import_module("cv2")
    simplejpeg = importlib.import_module("simplejpeg")
    cv2.setNumThreads(0)

    def body(number: int) -> None:
        for path, _ in request["inputs"][number :: request["processes"]]:
            data = _read(path)
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            size = _small_size(width, height, request["side"])
            pixels = simplejpeg.decode_jpeg(
                data, "RGB", min_width=size[0], min_height=size[1], min_factor=2
            )
            if pixels.shape[1::-1] != size:
                pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
            simplejpeg.encode_jpeg(pixels, request["quality"], "RGB", "420")

    def work() -> dict[str, Any]:
        _in_processes(request["processes"], body)
        return versions("simplejpeg", "opencv-python-headless")

    return work


def _small_size(width: int, height: int, side: int) -> tuple[int, int]:
    scale = min(1.0, side / min(width, height))
    return round(width * scale), round(height * scale)


def img2dataset(request: Request) -> Work:
    """img2dataset, fed by a web server on this machine.

    Its clock runs from the start of its first shard to the end of its last, as it notes them: the
    start of its processes, which import all of it again, is not counted.
    """
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
    download = importlib.import_module("img2dataset").download
    names = {f"{n}.jpg": path for n, (path, _) in enumerate(request["inputs"])}
    urls, out = (Path(request["work"], name) for name in ("urls.txt", "out"))

    def work() -> dict[str, Any]:
        with _serving(names) as port:
            urls.write_text("".join(f"http://127.0.0.1:{port}/{name}\n" for name in names))
            download(
                url_list=str(urls),
                output_folder=str(out),
                processes_count=request["processes"],
                thread_count=8,
                image_size=request["side"],
                resize_mode="keep_ratio",
                resize_only_if_bigger=True,
                encode_quality=request["quality"],
                output_format="webdataset",
                number_sample_per_shard=-(-len(names) // request["num_shards"]),
                disallowed_header_directives=[],
            )
        notes = [json.loads(path.read_bytes()) for path in out.glob("*_stats.json")]
        made = sum(note["successes"] for note in notes)
        if made != len(names):
            raise RuntimeError(f"img2dataset made {made} of {len(names)} images")
        seconds = max(note["end_time"] for note in notes) - min(
            note["start_time"] for note in notes
        )
        busy = sum(note["duration"] for note in notes)
        return {"seconds": seconds, "busy_seconds": busy, **versions("img2dataset")}

    return work


@contextlib.contextmanager
def _serving(names: dict[str, str]) -> Iterator[int]:
    """Give files by other names on a port of this machine, from a thread."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = _read(names[self.path[1:]])
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


CASES: dict[str, Callable[[Request], Work]] = {
    "shard_writer": shard_writer,
    "mds_writer": mds_writer,
    "tarfile": plain_tarfile,
    "tar": tar_command,
    "shard_writer_pillow": shard_writer_pillow,
    "turbo": turbo,
    "img2dataset": img2dataset,
}

if __name__ == "__main__":
    main()
