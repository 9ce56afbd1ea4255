"""Mixed batches through the real command: the same on one rank and on two."""

from pathlib import Path

import pytest

from tests.helpers.runs import CHECKOUT, Commands, step_rows

MIXED = ("augment.mixup=0.8", "augment.cutmix=1.0", "data.lanes=8", "run.duration=10steps")


def words(recipe: str, run_dir: Path, *assignments: str) -> list[str]:
    sets = [word for text in (*MIXED, *assignments) for word in ("--set", text)]
    json = str(CHECKOUT / "configs" / "zero1.json")
    return ["--recipe", recipe, "--ds-config", json, "--run-dir", str(run_dir), *sets]


@pytest.mark.e2e
@pytest.mark.dist
@pytest.mark.slow
def test_mixed_batches_are_the_same_on_two_ranks(
    commands: Commands, tiny_recipe: str, tmp_path: Path
):
    commands.run("pretrain", *words(tiny_recipe, tmp_path / "one"))
    halves = words(tiny_recipe, tmp_path / "two", "batch.micro_batch=6")
    commands.run("pretrain", *halves, ranks=2)
    commands.run(
        "pretrain", *words(tiny_recipe, tmp_path / "plain", "augment.mixup=0", "augment.cutmix=0")
    )

    losses = {
        name: [row["train/loss"] for row in step_rows(tmp_path / name)]
        for name in ("one", "two", "plain")
    }
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-5)
    assert losses["plain"][1:] != pytest.approx(losses["one"][1:], rel=1e-5)


@pytest.mark.e2e
def test_micro_batches_that_part_pairs_are_refused(
    commands: Commands, tiny_recipe: str, tmp_path: Path
):
    odd = words(tiny_recipe, tmp_path / "odd", "batch.micro_batch=3")

    assert "micro_batch = 3 must be even" in commands.run("pretrain", *odd, code=2)
