"""P1: the same inputs and settings give byte-identical objects, whoever does the work and where."""

import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.pack import main
from tests.helpers.corpus import make_folder, object_hashes
from vitscale.data import open_dataset
from vitscale.data.manifest import load_index, load_manifest, sha256_hex
from vitscale.data.storage import open_storage

ROOT = Path(__file__).resolve().parents[2]
MPIEXEC = Path(sys.executable).with_name("mpiexec")
FORMATS = ["tar", "arrow"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("corpus") / "in", {"ant": 150, "bee": 90, "cow": 20})


def words(corpus: Path, out: Path | str, kind: str) -> list[str]:
    return ["--source", f"imagefolder:{corpus}", "--out", str(out), "--format", kind,
            "--shard-bytes", "40KB"]  # fmt: skip


@pytest.fixture(scope="module")
def wanted(corpus, tmp_path_factory) -> dict[str, dict[str, str]]:
    """Hashes of all objects by format, as one process writes them."""
    hashes = {}
    for kind in FORMATS:
        out = tmp_path_factory.mktemp(kind) / "out"
        assert main([*words(corpus, out, kind), "--workers", "1"]) == 0
        hashes[kind] = object_hashes(out)
        assert sum(name.endswith(f".{kind}") for name in hashes[kind]) > 10
    return hashes


def run(arguments: list[str], ranks: int = 0) -> None:
    command = [sys.executable, "-m", "data_prep.pack", *arguments]
    if ranks:
        command = [str(MPIEXEC), "-n", str(ranks), *command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("more", [["--workers", "2"], ["--workers", "5"], ["--threads", "3"]])
def test_pack_processes_and_threads_give_same_bytes(corpus, wanted, tmp_path, kind, more):
    run([*words(corpus, tmp_path / "out", kind), *more])

    assert object_hashes(tmp_path / "out") == wanted[kind]


@pytest.mark.mpi
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_pack_mpi_ranks_give_same_bytes(corpus, wanted, tmp_path, kind, ranks):
    run(words(corpus, tmp_path / "out", kind), ranks)

    assert object_hashes(tmp_path / "out") == wanted[kind]


def remote_hashes(uri: str) -> dict[str, str]:
    storage = open_storage(uri)
    return {name: sha256_hex(storage.read_bytes(name)) for name in storage.list()}


@pytest.mark.s3
@pytest.mark.parametrize("kind", FORMATS)
def test_pack_s3_gives_same_bytes(corpus, wanted, s3_uri, kind):
    run(words(corpus, s3_uri, kind), ranks=3)

    assert remote_hashes(s3_uri) == wanted[kind]


@pytest.mark.s3
@pytest.mark.parametrize("kind", FORMATS)
def test_pack_ceph_gives_same_bytes(corpus, wanted, ceph_uri, kind):
    run(words(corpus, ceph_uri, kind), ranks=3)

    assert remote_hashes(ceph_uri) == wanted[kind]


def test_pack_formats_hold_the_same_samples_in_the_same_order(corpus, tmp_path):
    for kind in FORMATS:
        assert main([*words(corpus, tmp_path / kind, kind), "--workers", "1"]) == 0

    tar, arrow = (open_dataset(tmp_path / kind) for kind in FORMATS)
    assert tar.manifest.samples_sha256 == arrow.manifest.samples_sha256
    assert tar.manifest.shards.num_samples.tolist() == arrow.manifest.shards.num_samples.tolist()
    facts = [[(s.key, s.image, s.labels) for s in dataset] for dataset in (tar, arrow)]
    assert facts[0] == facts[1]


def test_pack_spread_reads_like_any_other(corpus, tmp_path):
    assert main([*words(corpus, tmp_path / "out", "tar"), "--spread", "--workers", "1"]) == 0

    storage = open_storage(tmp_path / "out")
    manifest = load_manifest(storage)
    assert len({name.partition("/")[0] for name in manifest.shards.names}) > 5
    assert len(load_index(storage, manifest, 0)) == manifest.shards.num_samples[0]
    assert len(list(open_dataset(tmp_path / "out"))) == 260
