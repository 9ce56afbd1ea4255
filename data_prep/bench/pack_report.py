"""What `vitscale bench pack` says: rates, ratios, and which targets were reached."""

import statistics
from typing import Any

import vitscale
from data_prep.bench import pack_cases as names
from vitscale.observe.bench_text import heading, table, target
from vitscale.observe.rounds import Case, Outcome, machine, ratios, spread

NOTES = """\
Only vitscale checks every header, hashes every image (xxh3) and shard (sha256), writes an index and
a ledger, and has all of it on the disk (fsync) before it ends; the others leave their output to the
system. "whole" counts listing, plan and manifest too; "CPUs" are those that a case kept busy.
img2dataset fetches its inputs from a web server on this machine; its clock runs from the start of
its first shard to the end of its last. Fidelity is the distance to full decoding, averaging over
areas and the same encoding."""
# Above the case -> what it is compared with, and the least ratio that is aimed at.
RATIOS: dict[str, tuple[str, str, float | None]] = {
    "keep / ShardWriter": (names.KEEP, names.KEEP_SHARD_WRITER, 1.4),
    "keep / MDSWriter": (names.KEEP, names.KEEP_MDS, 1.0),
    "keep / tarfile": (names.KEEP, names.KEEP_TARFILE, None),
    "keep / limit": (names.KEEP, names.KEEP_TAR, None),
    "resize / img2dataset": (names.RESIZE, names.RESIZE_IMG2DATASET, 3.0),
    "resize / ShardWriter+Pillow": (names.RESIZE, names.RESIZE_PILLOW, None),
    "resize / limit": (names.RESIZE, names.RESIZE_LIMIT, 0.85),
    "keep, two / one process": (names.KEEP_LONG_TWO, names.KEEP_LONG_ONE, 1.7),
    "resize, two / one process": (names.RESIZE, names.RESIZE_ONE, 1.7),
}
# Fields of a run that a row has under other names.
_TOLD = {"seconds", "whole_seconds", "busy", "others", "cpu_seconds", "versions"}
MAX_LEVELS = 3.0
MAX_PEAK_BYTES = 400e6
MAX_PEAK_CHANGE = 0.10


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
    counts = {case.name: _count(case) for case in cases}
    rows = {name: _row(counts[name], outcome) for name, outcome in outcomes.items()}
    versions: dict[str, str] = {"vitscale": vitscale.__version__}
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
        "cases": rows,
        "ratios": compared,
        "targets": [*_ratio_targets(compared), *_other_targets(outcomes)],
    }


def _count(case: Case) -> int:
    return int(case.request.get("num_inputs") or len(case.request["inputs"]))


def _row(count: int, outcome: Outcome) -> dict[str, Any]:
    row: dict[str, Any] = {
        "num_inputs": count,
        "missing": outcome.missing,
        "images_per_s": [count / seconds for seconds in outcome.values("seconds")],
        "busy_before": outcome.values("busy"),
        "busy_for_others": outcome.values("others"),
    }
    if any("cpu_seconds" in run for run in outcome.runs.values()):
        whole = [run.get("whole_seconds", run["seconds"]) for run in outcome.runs.values()]
        pairs = zip(outcome.values("cpu_seconds"), whole, strict=True)
        row["cpus_used"] = [cpu / seconds for cpu, seconds in pairs]
    for run in outcome.runs.values():
        for name in run.keys() - _TOLD:
            row[name] = run[name]
    if any("whole_seconds" in run for run in outcome.runs.values()):
        row["images_per_s_whole"] = [count / s for s in outcome.values("whole_seconds")]
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


def _other_targets(outcomes: dict[str, Outcome]) -> list[dict[str, str]]:
    rows = []
    for run in _runs(outcomes, names.FIDELITY):
        value = f"mean {run['mean_levels']:.2f}, worst image {run['worst_levels']:.2f}"
        reached = run["mean_levels"] <= MAX_LEVELS
        wanted = f"mean <= {MAX_LEVELS:g} of 255 levels"
        rows.append(target("resize, fidelity", value, wanted, reached))
    few, many = (_runs(outcomes, name) for name in (names.MEMORY_FEW, names.MEMORY_MANY))
    if few and many:
        # The process that hands out, and the largest of those that work.
        pairs = [[run["peaks"][0], max(run["peaks"][1:])] for run in (*few, *many)]
        for role, first, second in zip(("first process", "workers"), *pairs, strict=True):
            value = f"{first / 1e6:.0f} MB, {second / 1e6:.0f} MB"
            wanted = f"within {MAX_PEAK_CHANGE:.0%}, < {MAX_PEAK_BYTES / 1e6:.0f} MB"
            same = abs(second - first) <= MAX_PEAK_CHANGE * first
            reached = same and max(first, second) < MAX_PEAK_BYTES
            rows.append(target(f"memory, {role}", value, wanted, reached))
    return rows


def _runs(outcomes: dict[str, Outcome], name: str) -> list[dict[str, Any]]:
    return list(outcomes[name].runs.values()) if name in outcomes else []


def text_of(report: dict[str, Any]) -> str:
    """Write the report as tables."""
    lines = heading(report)
    lines += table(
        ("case", "images", "CPUs", "images/s, work", "images/s, whole"), _rate_rows(report)
    )
    lines += ["", NOTES, ""]
    compared: list[tuple[str, ...]] = [
        (label, spread(values, 2), str(len(values)))
        for label, values in report["ratios"].items()
        if values
    ]
    lines += table(("ratio", "median [min-max]", "rounds"), compared)
    targets = [tuple(row.values()) for row in report["targets"]]
    lines += ["", *table(("target", "found", "wanted", ""), targets)]
    return "\n".join(lines)


def _rate_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, row in report["cases"].items():
        count = str(row["num_inputs"])
        cpus = f"{statistics.median(row['cpus_used']):.1f}" if row.get("cpus_used") else ""
        if row["missing"]:
            rows.append((name, count, "", row["missing"], ""))
        elif name == names.DISPATCH:
            micros = [1e6 / rate for rate in row["images_per_s"]]
            rows.append((name, count, cpus, f"{spread(micros, 1)} us a task", ""))
        else:
            digits = 0 if statistics.median(row["images_per_s"]) >= 200 else 1
            whole = row.get("images_per_s_whole")
            second = spread(whole, digits) if whole else ""
            rows.append((name, count, cpus, spread(row["images_per_s"], digits), second))
    return rows
