"""The way of a newcomer, small: pack, pretrain, fine-tune, evaluate, export, with the commands."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.corpus import make_folder
from tests.helpers.runs import CHECKOUT, Commands, environment, free_port, json_of, step_rows
from vitscale.data.storage import open_storage
from vitscale.models.build import create_model
from vitscale.models.weights import read_safetensors
from vitscale.observe.metrics import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SHORT = ["run.duration=1epochs", "data.num_workers=1"]


def sets(*texts: str) -> list[str]:
    return [word for text in texts for word in ("--set", text)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory):
    """The quick start with the deepspeed launcher, in a folder without anything, one epoch each."""
    commands = Commands(tmp_path_factory.mktemp("demo"))
    outputs = {}
    for script in ("pretrain", "finetune"):
        command = [
            "deepspeed", "--master_port", str(free_port()),
            str(CHECKOUT / "launchers" / f"{script}.py"),
            "--ds-config", "configs/zero2.json", *sets(*SHORT),
        ]  # fmt: skip
        done = subprocess.run(
            command, cwd=commands.folder, env=environment(), capture_output=True, text=True,
            timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        outputs[script] = done.stdout
    yield commands, outputs
    commands.close()


def test_quick_start_packs_trains_and_fills_the_run_folder(demo):
    commands, outputs = demo
    run_dir = commands.folder / "runs" / "quickstart-zero2"

    assert "packing data/digits/train from digits:train" in outputs["pretrain"]
    assert "eta=" in outputs["pretrain"]
    names = {path.name for path in run_dir.iterdir()}
    assert names >= {
        "recipe.toml", "run.json", "ds.json", "env.json", "metrics.jsonl", "tensorboard", "curves",
        "log-rank00000.txt", "checkpoints", "done.json",
    }  # fmt: skip
    rows = read_metrics(run_dir / "metrics.jsonl")
    training = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in training] == list(range(1, len(training) + 1))
    wanted = {
        "step", "seen_examples", "train/loss", "train/lr", "train/grad_norm",
        "perf/examples_per_s", "perf/data_wait_s", "data/digest",
    }  # fmt: skip
    assert wanted <= set(training[0])
    assert [row["val/num_samples"] for row in rows if "val/top1" in row] == [359]
    assert training[-1]["train/loss"] < training[0]["train/loss"]
    assert "auto" not in (run_dir / "ds.json").read_text()
    curves = list((run_dir / "curves").glob("*.png"))
    assert len(curves) >= 4
    for path in curves:
        with Image.open(path) as picture:
            assert picture.size[0] > 300


def test_tensorboard_holds_the_same_numbers_and_a_picture(demo):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    commands, _ = demo
    run_dir = commands.folder / "runs" / "quickstart-zero2"

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()

    scalars = events.Scalars("train/loss")
    rows = step_rows(run_dir)
    assert [event.step for event in scalars] == [row["step"] for row in rows]
    assert [event.value for event in scalars] == pytest.approx([row["train/loss"] for row in rows])
    assert events.Images("train/first_batch")[0].width > 100


def test_fine_tuning_resizes_positions_and_starts_with_a_new_head(demo):
    commands, outputs = demo
    run_dir = commands.folder / "runs" / "quickstart_finetune-zero2"

    assert "pos_embed" in outputs["finetune"]
    assert "head" in outputs["finetune"]
    first = step_rows(run_dir)[0]
    # A head of zeros says every class alike.
    assert first["train/loss"] == pytest.approx(np.log(10), rel=1e-6)
    weights, metadata = read_safetensors(
        next(run_dir.glob("checkpoints/step-*/weights.safetensors"))
    )
    assert weights["pos_embed"].shape == (1, 37, 128)
    assert metadata["model"]["img_size"] == 48


def test_evaluate_agrees_with_the_run_and_export_carries_the_model(demo):
    commands, _ = demo
    run = "runs/quickstart-zero2"
    row = read_metrics(commands.folder / run / "metrics.jsonl")[-1]

    result = commands.folder / "r.json"
    commands.vitscale(
        "evaluate", "--checkpoint", run, "--data", "data/digits/test", "--out", str(result)
    )
    found = json_of(result)
    assert found["num_samples"] == 359
    for name in ("top1", "top5", "loss"):
        assert found[name] == pytest.approx(row[f"val/{name}"], rel=1e-4), name

    out = commands.folder / "model.safetensors"
    commands.vitscale("export", "--checkpoint", run, "--out", str(out), "--ema")
    averaged = commands.folder / "ema.json"
    for checkpoint in (["--checkpoint", run, "--ema"], ["--checkpoint", str(out)]):
        words = ["--data", "data/digits/test", "--metrics", "top1,loss", "--out", str(averaged)]
        commands.vitscale("evaluate", *checkpoint, *words)
        assert json_of(averaged).keys() == {"top1", "loss", "num_samples"}
        assert json_of(averaged)["loss"] != found["loss"]
    weights, metadata = read_safetensors(out)
    model = create_model("Ti/8", **{k: v for k, v in metadata["model"].items() if k != "variant"})
    model.load_state_dict(weights, strict=True)
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())


def test_a_finished_run_is_not_repeated(demo):
    commands, _ = demo

    text = commands.vitscale("pretrain", "--ds-config", "configs/zero2.json", *sets(*SHORT))

    assert "already complete: run_dir=runs/quickstart-zero2" in text


def test_the_console_command_trains_without_a_launcher(demo):
    commands, _ = demo

    text = commands.vitscale(
        "pretrain", "--ds-config", "configs/zero0.json", *sets("run.duration=3steps")
    )

    assert "done steps=3 run_dir=runs/quickstart-zero0" in text


def test_pre_training_head_is_replaced_when_fine_tuning(commands: Commands, tiny_recipe: str):
    run_dir = str(commands.folder / "hidden-head")
    words = ["--recipe", tiny_recipe, *sets("run.duration=2steps")]
    commands.run("pretrain", *words, "--run-dir", run_dir, *sets("model.head=mlp"))

    text = commands.run("finetune", *words, "--run-dir", "fine", "--init", run_dir)

    assert "pre_logits.fc.weight" in text
    again = commands.run("pretrain", *words, "--run-dir", "same", "--init", run_dir, code=2)
    assert "pre_logits" in again


def test_numbers_that_break_end_the_run_with_their_own_code(commands: Commands, tiny_recipe: str):
    words = ["--recipe", tiny_recipe, "--run-dir", "broken"]
    broken = sets(
        "optim.name=sgd", "optim.lr=1e30", "optim.grad_clip_norm=0", "optim.warmup=0steps"
    )

    text = commands.run("pretrain", *words, *broken, code=4)

    assert "error: step" in text
    assert re.search(r"train/(loss|grad_norm) = (nan|inf)", text), text
    assert not list(Path(commands.folder / "broken").glob("checkpoints/step-*"))


def test_damaged_data_ends_the_run_with_its_own_code(
    commands: Commands, tiny_recipe: str, digits: Path
):
    broken = commands.folder / "train"
    shutil.copytree(digits / "train", broken)
    shard = sorted(broken.glob("shard-*.tar"))[0]
    data = bytearray(shard.read_bytes())
    data[1600:1700] = bytes(100)
    shard.write_bytes(data)

    words = ["--recipe", tiny_recipe, "--run-dir", "run"]
    words += sets(f"data.train={broken}", "run.duration=1epochs")
    text = commands.run("pretrain", *words, ranks=2, code=3)

    # One rank met it; both end with its code, and the message comes once.
    assert text.count(f"{shard.name}, key ") == 1
    assert "Traceback" not in text


def test_training_from_s3_feeds_the_same_batches(
    commands: Commands, tiny_recipe: str, digits: Path, s3_uri: str
):
    for split in ("train", "test"):
        commands.vitscale(
            "pack", "--source", f"digits:{split}", "--out", f"{s3_uri}/{split}", "--shard-bytes",
            "16KB",
        )  # fmt: skip
    local = {p.name: p.read_bytes() for p in (digits / "train").glob("shard*")}
    assert local
    storage = open_storage(f"{s3_uri}/train")
    assert all(storage.read_bytes(name) == data for name, data in local.items())

    words = ["--recipe", tiny_recipe, *sets("data.num_workers=2")]
    remote = sets(f"data.train={s3_uri}/train", f"data.val={s3_uri}/test", "data.cache_dir=cache")
    commands.run("pretrain", *words, "--run-dir", "files")
    commands.run("pretrain", *words, "--run-dir", "s3", *remote, ranks=2)

    files, s3 = (step_rows(commands.folder / name) for name in ("files", "s3"))
    assert [row["data/digest"] for row in files] == [row["data/digest"] for row in s3]
    values = [
        read_metrics(commands.folder / n / "metrics.jsonl")[-1]["val/loss"] for n in ("files", "s3")
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-3)


def test_a_validation_set_with_other_classes_is_refused(
    commands: Commands, tiny_recipe: str, tmp_path: Path
):
    for split, classes in (("train", ("ant", "bee", "cat")), ("val", ("ant", "cat"))):
        folder = make_folder(tmp_path / "in" / split, dict.fromkeys(classes, 3))
        commands.vitscale("pack", "--source", f"imagefolder:{folder}", "--out", split)

    words = ["--recipe", tiny_recipe, *sets("data.train=train", "data.val=val")]
    text = commands.run("pretrain", *words, "--run-dir", "run", code=2)

    assert "label 1 is 'cat' in one and 'bee' in the other" in text


def test_make_demo_says_both_accuracies(tmp_path: Path):
    makefile = (CHECKOUT / "Makefile").read_text()
    start = makefile.index("\t@python -c 'import json")
    recipe = makefile[start : makefile.index("\n\t@echo", start)]
    for name, top1 in (("a", 0.98), ("b", 0.9875)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test.json").write_text(json.dumps({"top1": top1}))
    (tmp_path / "Makefile").write_text(f"PRETRAINED := a\nFINETUNED := b\nsay:\n{recipe}\n")

    done = subprocess.run(
        ["make", "--no-print-directory", "say"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )

    assert done.stdout.splitlines() == [
        "test top-1 pre-trained  98.00 %",
        "test top-1 fine-tuned   98.75 %",
    ], done.stderr
