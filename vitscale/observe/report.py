"""Curves of a run as pictures, drawn from metrics.jsonl alone."""

from pathlib import Path

from vitscale.observe.metrics import read_metrics

CURVES = {
    "loss.png": ("loss", ("train/loss", "val/loss")),
    "accuracy.png": ("accuracy", ("val/top1", "val/top5")),
    "lr.png": ("learning rate", ("train/lr",)),
    "grad_norm.png": ("gradient norm", ("train/grad_norm",)),
    "speed.png": ("examples/s", ("perf/examples_per_s",)),
}


def write_curves(metrics: Path, folder: Path) -> list[Path]:
    """Draw the curves of a run.

    Args:
        metrics: metrics.jsonl.
        folder: Where the pictures go; made if absent.

    Returns:
        The pictures written; a curve without values is left out.
    """
    # The object interface needs no display and leaves no global state behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(metrics)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (title, keys) in CURVES.items():
        series = {
            key: [(r["step"], r[key]) for r in rows if r.get(key) is not None] for key in keys
        }
        series = {key: points for key, points in series.items() if points}
        if not series:
            continue
        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for key, points in series.items():
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, label=key, marker="o" if len(points) < 30 else None)
        axes.set(xlabel="step", ylabel=title, title=title)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(folder / name, dpi=120)
        written.append(folder / name)
    return written
