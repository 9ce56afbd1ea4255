"""What the reports of all benchmarks have in common: their head, targets, and tables of text."""

import statistics
from collections.abc import Sequence
from typing import Any

from vitscale.observe.rounds import DISTURBED_SHARE

_WARNING = "warning: others worked on this machine meanwhile; these figures say little"


def target(name: str, value: str, wanted: str, reached: bool | None) -> dict[str, str]:
    """Say whether a target was reached; None: it was not measured."""
    verdict = "not measured" if reached is None else "PASS" if reached else "FAIL"
    return {"name": name, "value": value, "wanted": wanted, "verdict": verdict}


def heading(report: dict[str, Any]) -> list[str]:
    """Give the first lines of a report.

    Args:
        report: "machine" as rounds.machine gives it; "cases": name -> row with "busy_before" and
            "busy_for_others", shares of all CPUs by round; "versions"; "inputs": what they are.
    """
    found = report["machine"]
    rows = report["cases"].values()
    before, others = (
        [share for row in rows for share in row[name]] or [0.0]
        for name in ("busy_before", "busy_for_others")
    )
    return [
        "",
        f"{found['cpu']}, {found['cpus']} CPUs, {found['system']}",
        f"load average {found['load_average']}",
        f"CPUs busy before a case: {_shares(before)}; for others during a case: {_shares(others)}",
        *([_WARNING] if statistics.median(others) > DISTURBED_SHARE else []),
        " ".join(f"{name}={version}" for name, version in report["versions"].items()),
        *(f"{name}: {text}" for name, text in report["inputs"].items()),
        "",
    ]


def _shares(values: list[float]) -> str:
    return f"median {statistics.median(values):.0%}, most {max(values):.0%}"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align the columns of a table; no lines where there are no rows."""
    if not rows:
        return []
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
