"""TensorBoard: the scalars of metrics.jsonl and a picture of the first batch."""

from pathlib import Path
from typing import Any

import numpy as np


class TensorBoardWriter:
    """Writes event files.

    Args:
        folder: Where they go.
        resume_step: Steps after it, left by an earlier start, are hidden.
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1)

    def scalars(self, row: dict[str, Any]) -> None:
        """Write every number of a metrics row under its own name."""
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, row["step"])

    def image(self, name: str, picture: np.ndarray, step: int) -> None:
        """Write a picture, uint8 [h, w, 3]."""
        self._writer.add_image(name, picture, step, dataformats="HWC")

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def image_grid(images: np.ndarray, columns: int = 8, most: int = 32) -> np.ndarray:
    """Lay pictures out in a grid with a thin border.

    Args:
        images: uint8 [b, c, h, w] with one or three channels.
        columns: Pictures a row.
        most: Pictures at the most.

    Returns:
        uint8 [H, W, 3].
    """
    images = images[:most]
    if images.shape[1] == 1:
        images = np.repeat(images, 3, axis=1)
    count, _, height, width = images.shape
    columns = min(columns, count)
    rows = -(-count // columns)
    grid = np.full((rows * (height + 1) + 1, columns * (width + 1) + 1, 3), 255, dtype=np.uint8)
    for k in range(count):
        top, left = (k // columns) * (height + 1) + 1, (k % columns) * (width + 1) + 1
        grid[top : top + height, left : left + width] = images[k, :3].transpose(1, 2, 0)
    return grid
