"""Write tiny_loss.txt anew: python -m tests.golden.make_tiny_loss

The losses of the first twenty steps of the tests' tiny recipe. A change of that file is a change of
what vitscale trains, and is named in CHANGELOG.md under Numerics.
"""

import tempfile
from pathlib import Path

from tests.helpers.runs import TINY, Commands, pack_digits, step_rows

GOLDEN = Path(__file__).with_name("tiny_loss.txt")


def losses(commands: Commands, digits: Path) -> list[float]:
    """Train the tiny recipe and return its losses."""
    recipe = commands.folder / "tiny.toml"
    recipe.write_text(TINY.format(digits=digits))
    commands.run("pretrain", "--recipe", str(recipe), "--run-dir", "golden")
    return [row["train/loss"] for row in step_rows(commands.folder / "golden")]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        commands = Commands(Path(folder))
        found = losses(commands, pack_digits(Path(folder)))
    GOLDEN.write_text("".join(f"{loss:.6f}\n" for loss in found))
    print(f"wrote {len(found)} losses to {GOLDEN}")
