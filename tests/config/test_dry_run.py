"""What `--dry-run` says, and that it costs nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launchers.pretrain import main

CHECKOUT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "torchvision", "deepspeed", "webdataset", "mpi4py", "boto3", "tensorboard")


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    """An empty folder, and no launcher's variables."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)


def dry_run(capsys, *words):
    code = main([*words, "--dry-run"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def sets(*assignments):
    return [word for text in assignments for word in ("--set", text)]


def test_dry_run_leaves_nothing_behind(capsys, tmp_path):
    dry_run(capsys)

    assert list(tmp_path.iterdir()) == []


def test_dry_run_prints_the_resolved_tree_as_a_recipe(capsys, tmp_path):
    words = sets("optim.lr=0.002", "run.precision=bf16", "model.num_classes=10")
    text = dry_run(capsys, *words)

    tree = text[text.index("[model]") : text.index("\ndata: ")]
    (tmp_path / "again.toml").write_text(tree)
    again = dry_run(capsys, "--recipe", "again.toml")

    assert "lr = 0.002" in tree
    assert 'precision = "bf16"' in tree
    assert again[again.index("[model]") : again.index("\ndata: ")] == tree


def test_dry_run_says_the_batch_arithmetic(capsys, monkeypatch):
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)

    text = dry_run(capsys, *sets("batch.global_batch=96", "batch.micro_batch=8"))

    assert "batch: global_batch 96 = micro_batch 8 * grad_accum 3 * 4 ranks" in text


def test_dry_run_speaks_on_the_first_rank_only(capsys, monkeypatch):
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)

    assert dry_run(capsys) == ""


def test_dry_run_counts_the_published_base_model(capsys):
    words = sets("model.variant=B/16", "model.img_size=224", "model.num_classes=1000")
    words += sets(*(f"model.{leaf}=none" for leaf in ("embed_dim", "depth", "num_heads")))
    text = dry_run(capsys, *words, *sets("model.mlp_dim=none", "model.in_chans=3"))

    assert "86,567,656 parameters" in text  # timm's vit_base_patch16_224
    assert "196 patches + 1 prefix tokens" in text


@pytest.mark.parametrize("stage", range(4))
def test_dry_run_marks_the_stage_of_this_run(capsys, stage):
    text = dry_run(capsys, "--ds-config", f"configs/zero{stage}.json")

    marked = [line for line in text.splitlines() if "<- this run" in line]
    assert len(marked) == 1
    assert marked[0].split()[0] == str(stage)


def test_dry_run_shows_what_each_stage_saves(capsys, monkeypatch):
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)

    words = sets("model.variant=H/14", "model.img_size=224", "run.precision=bf16")
    text = dry_run(capsys, *words, *sets("model.embed_dim=1280", "model.depth=32"))

    rows = re.findall(r"^  ([0-3]) +(.*?)(?:  <-.*)?$", text, flags=re.MULTILINE)
    totals = [float(row.split()[-1]) for _, row in rows]
    assert len(totals) == 4
    assert totals == sorted(totals, reverse=True)
    assert totals[3] < totals[0]


def test_dry_run_needs_no_dataset(capsys):
    text = dry_run(capsys, *sets("data.train=nowhere"))

    assert "data: nowhere does not exist yet" in text


def loaded_by(script):
    report = f"{script}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", report],
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(done.stderr)) & set(HEAVY)


@pytest.mark.parametrize(
    "script",
    [
        "import vitscale.config.load, vitscale.config.ds_json",
        "import vitscale.models.cost, vitscale.data",
        "import vitscale.cli; vitscale.cli.main(['pretrain', '--dry-run'])",
        "import vitscale.cli; vitscale.cli.main(['--help'])",
        "import data_prep.pack, data_prep.verify, data_prep.show",
    ],
)
def test_configuration_and_packing_load_nothing_heavy(script):
    assert loaded_by(script) == set()


def test_the_check_for_heavy_modules_can_fail():
    assert "torch" in loaded_by("import vitscale.config.load, torch")
