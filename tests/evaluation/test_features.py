import pytest
import torch

from data_prep.dedup import main as dedup
from tests.helpers.small_dataset import encoded, local_dataset, picture
from vitscale.config.errors import UserError
from vitscale.config.recipe import AugmentConfig, ModelConfig
from vitscale.data import open_dataset
from vitscale.data.exclusion import load_exclusions
from vitscale.evaluation.features import FeatureTable, load_embedder
from vitscale.models.build import create_model
from vitscale.models.weights import write_safetensors


@pytest.fixture
def weights(tmp_path):
    """A small model with random weights, as a checkpoint describes it."""
    torch.manual_seed(0)
    config = ModelConfig(variant="Ti/16", img_size=32, num_classes=5)
    metadata = {
        "model": config.model_dump(mode="json"),
        "input": AugmentConfig().model_dump(mode="json"),
        "labels_sha256": "",
    }
    write_safetensors(tmp_path / "m.safetensors", create_model(config).state_dict(), metadata)
    return str(tmp_path / "m.safetensors")


@pytest.fixture
def sets(tmp_path):
    """Ten samples, and a set that holds the fourth and seventh of them, re-encoded."""
    local_dataset(tmp_path / "train", [6, 4])
    shapes = {n: (30 + n % 23, 34 + n % 11) for n in (3, 6)}
    images = {at: encoded(picture(n, *shapes[n]), quality=60) for at, n in enumerate(shapes)}
    local_dataset(tmp_path / "test", [2], images=images)
    return str(tmp_path / "train"), str(tmp_path / "test")


def test_feature_table_finds_the_same_picture(weights, sets):
    embedder = load_embedder(weights, "cpu")
    (test,) = embedder.embed(open_dataset(sets[1]))
    table = FeatureTable(embedder, 2)
    table.put(*test)

    found = {}
    for samples, features in embedder.embed(open_dataset(sets[0]), batch_size=4):
        assert torch.allclose(features.norm(dim=1), torch.ones(len(samples)))
        for row, other, cosine in table.closest(features, -1.0):
            found[int(samples[row])] = other, cosine

    assert sorted(found) == list(range(10))
    assert sorted(sorted(found, key=lambda n: found[n][1])[-2:]) == [3, 6]
    assert (found[3][0], found[6][0]) == (0, 1)
    assert min(found[3][1], found[6][1]) > 0.97


def test_feature_table_finds_the_closest_of_many(weights):
    embedder = load_embedder(weights, "cpu")
    torch.manual_seed(1)
    features = torch.nn.functional.normalize(torch.randn(17_000, 192), dim=1)
    table = FeatureTable(embedder, 17_000)
    table.put(torch.arange(17_000), features)

    found = table.closest(features[[5, 16_900]], 0.9)

    assert [(row, other) for row, other, _ in found] == [(0, 5), (1, 16_900)]
    assert table.closest(-features[[5]], 0.9) == []


def test_feature_table_pairs_are_those_of_comparing_all(weights):
    embedder = load_embedder(weights, "cpu")
    torch.manual_seed(1)
    features = torch.nn.functional.normalize(torch.randn(1500, 192) + 2, dim=1)
    table = FeatureTable(embedder, 1500)
    table.put(torch.arange(1500), features)

    found = sorted(table.close_pairs(0.85))

    close = features @ features.T >= 0.85
    wanted = [(row, other) for row, other in close.nonzero().tolist() if other < row]
    assert 100 < len(wanted) < 1500 * 700
    assert found == wanted


def test_dedup_by_features_lists_the_copies(weights, sets, tmp_path):
    words = ["--train", sets[0], "--against", sets[1], "--exact", "--embed", weights]
    words += ["--workers", "1"]

    assert dedup([*words, "--cosine", "0.97", "--out", str(tmp_path / "x")]) == 0

    rows = load_exclusions(str(tmp_path / "x")).rows.to_pylist()
    assert {row["key"] for row in rows} >= {"000000003", "000000006"}
    assert all(row["reason"] == "embedding" and 0 <= row["distance"] <= 0.03 for row in rows)


def test_dedup_by_features_within_a_set_keeps_the_first(weights, sets, tmp_path):
    shape = 30, 34
    images = {n: encoded(picture(0, *shape), quality=90 - 10 * n) for n in (2, 5)}
    local_dataset(tmp_path / "both", [4, 3], images=images)
    words = ["--train", str(tmp_path / "both"), "--self", "--exact", "--embed", weights]
    words += ["--workers", "1"]

    assert dedup([*words, "--cosine", "0.95", "--out", str(tmp_path / "x")]) == 0

    rows = load_exclusions(str(tmp_path / "x")).rows.to_pylist()
    found = {row["key"]: row["against_key"] for row in rows if row["reason"] == "self_embedding"}
    assert found == {"000000002": "000000000", "000000005": "000000000"}


def test_load_embedder_refuses_foreign_weights(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")

    with pytest.raises(UserError, match="does not describe its model"):
        load_embedder(str(tmp_path / "x.safetensors"))
