"""metrics.jsonl: one JSON object a step, in order, each step once also after restarts."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends rows, and forgets those that a restart is about to write again.

    Args:
        path: The file; made if absent.
        resume_step: Rows of later steps are dropped; so is a half-written last line.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        kept = [row for row in read_metrics(path) if row["step"] <= resume_step]
        temporary = path.with_name(f".tmp-{path.name}")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(_line(row) for row in kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows and hand them to the operating system."""
        self._file.writelines(_line(row) for row in rows)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read all whole rows; an absent file has none, a torn last line does not count."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows
