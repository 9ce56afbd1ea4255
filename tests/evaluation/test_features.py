import pytest
import torch

from data_prep.dedup import main as dedup
from tests.helpers.small_dataset import encoded, local_dataset, picture
from vitscale.config.errors import UserError
from vitscale.config.recipe import AugmentConfig, ModelConfig
from vitscale.data.exclusion import load_exclusions
from vitscale.evaluation.features import closest, load_embedder
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


def test_closest_finds_the_same_picture(weights, sets):
    found = list(closest(load_embedder(weights, "cpu"), sets[0], [sets[1]], num_workers=0))

    assert [sample for sample, *_ in found] == list(range(10))
    assert all(number == 0 for _, number, _, _ in found)
    cosines = {sample: cosine for sample, _, _, cosine in found}
    assert sorted(sorted(cosines, key=cosines.get)[-2:]) == [3, 6]
    assert {sample: other for sample, _, other, _ in found if sample in (3, 6)} == {3: 0, 6: 1}
    assert min(cosines[3], cosines[6]) > 0.97


def test_dedup_by_features_lists_the_copies(weights, sets, tmp_path):
    words = ["--train", sets[0], "--against", sets[1], "--exact", "--embed", weights]

    assert dedup([*words, "--cosine", "0.97", "--out", str(tmp_path / "x")]) == 0

    rows = load_exclusions(str(tmp_path / "x")).rows.to_pylist()
    assert {row["key"] for row in rows} >= {"000000003", "000000006"}
    assert all(row["reason"] == "embedding" for row in rows)


def test_load_embedder_refuses_foreign_weights(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")

    with pytest.raises(UserError, match="does not describe its model"):
        load_embedder(str(tmp_path / "x.safetensors"))
