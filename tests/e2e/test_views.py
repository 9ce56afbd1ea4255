"""A run on a part of a dataset: audited, evaluated, and never gone on with another part."""

import re
import shutil
from pathlib import Path

import pytest

from tests.helpers.runs import CHECKOUT, Commands
from vitscale.data import open_dataset
from vitscale.data.exclusion import exclusions_bytes

pytestmark = [pytest.mark.dist, pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def parts(commands: Commands, digits: Path) -> Path:
    """Both sets with the added column `odd`, and lists `x` and `y` of 38 and 37 samples."""
    root = commands.folder
    for name in ("train", "test"):
        shutil.copytree(digits / name, root / name)
        rows = [f"{s.key},{s.label % 2}\n" for s in open_dataset(root / name) if s.label < 9]
        (root / f"{name}.csv").write_text("key,label\n" + "".join(rows))
        commands.vitscale("labels", name, "--add", "odd", "--from", f"{name}.csv")
    data = open_dataset(root / "train")
    rows = [
        {"shard": s.shard, "key": s.key, "xxh3_64": 0, "reason": "near", "distance": 1.0,
         "against": "", "against_key": ""}
        for s in list(data)[::38]
    ]  # fmt: skip
    for name, count in (("x", 38), ("y", 37)):
        (root / name).write_bytes(exclusions_bytes(rows[:count], data.manifest.digest, {}))
    return root


def test_a_run_takes_the_part_that_the_recipe_names(
    commands: Commands, tiny_recipe: str, parts: Path
):
    view = open_dataset(parts / "train", "odd", str(parts / "x"))
    assert 1200 < len(view) < 1300
    sets = ["data.train=train", "data.val=test", "data.label_column=odd", "run.duration=2epochs"]
    words = ["--recipe", tiny_recipe, "--run-dir", "run"]
    words += ["--ds-config", str(CHECKOUT / "configs" / "zero1.json")]
    words += [word for text in sets for word in ("--set", text)]

    first = commands.run(
        "pretrain",
        *words,
        "--set",
        "data.exclude=x",
        "--set",
        "run.stop_at=70steps",
        ranks=2,
        code=75,
    )
    other = commands.run("pretrain", *words, "--set", "data.exclude=y", ranks=2, code=2)
    second = commands.run("pretrain", *words, "--set", "data.exclude=x", ranks=2)
    again = commands.run("pretrain", *words, "--set", f"data.exclude={parts}/x", ranks=2)

    assert "dataset_digest: the checkpoint has" in other
    audits = re.findall(
        r"audit epoch=(\d) samples=(\d+) due=(\d+) digest=\w+ verdict=(.*)", first + second
    )
    size = str(len(view))
    assert audits == [(str(epoch), size, size, "each exactly once") for epoch in range(2)]
    assert f"val/num_samples={len(open_dataset(parts / 'test', 'odd'))}" in again
    assert "already complete" in again
    result = commands.vitscale(
        "evaluate", "--checkpoint", "run", "--data", "test", "--label-column", "odd"
    )
    assert f'"num_samples": {len(open_dataset(parts / "test", "odd"))}' in result
