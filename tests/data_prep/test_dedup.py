import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash
from PIL import Image

from data_prep.dedup import main
from data_prep.pack import main as pack
from tests.helpers.collages import collage, copies, saved
from tests.helpers.small_dataset import flip_byte, local_dataset, write_dataset
from vitscale.config.errors import DataError, UserError
from vitscale.data import open_dataset
from vitscale.data.decode import decode_rgb
from vitscale.data.exclusion import exclusions_bytes, load_exclusions
from vitscale.data.storage import open_storage

KINDS = ("exact", "encoded", "resized", "flipped", "cropped")
SHARDS, NUM_TRAIN, NUM_PLANTED, NUM_OTHERS = [70, 0, 60, 70], 200, 24, 8
SIDE = 96


def key_of(number: int) -> str:
    return f"{number:09d}"


@pytest.fixture(scope="module")
def pictures() -> dict[int, bytes]:
    return {n: saved(collage(n, SIDE), quality=92) for n in range(NUM_TRAIN)}


@pytest.fixture(scope="module")
def sets(tmp_path_factory, pictures) -> dict[str, str]:
    """A training set, and a set a kind: copies of every fifth training picture, and strangers."""
    root = tmp_path_factory.mktemp("dedup")
    local_dataset(root / "train", SHARDS, images=pictures)
    planted = [copies(pictures[5 * n], n) for n in range(NUM_PLANTED)]
    strangers = [saved(collage(1000 + n, SIDE)) for n in range(NUM_OTHERS)]
    for kind in KINDS:
        images = dict(enumerate([*(copy[kind] for copy in planted), *strangers]))
        local_dataset(root / kind, [NUM_PLANTED, NUM_OTHERS], images=images)
    return {name: str(root / name) for name in ("train", *KINDS)}


def dedup(train: str, out: Path, *words: str) -> list[dict]:
    assert main(["--train", train, "--out", str(out), "--workers", "1", *words]) == 0
    return load_exclusions(str(out)).rows.to_pylist()


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_dedup_finds_planted_copies_and_nothing_else(sets, tmp_path, capsys, kind):
    rows = dedup(sets["train"], tmp_path / "x", "--against", sets[kind])

    found = {(row["key"], row["against_key"]) for row in rows}
    assert found == {(key_of(5 * n), key_of(n)) for n in range(NUM_PLANTED)}
    reason = "exact" if kind == "exact" else "near"
    assert {row["reason"] for row in rows} == {reason}
    assert {row["against"] for row in rows} == {sets[kind]}
    said = capsys.readouterr().out
    assert f"copies of {sets[kind]}: {reason}={NUM_PLANTED}\n" in said
    assert f"excluded {NUM_PLANTED} of {NUM_TRAIN} samples {reason}={NUM_PLANTED} out=" in said


def test_dedup_row_names_the_stored_image(sets, tmp_path):
    rows = dedup(sets["train"], tmp_path / "x", "--against", sets["encoded"])

    train = open_dataset(sets["train"])
    row = rows[20]
    sample = train[100]
    assert (row["shard"], row["key"]) == (sample.shard, sample.key)
    assert row["xxh3_64"] == xxhash.xxh3_64_intdigest(sample.image)
    pixels = decode_rgb(sample.image, 3)
    hashed = xxhash.xxh3_128_digest(f"{pixels.shape}".encode() + pixels.tobytes())
    assert row["pixels"] == hashed
    assert 0 <= row["distance"] <= 8
    exclusions = load_exclusions(str(tmp_path / "x"))
    assert exclusions.keys == {key_of(5 * n) for n in range(NUM_PLANTED)}
    assert exclusions.train_digest == train.manifest.digest
    digest = open_dataset(sets["encoded"]).manifest.digest
    assert exclusions.about["against"] == {sets["encoded"]: digest}
    assert exclusions.about["near_bits"] == 8


def test_dedup_list_is_the_same_with_more_workers(sets, tmp_path):
    words = ["--against", sets["flipped"], "--against", sets["exact"], "--self"]
    dedup(sets["train"], tmp_path / "x", *words)

    dedup(sets["train"], tmp_path / "y", *words, "--workers", "2")

    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_dedup_under_mpi_gives_the_same_list(sets, tmp_path):
    dedup(sets["train"], tmp_path / "x", "--against", sets["flipped"])

    mpiexec = Path(sys.executable).with_name("mpiexec")
    words = ["--train", sets["train"], "--against", sets["flipped"], "--out", str(tmp_path / "y")]
    done = subprocess.run(
        [mpiexec, "-n", "2", sys.executable, "-m", "data_prep.dedup", *words],
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2],
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_dedup_exact_leaves_near_ones(sets, tmp_path):
    words = ["--against", sets["encoded"], "--against", sets["exact"], "--exact", "--self"]

    rows = dedup(sets["train"], tmp_path / "x", *words)

    assert len(rows) == NUM_PLANTED
    assert {row["against"] for row in rows} == {sets["exact"]}


def test_dedup_works_on_s3(pictures, tmp_path, s3_uri):
    images = dict(enumerate([pictures[n] for n in range(8)]))
    write_dataset(open_storage(f"{s3_uri}/train"), [5, 3], images=images)
    local_dataset(tmp_path / "test", [1], images={0: copies(pictures[6], 0)["encoded"]})
    place = f"{s3_uri}/lists/x.parquet"
    words = ["--against", str(tmp_path / "test"), "--sheet", f"{s3_uri}/sheet"]

    assert main(["--train", f"{s3_uri}/train", "--out", place, "--workers", "1", *words]) == 0

    assert load_exclusions(place).keys == {key_of(6)}
    assert open_storage(s3_uri).list("lists/") == ["lists/x.parquet"]
    assert open_storage(s3_uri).list("sheet/") == ["sheet/pairs-00.png"]


def with_copies(root: Path, pictures: dict[int, bytes]) -> str:
    """Ten pictures, then four kinds of copy of the first three."""
    images = [pictures[n] for n in range(10)]
    images += [copies(pictures[n], n)[kind] for n in range(3) for kind in KINDS[:-1]]
    local_dataset(root, [12, 10], images=dict(enumerate(images)))
    return str(root)


def test_dedup_self_keeps_the_first_of_each_group(pictures, tmp_path):
    train = with_copies(tmp_path / "train", pictures)

    rows = dedup(train, tmp_path / "x", "--self")

    assert [row["key"] for row in rows] == [key_of(n) for n in range(10, 22)]
    assert [row["against_key"] for row in rows] == [key_of(n // 4) for n in range(12)]
    reasons = ["self_exact", "self_near", "self_near", "self_near"]
    assert [row["reason"] for row in rows] == reasons * 3
    assert all(row["distance"] == 0 for row in rows if row["reason"] == "self_exact")


def test_dedup_self_keeps_none_of_a_group_with_a_test_picture(pictures, tmp_path):
    train = with_copies(tmp_path / "train", pictures)
    local_dataset(tmp_path / "test", [1], images={0: pictures[1]})

    rows = dedup(train, tmp_path / "x", "--self", "--exact", "--against", str(tmp_path / "test"))

    found = {row["key"]: (row["reason"], row["against_key"]) for row in rows}
    assert found == {
        key_of(1): ("exact", key_of(0)),
        key_of(14): ("exact", key_of(0)),
        key_of(10): ("self_exact", key_of(0)),
        key_of(18): ("self_exact", key_of(2)),
    }


def test_dedup_pictures_of_one_colour_are_copies_only_when_they_are_equal(tmp_path):
    colours = [0, 128, 255, 255]
    images = {
        n: saved(Image.new("RGB", (40, 30), (level,) * 3), "PNG") for n, level in enumerate(colours)
    }
    local_dataset(tmp_path / "train", [4], images=images)

    rows = dedup(str(tmp_path / "train"), tmp_path / "x", "--self")

    assert [(row["key"], row["reason"]) for row in rows] == [(key_of(3), "self_exact")]


def test_dedup_without_copies_writes_an_empty_list(sets, pictures, tmp_path):
    rows = dedup(sets["train"], tmp_path / "x", "--self")

    assert rows == []
    assert open_dataset(sets["train"], exclude=str(tmp_path / "x")).manifest.num_samples == 200


def test_dedup_goes_on_where_it_was_ended(sets, pictures, tmp_path, capsys):
    train = tmp_path / "train"
    local_dataset(train, SHARDS, images=pictures)
    whole = dedup(str(train), tmp_path / "x", "--against", sets["encoded"])
    content = (train / "shard-000003.tar").read_bytes()
    offset = open_dataset(train)[199].offset
    flip_byte(train / "shard-000003.tar", offset + 100)
    words = ["--train", str(train), "--against", sets["encoded"], "--out", str(tmp_path / "y")]
    assert main([*words, "--workers", "1"]) == 3
    assert key_of(199) in capsys.readouterr().err

    # What was looked at is not looked at again: it is not even there.
    (train / "shard-000003.tar").write_bytes(content)
    (train / "shard-000000.tar").unlink()
    rows = dedup(str(train), tmp_path / "y", "--against", sets["encoded"])

    assert rows == whole
    assert not (tmp_path / "y.fingerprints").exists()


def test_dedup_takes_damaged_fingerprints_anew(sets, pictures, tmp_path, capsys):
    train = tmp_path / "train"
    local_dataset(train, SHARDS, images=pictures)
    content = (train / "shard-000003.tar").read_bytes()
    (train / "shard-000003.tar").write_bytes(content[:600])
    assert main(["--train", str(train), "--self", "--out", str(tmp_path / "x")]) == 3
    (train / "shard-000003.tar").write_bytes(content)
    kept = sorted(tmp_path.glob("x.fingerprints/*"))
    assert kept
    for path in kept:
        path.write_bytes(path.read_bytes()[:-9])
    np.save(kept[0], np.zeros((70, 6), np.uint64))

    assert dedup(str(train), tmp_path / "x", "--self") == []


def test_dedup_list_is_honoured_by_packing(pictures, tmp_path):
    source = tmp_path / "in"
    (source / "all").mkdir(parents=True)
    for number in range(20):
        (source / "all" / f"{number:03d}").write_bytes(pictures[number])
    packing = ["--source", f"imagefolder:{source}", "--shard-bytes", "30KB", "--workers", "1"]
    assert pack([*packing, "--out", str(tmp_path / "train")]) == 0
    images = {n: copies(pictures[5 * n], n)["exact"] for n in range(4)}
    local_dataset(tmp_path / "test", [4], images=images)
    out = tmp_path / "x.parquet"
    assert len(dedup(str(tmp_path / "train"), out, "--against", str(tmp_path / "test"))) == 4

    clean = tmp_path / "clean"
    assert pack([*packing, "--out", str(clean), "--exclude", str(out)]) == 0

    manifest = open_dataset(clean).manifest
    assert (manifest.num_samples, manifest.num_excluded) == (16, 4)
    rows = [r for path in (clean / "ledger").iterdir() for r in pq.read_table(path).to_pylist()]
    excluded = {row["source"].rpartition("/")[2] for row in rows if row["status"] == "excluded"}
    assert excluded == {"000", "005", "010", "015"}
    record = json.loads((clean / "_commit" / "plan.json").read_text())
    assert record["settings"]["exclude_sha256"] == load_exclusions(str(out)).digest


@pytest.mark.parametrize(
    ("place", "names"),
    [
        ("pairs", ["pairs/pairs-00.png", "pairs/pairs-01.png"]),
        ("pairs.png", ["pairs.png", "pairs-01.png"]),
    ],
)
def test_dedup_writes_sheets_of_pairs(sets, tmp_path, place, names):
    words = ["--against", sets["exact"], "--sheet", str(tmp_path / place)]

    dedup(sets["train"], tmp_path / "x", *words)

    first, second = (decode_rgb((tmp_path / name).read_bytes(), 3) for name in names)
    # 18 of the 24 pairs in six rows, then 6 in two; equal pictures side by side
    assert first.shape == (3 * second.shape[0], *second.shape[1:])
    pair = first[:SIDE, : 2 * 168].astype(int)
    assert abs(pair[:, :SIDE] - pair[:, 168 : 168 + SIDE]).max() == 0
    assert pair.std() > 20


def test_dedup_shows_the_farthest_pair_first(sets, tmp_path, pictures):
    words = ["--against", sets["flipped"], "--sheet", str(tmp_path / "pairs.png")]

    rows = dedup(sets["train"], tmp_path / "x", *words)

    farthest = max(rows, key=lambda row: row["distance"])
    assert farthest["distance"] > min(row["distance"] for row in rows)
    page = decode_rgb((tmp_path / "pairs.png").read_bytes(), 3)
    shown = decode_rgb(pictures[int(farthest["key"])], 3)
    assert (page[:SIDE, :SIDE] == shown).all()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to compare with"),
        (["--against", "/nonexistent"], "no dataset at /nonexistent"),
        (["--self", "--near", "40"], "0 to 32 bits"),
        (["--self", "--workers", "0"], "--workers must be at least 1"),
        (["--self", "--cosine", "60"], "--cosine 60.0: above 0, 1 at most"),
        (["--self", "--out", "lists/"], "'lists/' names no file"),
        (["--self", "--embed", "/nonexistent"], "no run, checkpoint or file at '/nonexistent'"),
        (["--against", "TRAIN"], "is the training set itself"),
    ],
)
def test_dedup_wrong_arguments_are_named(sets, tmp_path, capsys, words, said):
    words = [sets["train"] if word == "TRAIN" else word for word in words]

    assert main(["--train", sets["train"], "--out", str(tmp_path / "x"), *words]) == 2

    assert said in capsys.readouterr().err


def test_load_exclusions_refuses_other_files(tmp_path, sets):
    with pytest.raises(UserError, match="make one with `vitscale dedup`"):
        load_exclusions(str(tmp_path / "gone"))
    with pytest.raises(DataError, match="is no list of excluded images"):
        load_exclusions(str(Path(sets["train"]) / "shards.parquet"))
    data = exclusions_bytes([], "0" * 64, {})
    (tmp_path / "cut").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match="is no list of excluded images"):
        load_exclusions(str(tmp_path / "cut"))


def test_exclusions_bytes_do_not_depend_on_the_order():
    rows = [{"shard": f"s{n % 2}", "key": key_of(n), "xxh3_64": n} for n in range(4)]

    data = exclusions_bytes(rows, "0" * 64, {"near_bits": 8})

    assert exclusions_bytes(rows[::-1], "0" * 64, {"near_bits": 8}) == data
