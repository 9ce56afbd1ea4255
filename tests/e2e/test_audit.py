"""P4: every epoch feeds every sample exactly once, also across restarts, and the log says so."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.runs import CHECKOUT, Commands, step_rows
from vitscale.data import open_dataset
from vitscale.data.audit import batch_digest, hash_key
from vitscale.data.manifest import load_index, load_manifest
from vitscale.data.order import Order
from vitscale.data.storage import open_storage

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

    audits = re.findall(r"audit epoch=(\d) samples=(\d+) due=(\d+) verdict=(.*)", first + second)
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
