import numpy as np
from PIL import Image

from vitscale.observe.metrics import MetricsFile
from vitscale.observe.report import write_curves
from vitscale.observe.writers import image_grid


def test_write_curves_draws_what_has_values(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    file.write({"step": s, "train/loss": 1 / s, "train/grad_norm": None} for s in range(1, 9))
    file.close()

    written = write_curves(tmp_path / "metrics.jsonl", tmp_path / "curves")

    assert [path.name for path in written] == ["loss.png"]
    picture = np.asarray(Image.open(written[0]).convert("RGB"))
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 10  # axes, text and a coloured line


def test_image_grid_places_pictures_row_by_row():
    images = np.stack([np.full((1, 2, 3), k, dtype=np.uint8) for k in range(5)])

    grid = image_grid(images, columns=2)

    assert grid.shape == (3 * 3 + 1, 2 * 4 + 1, 3)
    assert grid[1, 1, 0] == 0
    assert grid[1, 5, 0] == 1
    assert grid[4, 1, 0] == 2
    assert grid[7, 5, 0] == 255  # an empty place
