"""Two steps of every shipped recipe at a toy size: `make soak`. The suite does five of them."""

import math
from pathlib import Path

import pytest

from tests.helpers.runs import Commands, step_rows
from tests.helpers.shipped import PAPERS, source_of, toy_words, verb_of

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", PAPERS)
def test_a_recipe_trains_two_steps_as_a_toy(
    commands: Commands, digits: Path, tmp_path: Path, name: str
):
    # Those that a fine-tune starts from come first.
    chain = [name]
    while (source := source_of(chain[0])) is not None:
        chain.insert(0, source)

    for one in chain:
        words = toy_words(one, digits, tmp_path / one)
        if source := source_of(one):
            words += ["--init", str(tmp_path / source)]
        commands.run(verb_of(one), *words)

    rows = step_rows(tmp_path / name)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(math.isfinite(row["train/loss"]) for row in rows)
