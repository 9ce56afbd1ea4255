"""A dataset at a glance, drawn from what `vitscale stats` counted."""

from pathlib import Path
from typing import Any


def draw_dataset(stats: dict[str, Any], path: Path) -> None:
    """Draw classes, sizes, formats and mixing.

    Args:
        stats: The content of stats.json.
        path: The picture, PNG.
    """
    # The object interface needs no display and leaves no global state behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3).ravel()
    counts = sorted(stats["classes"]["counts"], reverse=True)
    axes[0].plot(range(1, len(counts) + 1), counts, drawstyle="steps-mid")
    axes[0].set(title=f"samples of {len(counts)} classes", xlabel="class by rank", ylim=(0, None))
    _bars(axes[1], stats["formats"], "formats")
    _bars(axes[2], stats["width"], "width, px")
    _bars(axes[3], stats["height"], "height, px")
    _bars(axes[4], stats["image_bytes"], "image size, bytes")
    bits = stats["label_entropy"]
    kinds = ("shard", "batch_as_stored", "batch_in_training", "batch_at_random")
    values = {kind.replace("_", "\n", 1).replace("_", " "): bits[kind] for kind in kinds}
    _bars(axes[5], values, f"label entropy, bits (batch {bits['batch']})", upright=True)
    figure.suptitle(f"{stats['num_samples']:,} samples in {stats['num_shards']:,} shards")
    figure.savefig(path, dpi=110)


def _bars(axes: Any, values: dict[str, float], title: str, *, upright: bool = False) -> None:
    axes.bar(list(values), list(values.values()))
    axes.set_title(title)
    if not upright:
        axes.tick_params(axis="x", rotation=45)
