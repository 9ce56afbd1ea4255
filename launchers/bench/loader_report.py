"""What `vitscale bench data` says: rates, ratios, stages, and which targets were reached."""

import statistics
from typing import Any

from launchers.bench import loader_parts as names
from vitscale.observe.bench_text import heading, table, target
from vitscale.observe.rounds import Case, Outcome, machine, ratios, spread

NOTES = """\
All give float32 batches of antialiased random crops, 224 px, area 0.05-1, flipped at random.
vitscale checks every image against its hash (xxh3) and normalises in the process that takes the
batch. torchvision and DALI read files and have their own decoders; webdataset, MosaicML and litdata
read their own shards and decode with Pillow, as their examples do. The limit decodes whole pictures
with libjpeg-turbo and does nothing else."""
# Above the case -> what it is compared with, and the least ratio that is aimed at.
RATIOS: dict[str, tuple[str, str, float | None]] = {
    "exact / limit": (names.EXACT, names.LIMIT, 0.75),
    "exact / DALI": (names.EXACT, names.DALI, 1.4),
    "exact / torchvision": (names.EXACT, names.TORCHVISION, 1.6),
    "exact / webdataset": (names.EXACT, names.WEBDATASET, 2.5),
    "exact / MosaicML": (names.EXACT, names.MOSAIC, 2.5),
    "exact / litdata": (names.EXACT, names.LITDATA, 2.5),
    "fast / limit": (names.FAST, names.LIMIT, 0.75),
    "fast / exact": (names.FAST, names.EXACT, None),
}
RATE_CASES = {name for above, below, _ in RATIOS.values() for name in (above, below)}
MAX_LEVELS = 3.0
MAX_RESUME_RATIO = 1.2
MAX_GROWTH = 0.05


def make_report(
    outcomes: dict[str, Outcome], cases: list[Case], inputs: dict[str, Any]
) -> dict[str, Any]:
    """Sum up what was measured.

    Args:
        outcomes: Name of a case -> what it gave.
        cases: What was run.
        inputs: What the pictures are.

    Returns:
        For JSON, and for text_of.
    """
    versions: dict[str, str] = {}
    for outcome in outcomes.values():
        for run in outcome.runs.values():
            versions |= run.get("versions", {})
    compared = {
        label: ratios(outcomes[above], outcomes[below])
        for label, (above, below, _) in RATIOS.items()
        if above in outcomes and below in outcomes
    }
    return {
        "machine": machine(),
        "versions": versions,
        "inputs": inputs,
        "cases": {case.name: _row(case, outcomes[case.name]) for case in cases},
        "ratios": compared,
        "targets": [
            *_ratio_targets(compared),
            *_fidelity_targets(outcomes),
            *_resume_targets(outcomes),
            *_memory_targets(outcomes),
        ],
    }


def _row(case: Case, outcome: Outcome) -> dict[str, Any]:
    count = case.request["num_inputs"]
    row: dict[str, Any] = {
        "num_inputs": count,
        "missing": outcome.missing,
        "seconds": outcome.values("seconds"),
        "busy_before": outcome.values("busy"),
        "busy_for_others": outcome.values("others"),
    }
    if case.name in RATE_CASES:
        row["images_per_s"] = [count / seconds for seconds in row["seconds"]]
    known = {*row, "seconds", "busy", "others", "versions"}
    for run in outcome.runs.values():
        for name in run.keys() - known:
            row.setdefault(name, []).append(run[name])
    return row


def _ratio_targets(compared: dict[str, list[float]]) -> list[dict[str, str]]:
    rows = []
    for label, values in compared.items():
        least = RATIOS[label][2]
        if least is None:
            continue
        reached = statistics.median(values) >= least if values else None
        value = spread(values, 2) if values else "-"
        rows.append(target(label, value, f">= {least:g}", reached))
    return rows


def _fidelity_targets(outcomes: dict[str, Outcome]) -> list[dict[str, str]]:
    rows = []
    for name in (names.FIDELITY_EXACT, names.FIDELITY_FAST):
        for run in _runs(outcomes, name):
            value = f"mean {run['mean_levels']:.2f}, worst image {run['worst_levels']:.2f}"
            reached = run["mean_levels"] <= MAX_LEVELS
            rows.append(target(name, value, f"mean <= {MAX_LEVELS:g} of 255 levels", reached))
    return rows


def _resume_targets(outcomes: dict[str, Outcome]) -> list[dict[str, str]]:
    rows = []
    for run in _runs(outcomes, names.RESUME):
        start, resumed = (statistics.median(run[name]) for name in ("start_s", "resumed_s"))
        value = f"{resumed:.2f} s / {start:.2f} s = {resumed / start:.2f}, the right samples"
        reached = resumed / start <= MAX_RESUME_RATIO
        name = f"first batch, step {run['resumed_step']} / step 0"
        rows.append(target(name, value, f"<= {MAX_RESUME_RATIO:g}", reached))
    return rows


def _memory_targets(outcomes: dict[str, Outcome]) -> list[dict[str, str]]:
    rows = []
    for run in _runs(outcomes, names.MEMORY):
        first, most = run["bytes"][0], max(run["bytes"][1:])
        value = f"{first / 1e6:.0f} MB, then {most / 1e6:.0f} MB at most: {most / first - 1:+.1%}"
        reached = most <= first * (1 + MAX_GROWTH)
        rows.append(target("memory", value, f"growth <= {MAX_GROWTH:.0%}", reached))
    return rows


def _runs(outcomes: dict[str, Outcome], name: str) -> list[dict[str, Any]]:
    return list(outcomes[name].runs.values()) if name in outcomes else []


def text_of(report: dict[str, Any]) -> str:
    """Write the report as tables."""
    rates: list[tuple[str, ...]] = []
    for name, row in report["cases"].items():
        if row["missing"]:
            rates.append((name, row["missing"]))
        elif "images_per_s" in row:
            rates.append((name, spread(row["images_per_s"], 0)))
    lines = heading(report)
    if rates:
        lines += [*table(("case", "images/s"), rates), "", NOTES, ""]
    compared: list[tuple[str, ...]] = [
        (label, spread(values, 2), str(len(values)))
        for label, values in report["ratios"].items()
        if values
    ]
    targets = [tuple(row.values()) for row in report["targets"]]
    for part in (
        table(("ratio", "median [min-max]", "rounds"), compared),
        _stages(report),
        table(("target", "found", "wanted", ""), targets),
    ):
        lines += [*part, ""] if part else []
    return "\n".join(lines).rstrip()


def _stages(report: dict[str, Any]) -> list[str]:
    cases = [(name, row) for name, row in report["cases"].items() if "stages_us" in row]
    if not cases:
        return []
    stages = list(cases[0][1]["stages_us"][0])
    rows: list[tuple[str, ...]] = []
    for stage in stages:
        columns = (spread([run[stage] for run in row["stages_us"]], 0) for _, row in cases)
        rows.append((stage, *columns))
    sums = (spread([sum(run.values()) for run in row["stages_us"]], 0) for _, row in cases)
    head = ("stage, us an image", *(name for name, _ in cases))
    return table(head, [*rows, ("all", *sums)])
