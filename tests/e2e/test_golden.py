from pathlib import Path

import pytest

from tests.golden.make_tiny_loss import GOLDEN, losses
from tests.helpers.runs import Commands

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_losses_of_twenty_steps_are_the_recorded_ones(commands: Commands, digits: Path):
    wanted = [float(line) for line in GOLDEN.read_text().split()]

    found = losses(commands, digits)

    assert len(wanted) == 20
    # Kernels differ between processors; their rounding has grown to 1e-4 after twenty steps.
    assert found == pytest.approx(wanted, rel=1e-4)
