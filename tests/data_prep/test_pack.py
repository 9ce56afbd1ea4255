import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import xxhash

from data_prep.pack import main
from tests.helpers.corpus import crop, encoded, make_folder, object_hashes
from vitscale.data import open_dataset
from vitscale.data.lease import Lease
from vitscale.data.manifest import load_index, load_manifest
from vitscale.data.storage import open_storage

ROOT = Path(__file__).resolve().parents[2]
MPIEXEC = Path(sys.executable).with_name("mpiexec")
DEADLINE_S = 120


def run_pack(*args: str, ranks: int = 0, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "data_prep.pack", *args]
    if ranks:
        command = [str(MPIEXEC), "-n", str(ranks), *command]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, **options
    )


def ledger_rows(root: Path) -> list[dict]:
    return [
        row
        for path in sorted((root / "ledger").iterdir())
        for row in pq.read_table(path).to_pylist()
    ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """2,000 JPEG and PNG files of 16 to 64 px in four classes of different size."""
    root = tmp_path_factory.mktemp("corpus") / "in"
    return make_folder(root, {"ant": 900, "bee": 600, "Cow": 400, "dog": 100})


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("small") / "in", {"a": 7, "b": 5, "c": 3})


def pack_args(source: Path, out: Path | str, *more: str) -> list[str]:
    return ["--source", f"imagefolder:{source}", "--out", str(out), "--shard-bytes", "150KB", *more]


@pytest.fixture(scope="module")
def packed(corpus, tmp_path_factory) -> Path:
    """The corpus packed by one process: what all others must equal (P1)."""
    out = tmp_path_factory.mktemp("packed") / "out"
    assert main(pack_args(corpus, out, "--workers", "1")) == 0
    return out


def test_pack_layout_is_complete(packed):
    names = sorted(object_hashes(packed))
    manifest = json.loads((packed / "manifest.json").read_text())
    shards = [f"shard-{number:06d}" for number in range(manifest["num_shards"])]

    assert manifest["num_shards"] > 20
    assert names == sorted(
        ["manifest.json", "shards.parquet", "labels.json", "_commit/plan.json"]
        + [f"{shard}.tar" for shard in shards]
        + [f"{shard}.index.parquet" for shard in shards]
        + [f"ledger/{shard}.parquet" for shard in shards]
        + [f"_commit/{shard}.json" for shard in shards]
    )
    assert manifest["num_samples"] == 2000
    assert manifest["num_failed"] == 0
    assert open_dataset(packed).class_names == ["Cow", "ant", "bee", "dog"]


def test_pack_two_processes_give_same_bytes(corpus, packed, tmp_path):
    done = run_pack(*pack_args(corpus, tmp_path / "out", "--workers", "2"))

    assert done.returncode == 0, done.stderr
    assert object_hashes(tmp_path / "out") == object_hashes(packed)


@pytest.mark.mpi
def test_pack_mpi_ranks_give_same_bytes(corpus, packed, tmp_path):
    done = run_pack(*pack_args(corpus, tmp_path / "out"), ranks=3)

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("packed ") == 1
    assert object_hashes(tmp_path / "out") == object_hashes(packed)


def test_pack_killed_twice_gives_same_bytes(corpus, packed, tmp_path):
    out = tmp_path / "out"
    args = [sys.executable, "-m", "data_prep.pack", *pack_args(corpus, out, "--workers", "2")]
    for commits in (2, 20):
        process = subprocess.Popen(
            args, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True
        )
        deadline = time.monotonic() + DEADLINE_S
        while len(list(out.glob("_commit/shard-*.json"))) < commits:
            assert process.poll() is None, (
                "the run ended before it could be killed: use more shards"
            )
            assert time.monotonic() < deadline
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert not (out / "manifest.json").exists()

    done = run_pack(*args[3:])

    assert done.returncode == 0, done.stderr
    assert "resuming: " in done.stderr
    assert object_hashes(out) == object_hashes(packed)


def test_pack_killed_parent_takes_children_along(corpus, tmp_path):
    out = tmp_path / "out"
    args = [sys.executable, "-m", "data_prep.pack", *pack_args(corpus, out, "--workers", "2")]
    process = subprocess.Popen(args, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + DEADLINE_S
    while not list(out.glob("_commit/shard-*.json")):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.wait()

    while _group_is_alive(process.pid):
        assert time.monotonic() < deadline, "children outlive their parent"
        time.sleep(0.01)


def _group_is_alive(group: int) -> bool:
    """Tell whether a process of the group runs; a zombie that nobody has reaped does not."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return True
    return False


def test_pack_sweeps_temps_and_redoes_unsound_shards(corpus, packed, tmp_path):
    out = tmp_path / "out"
    subprocess.run(["cp", "-r", str(packed), str(out)], check=True)
    (out / "manifest.json").unlink()
    (out / ".vitscale-tmp-0123456789abcdef").write_bytes(b"left by a dead run")
    (out / "shard-000001.tar").write_bytes(b"short")
    (out / "shard-000002.index.parquet").unlink()
    (out / "_commit" / "shard-000003.json").write_bytes(b'{"version": 1, "na')

    assert main(pack_args(corpus, out, "--workers", "1")) == 0

    assert object_hashes(out) == object_hashes(packed)


def test_pack_complete_dataset_is_left_alone(small, tmp_path, capsys):
    args = pack_args(small, tmp_path / "out", "--workers", "1")
    assert main(args) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}

    assert main(args) == 0

    assert "already complete" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


# In a process of its own: webdataset leaves files open.
STOCK_READER = """
import hashlib, json, sys
import webdataset
for sample in webdataset.WebDataset(sys.argv[1:], shardshuffle=False, empty_check=False):
    (ending,) = {"jpg", "png"} & sample.keys()
    digest = hashlib.sha256(sample[ending]).hexdigest()
    print(json.dumps([sample["__key__"], ending, digest, int(sample["cls"])]))
"""


def test_pack_stock_webdataset_reads_every_sample(corpus, packed):
    names = open_dataset(packed).class_names
    rows = {row["key"]: row for row in ledger_rows(packed)}
    shards = [str(path) for path in sorted(packed.glob("shard-*.tar"))]

    done = subprocess.run(
        [sys.executable, "-c", STOCK_READER, *shards], capture_output=True, text=True, check=True
    )

    samples = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(samples) == len({sample[0] for sample in samples}) == 2000
    for key, ending, digest, label in samples:
        origin = rows[key]["source"].removeprefix("imagefolder:")
        assert digest == hashlib.sha256((corpus / origin).read_bytes()).hexdigest()
        assert ending == rows[key]["image_format"]
        assert names[label] == origin.partition("/")[0]


def test_pack_index_and_ledger_agree_with_files(corpus, packed):
    storage = open_storage(packed)
    manifest = load_manifest(storage)
    rows = {row["key"]: row for row in ledger_rows(packed)}
    keys = []
    for shard_id, name in enumerate(manifest.shards.names):
        index = load_index(storage, manifest, shard_id)
        data = (packed / name).read_bytes()
        for row, key in enumerate(index.keys):
            start = int(index.offsets[row])
            origin = corpus / rows[key]["source"].removeprefix("imagefolder:")
            assert data[start : start + int(index.num_bytes[row])] == origin.read_bytes()
        keys += index.keys

    assert keys == sorted(keys) == [f"{number:09d}" for number in range(2000)]


def test_pack_shards_are_shuffled_and_of_like_size(packed):
    manifest = load_manifest(open_storage(packed))
    sizes = manifest.shards.num_bytes

    assert sizes.max() < 1.2 * sizes.mean()
    assert sizes.min() > 0.8 * sizes.mean()
    for path in sorted((packed / "ledger").iterdir()):
        assert len(set(pq.read_table(path)["label"].to_pylist())) >= 3, "a shard of few classes"


def test_pack_changed_inputs_are_refused(tmp_path, capsys):
    source = make_folder(tmp_path / "in", {"a": 5, "b": 5})
    args = pack_args(source, tmp_path / "out", "--workers", "1")
    assert main(args) == 0
    (source / "b" / "new.jpg").write_bytes(encoded(crop(5)))
    capsys.readouterr()

    assert main(args) == 2

    message = capsys.readouterr().err
    assert "classes.b.num_inputs: 5 -> 6" in message
    assert "classes.b: names or sizes of inputs changed" in message


def test_pack_changed_setting_is_refused_before_completion(small, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(pack_args(small, out, "--workers", "1")) == 0
    (out / "manifest.json").unlink()

    assert main(pack_args(small, out, "--workers", "1", "--seed", "1")) == 2

    assert "settings.seed: 0 -> 1" in capsys.readouterr().err
    assert not (out / "manifest.json").exists()


@pytest.fixture
def spoilt(tmp_path) -> Path:
    """12 good images and 4 bad inputs."""
    root = make_folder(tmp_path / "in", {"a": 6, "b": 6})
    (root / "a" / "zero.jpg").write_bytes(b"")
    (root / "a" / "page.jpg").write_bytes(b"<html>not found</html>")
    (root / "b" / "cut.jpg").write_bytes((root / "b" / "img_00000.jpg").read_bytes()[:-150])
    (root / "b" / "dangling.jpg").symlink_to("nowhere")
    return root


def test_pack_bad_inputs_are_in_the_ledger(spoilt, tmp_path, capsys):
    assert main(pack_args(spoilt, tmp_path / "out", "--workers", "1")) == 0

    rows = ledger_rows(tmp_path / "out")
    reasons = {
        row["source"]: row["reason"].partition(":")[0] for row in rows if row["status"] == "failed"
    }
    assert reasons == {
        "imagefolder:a/zero.jpg": "empty",
        "imagefolder:a/page.jpg": "not_an_image",
        "imagefolder:b/cut.jpg": "truncated",
        "imagefolder:b/dangling.jpg": "unreadable",
    }
    assert len(rows) == 16
    assert len({row["source"] for row in rows}) == 16
    assert len(open_dataset(tmp_path / "out")) == 12
    assert "num_failed=4" in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "code"), [("3", 3), ("4", 0), ("20%", 3), ("25%", 0)])
def test_pack_max_bad_ends_the_run(spoilt, tmp_path, capsys, limit, code):
    args = pack_args(spoilt, tmp_path / "out", "--workers", "1", "--max-bad", limit)

    assert main(args) == code

    assert (tmp_path / "out" / "manifest.json").exists() == (code == 0)
    if code:
        assert "--max-bad allows 3 of 16" in capsys.readouterr().err
        assert main([*args[:-1], "4"]) == 0, "a larger limit goes on"


def test_pack_shard_without_samples_is_left_out(tmp_path):
    source = make_folder(tmp_path / "in", {"a": 2})
    for number in range(8):
        (source / "a" / f"bad{number}").write_bytes(b"x" * 100_000)

    assert main(pack_args(source, tmp_path / "out", "--workers", "1")) == 0

    dataset = open_dataset(tmp_path / "out")
    assert len(dataset) == 2
    assert (dataset.manifest.shards.num_samples > 0).all()
    assert len(ledger_rows(tmp_path / "out")) == 10


def test_pack_all_bad_is_an_error(tmp_path, capsys):
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "a" / "x.jpg").write_bytes(b"no image")

    assert main(pack_args(tmp_path / "in", tmp_path / "out", "--workers", "1")) == 3

    assert "none of 1 inputs could be packed" in capsys.readouterr().err


def test_pack_retry_failed_does_only_those_shards_again(spoilt, tmp_path, capsys):
    out = tmp_path / "out"
    args = pack_args(spoilt, out, "--workers", "1", "--shard-bytes", "8KB")
    assert main([*args, "--max-bad", "0"]) == 3
    (spoilt / "b" / "dangling.jpg").unlink()
    (spoilt / "b" / "dangling.jpg").symlink_to("nowhere_else")

    assert main([*args, "--retry-failed"]) == 0

    assert len(open_dataset(out)) == 12


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--threads", "-1"], "--threads -1: at least 0"),
        (["--max-aspect", "0.5"], "max_aspect 0.5: write at least 1"),
        (["--label-map", "/nonexistent"], "--label-map /nonexistent: cannot be read"),
        (["--workers", "0"], "at least 1"),
        (["--quality", "101"], "1 to 100"),
        (["--split", "a/b"], "letters, digits"),
        (["--source", "imagefolder:/nonexistent"], "cannot list '/nonexistent'"),
        (["--source", "tars:/x"], "write KIND:URI with KIND one of imagefolder, list, tar"),
        (["--source", "imagefolder:"], "nothing after the colon"),
        (["--out", "gs://bucket/x"], "scheme 'gs' is not known"),
    ],
)
def test_pack_wrong_arguments_are_named(small, tmp_path, capsys, args, said):
    assert main([*pack_args(small, tmp_path / "out", "--workers", "1"), *args]) == 2

    assert said in capsys.readouterr().err


def test_pack_output_inside_source_is_refused(small, capsys):
    assert main(pack_args(small, small / "out")) == 2

    assert "lies inside the source" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [["--shard-bytes", "many"], ["--max-bad", "101%"], ["--sede", "1"]]
)
def test_pack_unknown_values_stop_the_parser(small, tmp_path, flags):
    with pytest.raises(SystemExit) as caught:
        main([*pack_args(small, tmp_path / "out"), *flags])

    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("folders", "said"), [([], "has no sub-folders"), (["a", "b"], "no files in them")]
)
def test_pack_empty_folder_is_an_error(tmp_path, capsys, folders, said):
    (tmp_path / "in").mkdir()
    for name in folders:
        (tmp_path / "in" / name).mkdir()

    assert main(pack_args(tmp_path / "in", tmp_path / "out", "--workers", "1")) == 2

    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_pack_dry_run_writes_nothing(small, tmp_path, capsys):
    assert main(pack_args(small, tmp_path / "out", "--dry-run")) == 0

    assert "num_inputs=15 num_classes=3" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_pack_resize_stores_smaller_images(tmp_path):
    (tmp_path / "in" / "a").mkdir(parents=True)
    large, little = encoded(crop(0, 300)), encoded(crop(1, 20))
    (tmp_path / "in" / "a" / "large.jpg").write_bytes(large)
    (tmp_path / "in" / "a" / "little.jpg").write_bytes(little)

    args = pack_args(tmp_path / "in", tmp_path / "out", "--workers", "1")
    assert main([*args, "--image", "resize", "--side", "32"]) == 0

    dataset = open_dataset(tmp_path / "out")
    index = load_index(dataset.storage, dataset.manifest, 0)
    assert sorted(index.widths.tolist()) == [20, 32]
    assert little in [sample.image for sample in dataset]
    assert large not in [sample.image for sample in dataset]
    image = dataset.manifest.image
    assert (image["policy"], image["side"], image["quality"]) == ("resize", 32, 90)


def test_pack_label_map_of_a_dataset_fixes_the_labels_of_another(tmp_path):
    train = make_folder(tmp_path / "train", {"ant": 1, "bee": 1, "cow": 1, "dog": 1})
    val = make_folder(tmp_path / "val", {"ant": 2, "dog": 2, "elk": 1})
    assert main(pack_args(train, tmp_path / "train-out", "--workers", "1")) == 0

    args = pack_args(val, tmp_path / "val-out", "--workers", "1")
    assert main([*args, "--label-map", str(tmp_path / "train-out")]) == 0

    dataset = open_dataset(tmp_path / "val-out")
    assert dataset.class_names == ["ant", "bee", "cow", "dog"]
    assert sorted(sample.label for sample in dataset) == [0, 0, 3, 3]
    (failed,) = (row for row in ledger_rows(tmp_path / "val-out") if row["status"] == "failed")
    assert failed["source"].startswith("imagefolder:elk/")
    assert failed["reason"].startswith("bad_label: ")


def test_pack_ledger_tells_what_an_input_was(tmp_path):
    (tmp_path / "in" / "a").mkdir(parents=True)
    data = encoded(crop(0, 300))
    (tmp_path / "in" / "a" / "x.png").write_bytes(data)

    args = pack_args(tmp_path / "in", tmp_path / "out", "--workers", "1")
    assert main([*args, "--image", "resize", "--side", "32"]) == 0

    (row,) = ledger_rows(tmp_path / "out")
    assert (row["input_format"], row["input_width"], row["input_height"]) == ("jpg", 300, 300)
    assert row["input_bytes"] == len(data)
    assert row["input_xxh3_64"] == xxhash.xxh3_64_intdigest(data)
    assert (row["width"], row["height"], row["reason"]) == (32, 32, "resized")
    assert row["num_bytes"] < len(data)


def test_pack_several_sources_join_their_classes(tmp_path):
    first = make_folder(tmp_path / "one", {"a": 2, "c": 2})
    second = make_folder(tmp_path / "two", {"b": 3, "c": 1}, seed=1)
    args = ["--source", f"imagefolder:{first}", "--source", f"imagefolder:{second}"]

    assert main([*args, "--out", str(tmp_path / "out"), "--workers", "1"]) == 0

    dataset = open_dataset(tmp_path / "out")
    assert dataset.class_names == ["a", "b", "c"]
    assert sorted(sample.label for sample in dataset) == [0, 0, 1, 1, 1, 2, 2, 2]
    assert {row["source"][:14] for row in ledger_rows(tmp_path / "out")} == {
        "0.imagefolder:",
        "1.imagefolder:",
    }


@pytest.mark.mpi
def test_pack_mpi_ends_as_a_whole_when_a_rank_fails(corpus, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    # A file where the folder of ledgers must go: the working ranks hit it, rank 0 does not.
    (out / "ledger").write_bytes(b"")
    start = time.monotonic()

    done = run_pack(*pack_args(corpus, out), ranks=3)

    assert done.returncode != 0
    assert time.monotonic() - start < 60, "ranks were left waiting"
    assert "error: rank" in done.stderr
    assert "cannot write" in done.stderr
    assert not (out / "manifest.json").exists()


@pytest.mark.mpi
def test_pack_mpi_says_user_error_once(small, tmp_path):
    (tmp_path / "empty").mkdir()

    missing = run_pack(*pack_args(tmp_path / "empty", tmp_path / "out"), ranks=3)
    typo = run_pack(*pack_args(small, tmp_path / "out"), "--sede", "1", ranks=3)

    assert missing.returncode == typo.returncode == 2
    assert missing.stderr.count("has no sub-folders") == 1
    assert typo.stderr.count("unrecognized arguments: --sede 1") == 1


@pytest.mark.s3
def test_pack_s3_gives_same_bytes_as_files(small, tmp_path, s3_uri):
    args = ["--shard-bytes", "8KB"]
    assert main(pack_args(small, tmp_path / "out", "--workers", "1", *args)) == 0

    done = run_pack(*pack_args(small, s3_uri, "--workers", "2", *args))

    assert done.returncode == 0, done.stderr
    remote, local = open_storage(s3_uri), open_storage(tmp_path / "out")
    assert remote.list() == local.list()
    assert [remote.read_bytes(name) for name in remote.list()] == [
        local.read_bytes(name) for name in local.list()
    ]
    assert list(open_dataset(s3_uri)) == list(open_dataset(tmp_path / "out"))


TORCHLESS = "import sys; sys.modules['torch'] = sys.modules['deepspeed'] = None\n"


def test_pack_works_without_torch(small, tmp_path):
    code = TORCHLESS + "from data_prep.pack import main; sys.exit(main(sys.argv[1:]))"
    args = pack_args(small, tmp_path / "out", "--workers", "1")

    done = subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert len(open_dataset(tmp_path / "out")) == 15


def test_pack_without_torch_check_can_fail():
    done = subprocess.run(
        [sys.executable, "-c", TORCHLESS + "import torch"], capture_output=True, text=True
    )

    assert done.returncode == 1
    assert "import of torch halted" in done.stderr


@pytest.mark.parametrize("script", ["pack", "verify", "show"])
def test_script_runs_by_path_from_anywhere(tmp_path, script):
    done = subprocess.run(
        [sys.executable, str(ROOT / "data_prep" / f"{script}.py"), "--help"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert f"usage: vitscale {script}" in done.stdout
    assert "examples:" in done.stdout


def test_pack_second_job_on_one_prefix_is_refused(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    with Lease(open_storage(out), "vitscale pack"):
        assert main(pack_args(corpus, out, "--workers", "1")) == 2

    assert "another job" in capsys.readouterr().err
    assert not (out / "manifest.json").exists()


def test_pack_removes_what_a_job_killed_at_its_very_end_left(small, tmp_path):
    out = tmp_path / "out"
    assert main(pack_args(small, out, "--workers", "1")) == 0
    before = object_hashes(out)
    dead = {"host": "x", "boot": "other", "pid": 1, "started": 1, "purpose": "p", "beats": 0}
    boot = json.loads(_lease_text(tmp_path / "probe"))["boot"]
    (out / "_commit" / "lease-000001.json").write_text(json.dumps({**dead, "boot": boot}))

    assert main(pack_args(small, out, "--workers", "1")) == 0

    assert object_hashes(out) == before


def _lease_text(folder: Path) -> str:
    with Lease(open_storage(folder), "probe"):
        return (folder / "_commit" / "lease-000001.json").read_text()
