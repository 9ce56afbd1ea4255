"""Lengths of time in a run: "60steps", "3epochs", "1.2e9examples", "5%"; turned into steps once."""

import math
import re
from dataclasses import dataclass

UNITS = ("steps", "epochs", "examples", "%")
_PATTERN = re.compile(r"^\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([a-z%]+)\s*$")


@dataclass(frozen=True)
class Duration:
    """A length of time in one unit.

    Args:
        value: Not negative.
        unit: One of UNITS; percent is of the whole run.
    """

    value: float
    unit: str

    @classmethod
    def parse(cls, text: str) -> "Duration":
        """Read "60steps" and the like.

        Raises:
            ValueError: No number, no unit, an unknown unit, or a fraction of a step.
        """
        match = _PATTERN.match(text)
        unit = match[2] if match else ""
        if unit in {"step", "epoch", "example"}:
            unit += "s"
        if match is None or unit not in UNITS:
            raise ValueError(
                f"{text!r} is not a duration; write a number and a unit, "
                'such as "60steps", "3epochs", "1.2e9examples" or "5%"'
            )
        value = float(match[1].replace("_", ""))
        if not math.isfinite(value):
            raise ValueError(f"{text!r} is too long a duration")
        if unit in {"steps", "examples"} and value != int(value):
            raise ValueError(f"{text!r}: {unit} must be a whole number")
        return cls(value, unit)

    def steps(self, *, num_samples: int, global_batch: int, total_steps: int | None = None) -> int:
        """Return the number of steps, rounded up to whole ones.

        Args:
            num_samples: Samples of one epoch.
            global_batch: Examples of one step.
            total_steps: Steps of the whole run; only percentages need it.
        """
        if self.unit == "steps":
            return int(self.value)
        if self.unit == "%":
            if total_steps is None:
                raise ValueError(f"{self}: a percentage of what? the run's own length is needed")
            return math.ceil(total_steps * self.value / 100)
        examples = self.value * (num_samples if self.unit == "epochs" else 1)
        # The small term keeps a product such as 0.1 * 30 from rounding up over its whole value.
        return math.ceil(examples / global_batch - 1e-9)

    def __str__(self) -> str:
        number = int(self.value) if self.value == int(self.value) else self.value
        return f"{number}{self.unit}"
