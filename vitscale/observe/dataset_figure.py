"""A dataset at a glance, drawn from what `vitscale stats` counted."""

from pathlib import Path
from typing import Any

SHOWN_FORMATS = 8
TITLES = {"width": "width, px", "height": "height, px", "aspect": "width / height",
          "num_bytes": "image size, bytes"}  # fmt: skip
ENTROPIES = {
    "shard": "shard",
    "shard_at_random": "shard,\nrandom",
    "batch_as_stored": "batch,\nstored",
    "batch_in_training": "batch,\ntraining",
    "batch_at_random": "batch,\nrandom",
}


def draw_dataset(stats: dict[str, Any], path: Path) -> None:
    """Draw classes, mixing, formats and sizes.

    Args:
        stats: The content of stats.json.
        path: The picture, PNG.
    """
    # The object interface needs no display and leaves no global state behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = len(stats["labels"])
    figure = Figure(figsize=(16, 4 * (1 + columns)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(1 + columns, 4, squeeze=False)
    for axes, (name, labels) in zip(rows, stats["labels"].items(), strict=False):
        _draw_labels(axes, name, labels)
    formats = dict(list(stats["formats"].items())[:SHOWN_FORMATS])
    _bars(rows[0][2], formats, "formats", "samples")
    failed = stats["ledger"].get("failed", {})
    _bars(rows[0][3], failed or {"none": 0}, "failed inputs by reason", "inputs")
    for row in rows[1:columns]:
        for axes in row[2:]:
            axes.set_axis_off()
    for axes, (name, title) in zip(rows[-1], TITLES.items(), strict=True):
        _draw_spread(axes, stats["images"][name], title)
    figure.suptitle(f"{stats['num_samples']:,} samples in {stats['num_shards']:,} shards")
    figure.savefig(path, dpi=100)


def _draw_labels(axes: Any, name: str, labels: dict[str, Any]) -> None:
    """Draw the counts of classes by rank, and how well classes are mixed."""
    counts = sorted(labels["counts"], reverse=True)
    if len(counts) > 30:
        axes[0].plot(range(1, len(counts) + 1), counts, drawstyle="steps-mid")
    else:
        axes[0].bar(range(1, len(counts) + 1), counts)
    title = f"{name}: {len(counts):,} classes, {labels['empty']:,} empty"
    axes[0].set(title=title, xlabel="class by rank", ylabel="samples", ylim=(0, None))
    bits = labels["entropy"]
    if bits:
        values = {word: bits[key] for key, word in ENTROPIES.items()}
        _bars(axes[1], values, f"{name}: label entropy, batch {bits['batch']}", "bits")


def _draw_spread(axes: Any, spread: dict[str, Any], title: str) -> None:
    """Draw a distribution over a logarithmic axis, with its median."""
    edges = [edge for edge, _ in spread["histogram"]]
    counts = [count for _, count in spread["histogram"]]
    # Steps are a sixteenth of a factor of 2 wide.
    axes.bar(edges, counts, width=[edge * (2 ** (1 / 16) - 1) for edge in edges], align="edge")
    axes.axvline(spread["median"], color="black", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    if len(edges) == 1:
        axes.set_xlim(edges[0] / 2, edges[0] * 2)
    about = f"{spread['min']:g} / {spread['median']:g} / {spread['max']:g}"
    axes.set(title=f"{title}\nmin / median / max {about}", ylabel="samples")


def _bars(axes: Any, values: dict[str, float], title: str, unit: str) -> None:
    bars = axes.bar(list(values), list(values.values()))
    axes.bar_label(bars, fmt="{:.4g}", fontsize=8)
    axes.set(title=title, ylabel=unit)
    if len(values) > 5:
        axes.tick_params(axis="x", rotation=45)
