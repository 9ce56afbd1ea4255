"""The part of a dataset that a recipe or a flag names is what is trained and measured."""

import pytest
import torch

from data_prep.labels import main as labels
from data_prep.pack import main as pack
from launchers.evaluate import main as evaluate
from launchers.pretrain import main as pretrain
from launchers.training_data import ensure_data, train_manifests
from tests.helpers.corpus import make_folder
from vitscale.config.errors import UserError
from vitscale.config.recipe import (
    AugmentConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    RunSection,
)
from vitscale.data import open_dataset
from vitscale.data.exclusion import exclusions_bytes
from vitscale.distributed import World
from vitscale.models.build import create_model
from vitscale.models.weights import write_safetensors
from vitscale.training.guard import StopFlag


@pytest.fixture
def sets(tmp_path):
    """A training and a validation set; both have the added column `fine`, for most samples."""
    for name, counts in (("train", {"a": 8, "b": 6}), ("val", {"a": 4, "b": 4})):
        source = make_folder(tmp_path / f"in-{name}", counts, seed=len(name))
        out = str(tmp_path / name)
        assert pack(["--source", f"imagefolder:{source}", "--out", out, "--workers", "1"]) == 0
        place = tmp_path / f"{name}.csv"
        rows = (f"{n:09d},f{n % 3}\n" for n in range(sum(counts.values()) - 1))
        place.write_text("key,label\n" + "".join(rows))
        assert labels([out, "--add", "fine", "--from", str(place)]) == 0
    data = open_dataset(tmp_path / "train")
    rows = [
        {"shard": sample.shard, "key": sample.key, "xxh3_64": 0, "reason": "near", "distance": 1.0,
         "against": "", "against_key": ""}
        for sample in (data[2], data[5])
    ]  # fmt: skip
    (tmp_path / "x").write_bytes(exclusions_bytes(rows, data.manifest.digest, {}))
    return tmp_path


def config(root, **data) -> RunConfig:
    return RunConfig(
        data=DataConfig(train=str(root / "train"), val=str(root / "val"), **data),
        optim=OptimConfig(lr=0.1),
        run=RunSection(duration="1epochs"),
    )


def ensured(root, **data):
    (manifest,) = ensure_data(config(root, **data), World(), StopFlag())
    return manifest


def test_recipe_names_the_part_of_the_training_set(sets):
    manifest = ensured(sets, label_column="fine", exclude=str(sets / "x"))

    assert (manifest.num_samples, manifest.num_classes) == (11, 3)
    again = train_manifests(config(sets, label_column="fine", exclude=str(sets / "x")))
    assert [one.digest for one in again] == [manifest.digest]
    data = open_dataset(sets / "train", label_column="fine", exclude=str(sets / "x"))
    assert data.manifest.digest == manifest.digest


def test_validation_set_must_have_the_column_with_the_same_classes(sets):
    assert labels([str(sets / "val"), "--remove", "fine"]) == 0
    with pytest.raises(UserError, match=f"{sets}/val has no label column 'fine'"):
        ensured(sets, label_column="fine")

    (sets / "other.csv").write_text("key,label\n000000000,f0\n000000001,f9\n")
    words = ["--add", "fine", "--from", str(sets / "other.csv")]
    assert labels([str(sets / "val"), *words]) == 0
    with pytest.raises(UserError, match="label 1 is 'f9' in one and 'f1' in the other"):
        ensured(sets, label_column="fine")


def test_multi_label_column_is_refused_before_anything_starts(sets):
    (sets / "m.csv").write_text("key,label\n000000000,f0\n000000000,f9\n")
    words = ["--add", "many", "--multi", "--from", str(sets / "m.csv")]
    assert labels([str(sets / "train"), *words]) == 0

    with pytest.raises(UserError, match="column 'many' is multi-label; training and evaluation"):
        ensured(sets, label_column="many")


def test_dry_run_counts_what_is_left(sets, capsys, monkeypatch):
    monkeypatch.chdir(sets)
    assigned = [f"data.train={sets}/train", "data.label_column=fine", f"data.exclude={sets}/x"]
    words = [word for text in assigned for word in ("--set", text)]

    assert pretrain([*words, "--dry-run"]) == 0

    said = capsys.readouterr().out
    assert "data: 11 of 14 samples, 3 classes" in said
    assert 'label_column = "fine"' in said


@pytest.fixture
def weights(tmp_path, sets):
    """A small model with random weights for the classes of `fine`."""
    torch.manual_seed(0)
    shape = ModelConfig(variant="Ti/16", img_size=32, num_classes=3)
    metadata = {
        "model": shape.model_dump(mode="json"),
        "input": AugmentConfig().model_dump(mode="json"),
        "labels_sha256": open_dataset(sets / "train", "fine").manifest.labels_sha256,
    }
    write_safetensors(tmp_path / "m.safetensors", create_model(shape).state_dict(), metadata)
    return str(tmp_path / "m.safetensors")


def test_evaluate_takes_column_and_list(sets, weights, capsys):
    words = ["--checkpoint", weights, "--num-workers", "0", "--device", "cpu", "--data"]

    assert evaluate([*words, str(sets / "val"), "--label-column", "fine"]) == 0
    assert '"num_samples": 7' in capsys.readouterr().out
    flags = ["--label-column", "fine", "--exclude", str(sets / "x")]
    assert evaluate([*words, str(sets / "train"), *flags]) == 0
    assert '"num_samples": 11' in capsys.readouterr().out
    assert evaluate([*words, str(sets / "val"), *flags]) == 2
    assert "was made for another dataset" in capsys.readouterr().err
    assert evaluate([*words, str(sets / "val")]) == 2
    assert "does not have the classes" in capsys.readouterr().err
