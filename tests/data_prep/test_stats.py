import json

import numpy as np
import pytest

from data_prep.pack import main as pack
from data_prep.stats import entropy, main
from tests.helpers.corpus import crop, encoded, make_folder


@pytest.fixture
def packed(tmp_path):
    source = make_folder(tmp_path / "in", {"ant": 60, "bee": 30, "cow": 10})
    (source / "dog").mkdir()
    for number in range(3):
        (source / "cow" / f"same{number}.jpg").write_bytes(encoded(crop(1, 50)))
    (source / "cow" / "bad.jpg").write_bytes(b"")
    out = tmp_path / "out"
    words = ["--source", f"imagefolder:{source}", "--out", str(out), "--shard-bytes", "40KB"]
    assert pack([*words, "--workers", "1"]) == 0
    return out


def test_stats_counts_what_is_there(packed, tmp_path, capsys):
    assert main([str(packed), "--out", str(tmp_path / "stats"), "--batch", "16"]) == 0

    stats = json.loads((tmp_path / "stats" / "stats.json").read_text())
    assert stats["num_samples"] == 103
    assert stats["classes"]["counts"] == [60, 30, 13, 0]
    assert (stats["classes"]["empty"], stats["classes"]["largest"]["ant"]) == (1, 60)
    assert stats["formats"] == {"jpg": 70, "png": 33}
    assert sum(stats["width"].values()) == sum(stats["image_bytes"].values()) == 103
    assert stats["duplicates"]["images_stored_more_than_once"] == 1
    assert stats["duplicates"]["samples_to_spare"] == 2
    assert stats["ledger"] == {"failed": {"empty": 1}, "packed": {"untouched": 103}}
    assert (tmp_path / "stats" / "stats.png").stat().st_size > 20_000
    said = capsys.readouterr().out
    assert "classes of label: 4, of these 1 empty" in said
    assert "failed: empty 1" in said


def test_stats_entropy_of_a_shuffled_dataset_is_near_that_of_random_batches(packed, tmp_path):
    assert main([str(packed), "--out", str(tmp_path / "stats"), "--batch", "32"]) == 0

    bits = json.loads((tmp_path / "stats" / "stats.json").read_text())["label_entropy"]
    assert bits["batch_in_training"] == pytest.approx(bits["batch_at_random"], abs=0.15)
    assert bits["batch_as_stored"] == pytest.approx(bits["batch_at_random"], abs=0.15)


def test_entropy_is_in_bits():
    assert entropy(np.array([3, 3, 3])) == 0
    assert entropy(np.arange(8)) == 3


def test_stats_without_a_dataset_says_so(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2

    assert "no dataset at" in capsys.readouterr().err
