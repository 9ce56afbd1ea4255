import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from data_prep.dedup import first_of_groups, main
from data_prep.fingerprint import Fingerprints, fingerprint
from data_prep.near import Match, find_matches
from data_prep.pack import main as pack
from tests.helpers.collages import collage, copies, saved
from vitscale.config.errors import DataError, UserError
from vitscale.data import open_dataset
from vitscale.data.exclusion import load_exclusions

KINDS = ("exact", "encoded", "resized", "flipped", "cropped")
NUM_TRAIN, NUM_PLANTED = 90, 12


def write(root: Path, images: dict[str, bytes]) -> Path:
    (root / "all").mkdir(parents=True)
    for name, data in images.items():
        (root / "all" / name).write_bytes(data)
    return root


def packed(source: Path, out: Path, *more: str) -> Path:
    words = ["--source", f"imagefolder:{source}", "--out", str(out), "--workers", "1"]
    assert pack([*words, "--shard-bytes", "100KB", *more]) == 0
    return out


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> dict[str, Path]:
    """A training set, and a test set with copies of its first pictures for every kind of copy."""
    root = tmp_path_factory.mktemp("dedup")
    train = {f"{n:03d}": saved(collage(n), quality=92) for n in range(NUM_TRAIN)}
    planted = {name: copies(train[name], int(name)) for name in list(train)[:NUM_PLANTED]}
    found = {"train": packed(write(root / "in", train), root / "train")}
    for kind in KINDS:
        images = {name: copy[kind] for name, copy in planted.items()}
        found[kind] = packed(write(root / f"in-{kind}", images), root / kind)
    return found


def names(out: Path) -> dict[str, str]:
    rows = (row for path in (out / "ledger").iterdir() for row in pq.read_table(path).to_pylist())
    return {row["key"]: row["source"].rpartition("/")[2] for row in rows}


@pytest.mark.parametrize("kind", ["exact", "encoded", "resized", "flipped"])
def test_dedup_finds_planted_copies_and_nothing_else(sets, tmp_path, capsys, kind):
    out = tmp_path / "list.parquet"

    code = main(["--train", str(sets["train"]), "--against", str(sets[kind]), "--out", str(out),
                 "--workers", "1"])  # fmt: skip

    assert code == 0
    train, test = names(sets["train"]), names(sets[kind])
    rows = pq.read_table(out).to_pylist()
    assert {train[row["key"]] for row in rows} == {f"{n:03d}" for n in range(NUM_PLANTED)}
    assert all(train[row["key"]] == test[row["against_key"]] for row in rows)
    assert {row["reason"] for row in rows} == {"exact" if kind == "exact" else "near"}
    assert f"excluded {NUM_PLANTED} of {NUM_TRAIN}" in capsys.readouterr().out


def test_dedup_exact_leaves_near_ones(sets, tmp_path):
    words = ["--train", str(sets["train"]), "--out", str(tmp_path / "x"), "--exact"]

    assert main([*words, "--against", str(sets["encoded"]), "--against", str(sets["exact"])]) == 0

    rows = pq.read_table(tmp_path / "x").to_pylist()
    assert len(rows) == NUM_PLANTED
    assert {row["against"] for row in rows} == {str(sets["exact"])}


def test_dedup_self_keeps_the_first_of_each_group(tmp_path):
    images = {f"{n}": saved(collage(n), quality=92) for n in range(10)}
    for number in range(3):
        for kind, data in copies(images[str(number)], number).items():
            if kind != "cropped":
                images[f"{number}-{kind}"] = data
    train = packed(write(tmp_path / "in", images), tmp_path / "train")

    assert main(["--train", str(train), "--self", "--out", str(tmp_path / "x")]) == 0

    origin = names(train)
    rows = pq.read_table(tmp_path / "x").to_pylist()
    excluded = {row["key"] for row in rows}
    kept = [origin[key].partition("-")[0] for key in origin if key not in excluded]
    assert sorted(kept) == sorted(map(str, range(10)))
    assert all(row["against_key"] < row["key"] for row in rows)
    assert all(row["reason"].startswith("self_") for row in rows)


def test_dedup_list_is_honoured_by_packing(sets, tmp_path):
    out = tmp_path / "x.parquet"
    words = ["--train", str(sets["train"]), "--against", str(sets["exact"]), "--out", str(out)]
    assert main(words) == 0

    clean = packed(sets["train"].parent / "in", tmp_path / "clean", "--exclude", str(out))

    manifest = open_dataset(clean).manifest
    assert (manifest.num_samples, manifest.num_excluded) == (NUM_TRAIN - NUM_PLANTED, NUM_PLANTED)
    rows = [r for path in (clean / "ledger").iterdir() for r in pq.read_table(path).to_pylist()]
    excluded = {row["source"].rpartition("/")[2] for row in rows if row["status"] == "excluded"}
    assert excluded == {f"{n:03d}" for n in range(NUM_PLANTED)}
    record = json.loads((clean / "_commit" / "plan.json").read_text())
    assert record["settings"]["exclude_sha256"] == load_exclusions(str(out)).digest


def test_dedup_writes_sheets_of_pairs(sets, tmp_path):
    words = ["--train", str(sets["train"]), "--against", str(sets["encoded"])]

    assert main([*words, "--out", str(tmp_path / "x"), "--sheet", str(tmp_path / "pairs")]) == 0

    (page,) = (tmp_path / "pairs").iterdir()
    assert page.stat().st_size > 20_000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to compare with"),
        (["--against", "/nonexistent"], "no dataset at /nonexistent"),
        (["--self", "--near", "40"], "0 to 32 bits"),
        (["--self", "--embed", "x"], "--embed compares with --against"),
    ],
)
def test_dedup_wrong_arguments_are_named(sets, tmp_path, capsys, words, said):
    assert main(["--train", str(sets["train"]), "--out", str(tmp_path / "x"), *words]) == 2

    assert said in capsys.readouterr().err


def test_load_exclusions_refuses_other_files(tmp_path, sets):
    with pytest.raises(UserError, match="make one with `vitscale dedup`"):
        load_exclusions(str(tmp_path / "gone"))
    with pytest.raises(DataError, match="is no list of excluded images"):
        load_exclusions(str(sets["train"] / "shards.parquet"))


def test_fingerprint_of_other_shape_is_another():
    pixels = np.zeros((4, 6, 3), np.uint8)

    assert fingerprint(pixels)[0] != fingerprint(pixels.reshape(6, 4, 3))[0]


def test_find_matches_agrees_with_comparing_all_pairs(monkeypatch):
    monkeypatch.setattr("data_prep.near.TILE_ROWS", 7)
    monkeypatch.setattr("data_prep.near.TILE_COLUMNS", 11)
    rng = np.random.default_rng(0)

    def random(count: int) -> Fingerprints:
        # few bits differ, so that there are matches of every distance
        return Fingerprints(
            rng.integers(0, 1 << 62, count).astype(np.uint64),
            rng.integers(0, 1 << 12, (count, 2)).astype(np.uint64),
            rng.integers(0, 1 << 4, (count, 2)).astype(np.uint64),
        )

    own, others = random(40), random(50)
    found = {match.row: match.distance for match in find_matches(own, others, 2)}

    wanted = {}
    for row in range(40):
        distances = [
            (int(own.phash[row, 0]) ^ int(others.phash[other, view])).bit_count()
            for other in range(50)
            for view in range(2)
            if (int(own.dhash[row, 0]) ^ int(others.dhash[other, view])).bit_count() <= 4
        ]
        if min(distances) <= 2:
            wanted[row] = min(distances)
    assert len(wanted) > 5
    assert found == wanted


def test_first_of_groups_joins_chains():
    pairs = [Match(3, 1, "near", 2.0), Match(5, 3, "near", 1.0), Match(8, 7, "near", 1.0)]

    assert [(p.row, p.other) for p in first_of_groups(pairs)] == [(3, 1), (5, 1), (8, 7)]
