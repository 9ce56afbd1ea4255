"""Where weights come from: our own runs and checkpoints, and what other programs saved."""

from pathlib import Path

from vitscale.config.errors import UserError
from vitscale.models.weight_files import WeightsFile, is_foreign_folder, read_weights
from vitscale.training.checkpoint_folder import find_weights


def read_source(source: str, *, ema: bool) -> tuple[Path, WeightsFile]:
    """Find and read weights.

    Args:
        source: A run or checkpoint folder of ours, a folder of Hugging Face or DeepSpeed, or a
            file of any kind that read_weights knows.
        ema: The averaged weights; folders of ours only.

    Returns:
        What was read, and its content.

    Raises:
        UserError: Nothing there, no averaged weights, or not readable.
    """
    path = Path(source).expanduser()
    if is_foreign_folder(path):
        if ema:
            raise UserError(f"{path} is not a run of vitscale: it has no averaged weights to take")
    else:
        path = find_weights(source, ema=ema)
    return path, read_weights(path)
