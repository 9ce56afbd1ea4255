"""P4: every epoch feeds every sample exactly once, also across restarts, and the log says so."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.runs import CHECKOUT, Commands, step_rows
from tests.helpers.small_dataset import flip_byte
from vitscale.data import open_dataset
from vitscale.data.audit import batch_digest, hash_key
from vitscale.data.manifest import load_index, load_manifest
from vitscale.data.order import Order
from vitscale.data.storage import open_storage
from vitscale.observe.metrics import read_metrics

pytestmark = [pytest.mark.dist, pytest.mark.e2e, pytest.mark.slow]
BATCH = 25  # shares no factor with 1,438 samples


def test_three_epochs_feed_every_key_three_times(
    commands: Commands, tiny_recipe: str, digits: Path
):
    run_dir = commands.folder / "run"
    sets = [f"batch.global_batch={BATCH}", "run.duration=3epochs", "data.val=none"]
    words = ["--recipe", tiny_recipe, "--run-dir", str(run_dir)]
    words += ["--ds-config", str(CHECKOUT / "configs" / "zero1.json")]
    words += [word for text in sets for word in ("--set", text)]

    # Stopped inside the second epoch, and gone on with other readers.
    first = commands.run("pretrain", *words, "--set", "run.stop_at=70steps", code=75)
    second = commands.run("pretrain", *words, "--set", "data.num_workers=2")

    said = r"audit epoch=(\d) samples=(\d+) due=(\d+) digest=[0-9a-f]{16} verdict=(.*)"
    audits = re.findall(said, first + second)
    assert audits == [(str(e), "1438", "1438", "each exactly once") for e in range(3)]
    rows = step_rows(run_dir)
    assert len(rows) == -(-3 * 1438 // BATCH)
    # The digests in the metrics tell which keys were fed; the order says which they should be.
    keys = keys_by_position(digits / "train", 3 * 1438)
    fed = [keys[k * BATCH : (k + 1) * BATCH] for k in range(len(rows) - 1)]
    for row, batch in zip(rows, fed, strict=False):
        assert row["data/digest"] == digest(batch), f"step {row['step']}"
    counts = Counter(keys)
    assert set(counts.values()) == {3}
    assert len(counts) == len(open_dataset(str(digits / "train"))) == 1438
    assert [row["audit/exactly_once"] for row in read_metrics(run_dir / "metrics.jsonl")
            if "audit/epoch" in row] == [1, 1, 1]  # fmt: skip
    proof = commands.vitscale("audit", str(run_dir))
    assert re.findall(r"(\d)\s+1,438\s+0\s+0\s+0\n", proof) == ["0", "1", "2"]
    assert f"steps {len(rows)}: {len(rows)} proven by their digests" in proof


def test_audit_verb_finds_a_step_that_was_fed_something_else(commands: Commands, tiny_recipe: str):
    commands.run("pretrain", "--recipe", tiny_recipe, "--run-dir", "run")
    metrics = commands.folder / "run" / "metrics.jsonl"
    rows = read_metrics(metrics)
    rows[6]["data/digest"] = "0" * 16
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] != 9))

    text = commands.vitscale("audit", "run", "--out", "audit.json", code=3)

    assert "another batch than was due: 1 steps: 7" in text
    assert "no row: 1 steps: 9" in text
    result = json.loads((commands.folder / "audit.json").read_text())
    assert (result["exactly_once"], result["wrong_steps"], result["absent_steps"]) == (
        False, [7], [9],
    )  # fmt: skip


def test_damaged_samples_are_replaced_remembered_and_audited(
    commands: Commands, tiny_recipe: str, digits: Path
):
    train = commands.folder / "train"
    shutil.copytree(digits / "train", train)
    samples = open_dataset(str(train))
    for number in (3, 77, 1200):
        flip_byte(train / samples[number].shard, samples[number].offset + 30)
    sets = [f"data.train={train}", "data.on_bad_sample=substitute", "run.duration=3epochs",
            "run.save_every=25steps", "batch.global_batch=48", "data.val=none"]  # fmt: skip
    words = ["--recipe", tiny_recipe, *(word for text in sets for word in ("--set", text))]

    straight = commands.run("pretrain", *words, "--run-dir", "straight", ranks=2)
    commands.run("pretrain", *words, "--run-dir", "split", "--set", "run.stop_at=40steps", code=75)
    rest = commands.run("pretrain", *words, "--run-dir", "split", "--set", "data.num_workers=1")

    one, other = (step_rows(commands.folder / name) for name in ("straight", "split"))
    assert [row["data/digest"] for row in one] == [row["data/digest"] for row in other]
    assert len(re.findall(r"quarantined=3 .*each exactly once", straight)) == 3
    assert len(re.findall(r"quarantined=3 .*each exactly once", rest)) == 2
    for name in ("straight", "split"):
        lines = (commands.folder / name / "quarantine.jsonl").read_text().splitlines()
        found = {row["sample_index"]: row["message"] for row in map(json.loads, lines)}
        assert set(found) == {3, 77, 1200}
        assert all("xxh3_64 of the image is" in message for message in found.values())
        proof = commands.vitscale("audit", name)
        assert re.findall(r"(\d)\s+1,435\s+0\s+0\s+3\n", proof) == ["0", "1", "2"]
    found = commands.vitscale("verify", str(train), "--quarantine", "split", code=3)
    assert "3 of 3 samples in quarantine are damaged" in found
    listing = ["--quarantine", "split", "--merge-into", str(commands.folder / "exclude.parquet")]
    assert "excluded 3 more, 3 in all" in commands.vitscale("verify", str(train), *listing)
    assert "excluded 0 more, 3 in all" in commands.vitscale("verify", str(train), *listing)
    left = open_dataset(str(train), exclude=str(commands.folder / "exclude.parquet"))
    assert len(left) == 1435
    limits = ["--set", "data.max_bad_samples=2"]
    text = commands.run("pretrain", *words, *limits, "--run-dir", "limited", code=3)
    assert "too many samples are damaged: 3 (data.max_bad_samples = 2)" in text
    stop = ["--set", "data.on_bad_sample=stop"]
    assert "--set data.on_bad_sample=substitute" in commands.run(
        "pretrain", *words, *stop, "--run-dir", "stopped", code=3
    )


def test_mixture_is_exact_over_restart_and_changed_weights(
    commands: Commands, tiny_recipe: str, digits: Path
):
    recipe = Path(tiny_recipe)
    single = f'train = "{digits}/train"'
    both = "\n".join(
        f'[[data.train]]\nuri = "{digits}/{split}"\nname = "{split}"\nweight = {weight}'
        for split, weight in (("train", 3), ("test", 1))
    )
    text = recipe.read_text().replace(single, "")
    recipe.write_text(text.replace("[augment]", f"{both}\n[augment]"))
    words = ["--recipe", tiny_recipe, "--run-dir", "run", "--set", "run.duration=90steps"]

    first = commands.run("pretrain", *words, "--set", "run.stop_at=60steps", code=75)
    recipe.write_text(recipe.read_text().replace("weight = 3", "weight = 1"))
    refused = commands.run("pretrain", *words, code=2)
    allow = ["--set", 'run.allow_change=["data.train.weight"]']
    second = commands.run("pretrain", *words, *allow, "--set", "data.num_workers=2")

    assert 'run.allow_change=["data.train.weight"]' in refused
    assert re.search(r"audit dataset=test epoch=0 samples=\d+ .*each exactly once", first)
    assert re.search(r"audit dataset=test epoch=1 samples=\d+ .*each exactly once", second)
    proof = commands.vitscale("audit", "run")
    assert "steps 90: 90 proven by their digests" in proof


def keys_by_position(uri: Path, count: int) -> list[str]:
    """Keys of the first positions, looked up in the indexes one by one."""
    storage = open_storage(str(uri))
    manifest = load_manifest(storage)
    order = Order(manifest.shards.num_samples, seed=0, global_batch=BATCH)  # the recipe's defaults
    found = order.samples(np.arange(count))
    indexes = {s: load_index(storage, manifest, s).keys for s in set(found.shard_id.tolist())}
    pairs = zip(found.shard_id.tolist(), found.index.tolist(), strict=True)
    return [indexes[shard][index] for shard, index in pairs]


def digest(keys: list[str]) -> str:
    return batch_digest(np.array([hash_key(key) for key in keys], dtype=np.uint64))
