"""What is foretold of a run, on datasets of known order."""

import json

import numpy as np
import pytest

from tests.helpers.small_dataset import encoded, local_dataset, picture, write_dataset
from tests.helpers.tars import write_tar
from vitscale import cli
from vitscale.data.dataset import Dataset, open_dataset
from vitscale.data.node_share import node_share
from vitscale.data.order import Order
from vitscale.data.shuffle_quality import longest_run, measure_shuffle
from vitscale.data.storage import open_storage

SHARDS, SAMPLES, CLASSES = 128, 20, 32
BATCH = 256


@pytest.fixture(scope="module")
def class_sorted(tmp_path_factory):
    """Tars with one class after the other, indexed as they are."""
    root = tmp_path_factory.mktemp("sorted")
    images = [encoded(picture(seed, 16, 16)) for seed in range(5)]
    for shard in range(SHARDS):
        label = str(shard * CLASSES // SHARDS).encode()
        members = []
        for number in range(shard * SAMPLES, (shard + 1) * SAMPLES):
            members += [(f"{number:06d}.jpg", images[number % 5]), (f"{number:06d}.cls", label)]
        write_tar(root / f"{shard:05d}.tar", members)
    assert cli.main(["index", str(root), "--workers", "1"]) == 0
    return str(root)


def doctor(capsys, *words) -> tuple[int, dict[str, tuple[str, str]], str]:
    """Exit code, subject -> (level, text), and all that was said."""
    code = cli.main(["doctor", *words])
    said = capsys.readouterr()
    found = {}
    for line in said.out.splitlines():
        level, _, rest = line.partition(" ")
        subject, mark, text = rest.strip().partition(": ")
        if level in ("ok", "warning", "failure", "damage") and mark:
            found[subject] = (level, text)
    return code, found, said.out + said.err


def test_class_sorted_shards_in_the_default_window_are_sound(class_sorted, capsys):
    code, found, text = doctor(capsys, class_sorted, "--set", f"batch.global_batch={BATCH}")

    assert code == 0
    assert {level for level, _ in found.values()} == {"ok"}
    assert text.rstrip().endswith("sound")
    quality = measure_shuffle(open_dataset(class_sorted), order_of(class_sorted, lanes=64))
    assert abs(quality.entropy_lost) < 0.02
    assert quality.longest_run <= quality.iid_longest_run
    assert quality.num_classes == CLASSES


@pytest.mark.parametrize(("lanes", "block"), [(64, 1), (4, 1), (2, 8)])
def test_windows_that_are_too_small_are_flagged(class_sorted, capsys, lanes, block):
    words = [f"batch.global_batch={BATCH}", f"data.shuffle_block={block}", f"data.lanes={lanes}"]
    code, found, text = doctor(capsys, class_sorted, *(w for s in words for w in ("--set", s)))

    assert code == 0
    assert found["shuffle"][0] == "warning"
    assert f"raise data.shuffle_block above {block}" in text
    assert "pack again" in text
    assert text.rstrip().endswith("see the warnings")


def test_runs_of_one_class_are_flagged(class_sorted, capsys):
    words = ("--set", f"batch.global_batch={BATCH}", "--set", "data.lanes=1")
    _, found, _ = doctor(capsys, class_sorted, *words, "--set", "data.shuffle_block=1")

    assert found["runs"][0] == "warning"


def order_of(uri: str, **settings) -> Order:
    sizes = open_dataset(uri).manifest.shards.num_samples
    return Order(sizes, 0, BATCH, **settings)


def test_longest_run_counts_neighbours():
    assert longest_run(np.array([1, 2, 2, 2, 1, 1])) == 3
    assert longest_run(np.array([3, 3, 3])) == 3
    assert longest_run(np.array([1, 2, 3])) == 1


def test_independent_draws_are_met_by_a_shuffled_dataset(tmp_path):
    storage, manifest = local_dataset(tmp_path / "data", [40] * 25)
    quality = measure_shuffle(Dataset(storage, manifest), Order([40] * 25, 0, 50))

    # Five classes, equally often: log2(5) less what chance takes from 50 draws.
    assert quality.iid_entropy == pytest.approx(np.log2(5) - 4 / (2 * 50 * np.log(2)), abs=0.01)
    assert abs(quality.entropy_lost) < 0.02


@pytest.mark.parametrize(
    ("words", "text", "advice"),
    [
        (["--ranks", "7"], "256 is not shared evenly by 7 ranks", "divide it: 4, 8, 2"),
        (["--nodes", "3", "--ranks", "8"], "8 ranks on 3 nodes", "change --ranks or --nodes"),
        (
            ["--ranks", "8", "--set", "batch.micro_batch=5"],
            "micro_batch = 5 does not divide the 32 examples",
            "4, 8, 2",
        ),
    ],
)
def test_ranks_that_do_not_divide_fail(class_sorted, capsys, words, text, advice):
    code, found, said = doctor(capsys, class_sorted, "--set", f"batch.global_batch={BATCH}", *words)

    assert code == 2
    assert found["ranks"][0] == "failure"
    assert text in said
    assert set(advice.replace(",", "").split()) <= set(said.replace(",", "").split())
    assert "this run will fail" in said


def test_missing_and_cut_shards_are_told(tmp_path, capsys):
    storage, manifest = local_dataset(tmp_path / "data", [6] * 6)
    (tmp_path / "data" / manifest.shards.names[2]).unlink()
    with open(tmp_path / "data" / manifest.shards.names[4], "r+b") as file:
        file.truncate(700)

    code, found, text = doctor(capsys, storage.uri, "--set", "batch.global_batch=6")

    assert code == 3
    assert "1 objects are missing: shard-000002.tar" in text
    assert "shard-000004.tar has 700 bytes" in text
    assert found["objects"][0] == "damage"


def test_batch_that_is_larger_than_the_dataset_is_told(tmp_path, capsys):
    storage, _ = local_dataset(tmp_path / "data", [6] * 6)

    _, found, text = doctor(capsys, storage.uri)

    assert found["epoch"][0] == "warning"
    assert "lower batch.global_batch" in text


def test_recipe_and_overrides_are_taken(class_sorted, tmp_path, capsys):
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        '[data]\ntrain = "/elsewhere"\nlanes = 2\n[optim]\nlr = 1.0\n'
        '[run]\nduration = "1epochs"\n[batch]\nglobal_batch = 64\n'
    )
    words = ("--recipe", str(recipe), "--nodes", "4", "--set", "data.shuffle_block=2")
    _, found, text = doctor(capsys, class_sorted, *words, "--out", str(tmp_path / "out.json"))

    assert "4 nodes, 4 ranks, global_batch 64, 2 lanes, shuffle_block 2" in text
    assert found["bytes of a node"][0] == "warning"
    assert "set data.lanes to a multiple of 4 that divides 64, such as 4" in text
    rows = json.loads((tmp_path / "out.json").read_text())
    assert {row["subject"] for row in rows} == set(found)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--set", "data.shufle_block=1"], "did you mean 'shuffle_block'"),
        (["--nodes", "0"], "must be at least 1"),
        (["--rate", "0"], "--rate above 0"),
        (["--recipe", "nowhere.toml"], "no file 'nowhere.toml'"),
    ],
)
def test_wrong_arguments_are_refused(class_sorted, capsys, words, text):
    code, _, said = doctor(capsys, class_sorted, *words)

    assert code == 2
    assert text in said


def test_no_dataset_is_an_error_of_the_user(tmp_path, capsys):
    code, _, said = doctor(capsys, str(tmp_path))

    assert code == 2
    assert "no dataset at" in said


@pytest.mark.s3
def test_cache_that_is_too_small_fails_and_requests_are_counted(s3_server, monkeypatch, capsys):
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    uri = f"s3://{s3_server.bucket}/doctor"
    write_dataset(open_storage(uri), [8] * 12)
    words = (uri, "--set", "batch.global_batch=12", "--set", "data.lanes=2", "--nodes", "2")

    code, found, text = doctor(capsys, *words, "--set", "data.cache_limit_bytes=30000")
    assert code == 2
    assert found["cache"][0] == "failure"
    assert "-> raise data.cache_limit_bytes, lower data.shuffle_block" in text

    code, found, text = doctor(capsys, *words, "--rate", "100")
    assert code == 0
    assert found["cache"][0] == "ok"
    assert "fetched ahead" in found["cache"][1]
    assert "GETs a second for 100 images/s, of 5,500" in found["requests"][1]

    code, found, text = doctor(capsys, *words, "--rate", "1e6")
    assert found["requests"][0] == "warning"
    assert "pack larger shards" in text


def test_shares_of_nodes_are_what_they_read():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 30, 60)
    num_bytes = sizes * 100
    order = Order(sizes, 3, 24, 12, 2)

    share = node_share(order, sizes, num_bytes, 1, 3, 2)

    assert share.lanes.tolist() == [4, 4, 4]
    assert share.lane_bytes.sum() == pytest.approx(num_bytes.sum())
    positions = np.arange(order.usable, 2 * order.usable)
    read = order.samples(positions)
    for node in range(3):
        ranks = (2 * node, 2 * node + 1)
        slots = np.concatenate([order.rank_slots(rank, 6) for rank in ranks])
        mine = np.isin(positions % order.usable % order.lanes, np.unique(slots % order.lanes))
        shards = np.unique(read.shard_id[mine])
        assert share.lane_bytes[node] == pytest.approx(100 * mine.sum(), abs=1)
        assert share.shards[node] == len(shards)
        assert share.shard_bytes[node] == num_bytes[shards].sum()


def test_more_nodes_than_lanes_read_the_same_lane():
    share = node_share(Order([50] * 8, 0, 8, 2), np.full(8, 50), np.full(8, 500), 0, 4, 1)

    assert share.lanes.tolist() == [1] * 4
    assert share.lane_bytes.tolist() == [2000.0] * 4
