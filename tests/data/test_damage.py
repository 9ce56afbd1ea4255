"""Damage anywhere in a dataset is noticed before it is used: 0 silent losses (P5)."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.small_dataset import RemoteFiles, flip_byte, local_dataset
from vitscale.config.errors import DataError, VitscaleError
from vitscale.data.cache import ShardCache
from vitscale.data.manifest import load_manifest
from vitscale.data.reader import ShardReader
from vitscale.data.storage import open_storage

SIZES = [5, 3]
PLACES = 500


@pytest.fixture(scope="module", params=["tar", "arrow"])
def sound(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "sound"
    local_dataset(folder, SIZES, kind=request.param)
    return folder, read_all(folder, folder.parent / "cache", "local")


def read_all(folder: Path, cache_dir: Path, kind: str) -> list[tuple]:
    """Every sample, or the message of what is wrong with it."""
    storage = open_storage(folder) if kind == "local" else RemoteFiles(folder)
    manifest = load_manifest(storage)
    cache = ShardCache(storage, manifest, cache_dir, 10**9)
    reader = ShardReader(storage, manifest, cache, 4)
    found = []
    for shard_id, size in enumerate(SIZES):
        for index in range(size):
            try:
                record = reader.read(shard_id, index)
                found.append((record.image, record.label, record.key_hash))
            except DataError as error:
                found.append(("damaged", str(error)))
    reader.close()
    return found


def outcome(damaged: Path, tmp_path: Path, kind: str, expected: list[tuple]) -> str:
    """Say what a reader makes of a damaged copy; never other samples than were packed."""
    found, refusal = [], ""
    try:
        found = read_all(damaged, tmp_path / "cache", kind)
    except VitscaleError as error:
        refusal = str(error)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    if refusal:
        assert str(damaged) in refusal
        return "refused"
    bad = [row for row in found if row[0] == "damaged"]
    assert all(row == want for row, want in zip(found, expected, strict=True) if row not in bad)
    assert all("shard-" in message for _, message in bad)
    return "named" if bad else "unread"


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_flipped_byte_anywhere_is_noticed(sound, tmp_path, kind):
    folder, expected = sound
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    files = sorted(path for path in damaged.iterdir() if path.is_file())
    sizes = np.array([path.stat().st_size for path in files])
    rng = np.random.default_rng(0)
    seen = set()

    for place in rng.integers(0, sizes.sum(), PLACES // 2):
        number = int(np.searchsorted(np.cumsum(sizes), place, side="right"))
        offset = int(place - np.cumsum(sizes)[number] + sizes[number])
        flip_byte(files[number], offset)
        result = outcome(damaged, tmp_path, kind, expected)
        flip_byte(files[number], offset)
        seen.add(result)
        name = files[number].name
        if kind == "remote" and name.startswith("shard-"):
            assert result != "unread", f"{name}, byte {offset}"
    assert "named" in seen
    assert outcome(damaged, tmp_path, kind, expected) == "unread"


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_truncation_at_every_block_is_noticed(sound, tmp_path, kind):
    folder, expected = sound
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    (shard,) = [p for p in damaged.iterdir() if p.name.startswith("shard-000001.") and
                "index" not in p.name]  # fmt: skip
    whole = shard.read_bytes()

    results = []
    for length in range(0, len(whole), 512):
        shard.write_bytes(whole[:length])
        results.append(outcome(damaged, tmp_path, kind, expected))

    # What is behind the last image (the end of a tar, the footer of an Arrow file) is not read in
    # place; a copy is compared as a whole.
    in_use = results if kind == "remote" else results[: results.index("unread")]
    assert "unread" not in in_use
    assert len(in_use) > 4


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_missing_and_swapped_shards_are_noticed(sound, tmp_path, kind):
    folder, expected = sound
    names = sorted(p.name for p in folder.iterdir() if p.suffix in (".tar", ".arrow"))
    missing, swapped = tmp_path / "missing", tmp_path / "swapped"
    for copy in (missing, swapped):
        shutil.copytree(folder, copy)
    (missing / names[0]).unlink()
    (swapped / names[0]).rename(swapped / "x")
    (swapped / names[1]).rename(swapped / names[0])
    (swapped / "x").rename(swapped / names[1])

    assert outcome(missing, tmp_path, kind, expected) == "named"
    assert outcome(swapped, tmp_path, kind, expected) == "named"
