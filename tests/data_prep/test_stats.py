import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data_prep.dataset_stats import Doubles, LabelStats, Spread, entropy
from data_prep.labels import main as labels
from data_prep.pack import main as pack
from data_prep.stats import main
from tests.helpers.corpus import crop, encoded, make_folder
from vitscale.data import open_dataset
from vitscale.data.label_columns import LabelColumn


@pytest.fixture
def packed(tmp_path) -> Path:
    source = make_folder(tmp_path / "in", {"ant": 60, "bee": 30, "cow": 10})
    (source / "dog").mkdir()
    for number in range(3):
        (source / "cow" / f"same{number}.jpg").write_bytes(encoded(crop(1, 50)))
    (source / "cow" / "bad.jpg").write_bytes(b"")
    out = tmp_path / "out"
    words = ["--source", f"imagefolder:{source}", "--out", str(out), "--shard-bytes", "40KB"]
    assert pack([*words, "--workers", "1"]) == 0
    return out


def collected(uri: Path, tmp_path: Path, *more: str) -> dict:
    assert main([str(uri), "--out", str(tmp_path / "stats"), *more]) == 0
    return json.loads((tmp_path / "stats" / "stats.json").read_text())


def test_stats_counts_what_is_there(packed, tmp_path, capsys):
    stats = collected(packed, tmp_path, "--batch", "16")

    assert stats["num_samples"] == 103
    classes = stats["labels"]["label"]
    assert classes["counts"] == [60, 30, 13, 0]
    assert (classes["empty"], classes["largest"]["ant"], classes["smallest"]["dog"]) == (1, 60, 0)
    assert stats["formats"] == {"jpg": 70, "png": 33}
    assert stats["ledger"] == {"failed": {"empty": 1}, "packed": {"untouched": 103}}
    assert (tmp_path / "stats" / "stats.png").stat().st_size > 20_000
    said = capsys.readouterr().out
    assert "classes of label: 4, of these 1 empty; samples a class 0 / 22 / 60" in said
    assert "failed: empty 1" in said


def test_stats_of_images_are_those_of_the_index(packed, tmp_path):
    stats = collected(packed, tmp_path)["images"]

    sizes = [len(sample.image) for sample in open_dataset(packed)]
    about = stats["num_bytes"]
    assert (about["min"], about["max"]) == (min(sizes), max(sizes))
    assert about["mean"] == pytest.approx(np.mean(sizes), rel=1e-3)
    assert about["median"] == pytest.approx(np.median(sizes), rel=0.05)
    for spread in stats.values():
        assert sum(count for _, count in spread["histogram"]) == 103
    assert 16 <= stats["width"]["min"] <= stats["width"]["p10"] <= stats["width"]["median"] <= 64


def test_stats_names_copies(packed, tmp_path, capsys):
    stats = collected(packed, tmp_path)["duplicates"]

    (group,) = stats.pop("largest")
    assert stats == {"images_stored_more_than_once": 1, "samples_to_spare": 2}
    same = [f"{s.shard} {s.key}" for s in open_dataset(packed) if s.image == encoded(crop(1, 50))]
    assert group == {"num_samples": 3, "some": same}
    assert f"3 times: {', '.join(same)}" in capsys.readouterr().out


def test_stats_entropy_of_a_shuffled_dataset_is_near_that_of_random_batches(packed, tmp_path):
    bits = collected(packed, tmp_path, "--batch", "32")["labels"]["label"]["entropy"]

    assert bits["batch_in_training"] == pytest.approx(bits["batch_at_random"], abs=0.15)
    assert bits["batch_as_stored"] == pytest.approx(bits["batch_at_random"], abs=0.15)
    assert bits["shard"] == pytest.approx(bits["shard_at_random"], abs=0.15)


def test_entropy_tells_sorted_samples_from_mixed_ones():
    column = LabelColumn("label", False, tuple("abcd"))
    stats = LabelStats(column, np.arange(0, 4001, 1000), batch=100)
    for shard_id in range(4):
        stats.add(shard_id, pa.chunked_array([np.full(1000, shard_id)]))

    bits = stats.describe()["entropy"]

    assert (bits["shard"], bits["batch_as_stored"]) == (0, 0)
    assert bits["shard_at_random"] == pytest.approx(2, abs=0.01)
    # A window of the training order holds all four shards.
    assert bits["batch_in_training"] == pytest.approx(bits["batch_at_random"], abs=0.03)


def test_label_stats_of_a_multi_label_column():
    column = LabelColumn("tags", True, tuple("abc"))
    stats = LabelStats(column, np.array([0, 3, 5]), batch=2)
    kind = pa.list_(pa.int64())
    stats.add(0, pa.chunked_array([pa.array([[0, 1], [], [1]], kind)]))
    stats.add(1, pa.chunked_array([pa.array([[0], [0, 1]], kind)]))

    about = stats.describe()

    assert about["counts"] == [3, 3, 0]
    assert (about["unlabelled"], about["num_labels"], about["empty"]) == (1, 6, 1)
    # Stored batches: [0 1] [] and [1] [0].
    first, second = entropy(np.array([1, 1])), entropy(np.array([1, 1]))
    assert about["entropy"]["batch_as_stored"] == pytest.approx((first + second) / 2)


def test_stats_counts_several_columns_also_added_ones(packed, tmp_path):
    keys = [sample.key for sample in open_dataset(packed)]
    rows = [f"{key},{'xyz'[n % 3]}" for n, key in enumerate(keys[:90])]
    table = tmp_path / "more.csv"
    table.write_text("key,label\n" + "\n".join(rows) + "\n")
    assert labels([str(packed), "--add", "third", "--from", str(table)]) == 0

    words = ["--label-column", "third", "--label-column", "label"]
    stats = collected(packed, tmp_path, *words)["labels"]

    assert list(stats) == ["third", "label"]
    assert stats["third"]["counts"] == [30, 30, 30]
    assert stats["label"]["counts"] == [60, 30, 13, 0]


def test_spread_gives_quantiles_to_a_few_percent():
    values = np.random.default_rng(0).lognormal(6, 1, 20_000)
    spread = Spread(1, 1 << 20)
    for part in np.array_split(values, 7):
        spread.add(part)

    about = spread.describe()

    for name, share in (("p01", 1), ("p10", 10), ("median", 50), ("p90", 90), ("p99", 99)):
        assert about[name] == pytest.approx(np.percentile(values, share), rel=0.05), name


@pytest.mark.parametrize("held_rows", [7, 1000])
def test_doubles_are_counted_in_files_as_in_memory(held_rows):
    rng = np.random.default_rng(1)
    hashes = rng.integers(0, 2**64, 300, dtype=np.uint64)
    hashes[[10, 90, 250]] = hashes[40]
    hashes[299] = hashes[0]
    doubles = Doubles(held_rows)
    for part in np.array_split(hashes, 11):
        doubles.add(part)

    counts, largest = doubles.describe()

    assert counts == {"images_stored_more_than_once": 2, "samples_to_spare": 4}
    assert largest == [(4, [10, 40, 90, 250]), (2, [0, 299])]


def test_entropy_is_in_bits():
    assert entropy(np.array([5, 0])) == 0
    assert entropy(np.ones(8)) == 3


def test_stats_without_a_dataset_says_so(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2

    assert "no dataset at" in capsys.readouterr().err


def test_stats_of_an_unknown_column_says_which_there_are(packed, capsys):
    assert main([str(packed), "--label-column", "colour"]) == 2

    assert "'colour'; it has label" in capsys.readouterr().err
