"""Cases measured side by side: each a process of its own, all once a round, in random order."""

import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitscale.config.errors import VitscaleError

# Share of all CPUs that may be busy before a case, if waiting helps.
QUIET_SHARE = 0.35
# A run is repeated where others took more than this share of all CPUs, whatever it gave.
DISTURBED_SHARE = 0.15
BUSY_SAMPLE_S = 0.2
WARM_BYTES = 1 << 24


@dataclass(frozen=True)
class Case:
    """Something that is measured.

    Args:
        name: For the table.
        command: Runs it; the path of the request comes last.
        request: What it gets as JSON; "work" is added: an empty folder.
        read: Files that it reads; they are read once before, so that all find them in memory.
        rounds: At most so many.
        hint: What to install where it cannot be imported.
    """

    name: str
    command: list[str]
    request: dict[str, Any]
    read: list[str] = field(repr=False, default_factory=list)
    rounds: int | None = None
    hint: str = ""


@dataclass
class Outcome:
    """What a case gave."""

    # round -> what the case printed; "busy": share of the CPUs that worked before it; "others":
    # share that worked for others meanwhile
    runs: dict[int, dict[str, Any]] = field(default_factory=dict)
    # why there are no runs
    missing: str = ""

    def values(self, name: str) -> list[float]:
        """Give a field of all runs."""
        return [run[name] for run in self.runs.values()]


def measure(
    cases: list[Case], rounds: int, work: Path, seed: int, wait_s: float
) -> dict[str, Outcome]:
    """Run all cases, round after round.

    Args:
        cases: With different names.
        rounds: How many.
        work: A folder for what they write.
        seed: Of the order.
        wait_s: Seconds to wait, before each case, for others to leave the machine.

    Raises:
        VitscaleError: A case failed.
    """
    outcomes = {case.name: Outcome() for case in cases}
    for number in range(rounds):
        order = list(cases)
        random.Random(seed + number).shuffle(order)
        for case in order:
            outcome = outcomes[case.name]
            if outcome.missing or (case.rounds is not None and number >= case.rounds):
                continue
            run = _least_disturbed(case, work, wait_s)
            if "missing" in run:
                outcome.missing = f"not installed: {case.hint or run['missing']}"
                print(f"{case.name}: {outcome.missing} ({run['missing']})", flush=True)
                continue
            outcome.runs[number] = run
            print(f"round {number + 1}/{rounds} {case.name}: {run['seconds']:.3f} s", flush=True)
    return outcomes


def _least_disturbed(case: Case, work: Path, wait_s: float) -> dict[str, Any]:
    """Run a case, again where others disturbed it and there is time to wait for them."""
    best = _run(case, work, wait_s)
    end = time.monotonic() + wait_s
    while best.get("others", 0) > DISTURBED_SHARE and time.monotonic() < end:
        best = min(best, _run(case, work, wait_s), key=lambda run: run["others"])
    return best


def _run(case: Case, work: Path, wait_s: float) -> dict[str, Any]:
    folder = work / "case"
    # What the last run left is removed outside the clock.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    request, said = work / "request.json", work / "case.log"
    request.write_text(json.dumps({**case.request, "work": str(folder)}))
    for path in case.read:
        _warm(path)
    busy = wait_for_quiet(wait_s)
    # Else numerical libraries would start a thread for each CPU in every process.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*case.command, str(request)]
    before = _ticks(), _children_s()
    with said.open("wb") as log:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=log, env=environment, check=False
        )
    others = _share_of_others(*before)
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    shutil.rmtree(folder, ignore_errors=True)
    if done.returncode or not lines:
        last = said.read_text(errors="replace")[-2000:]
        raise VitscaleError(f"case {case.name!r} ended with {done.returncode}:\n{last}")
    result: dict[str, Any] = json.loads(lines[-1])
    return {**result, "busy": round(busy, 3), "others": round(others, 3)}


def _warm(path: str) -> None:
    with open(path, "rb", buffering=0) as file:
        while file.read(WARM_BYTES):
            pass


def wait_for_quiet(wait_s: float) -> float:
    """Wait some seconds for others to leave the machine; give the share of its CPUs still busy."""
    end = time.monotonic() + wait_s
    while (busy := busy_share()) > QUIET_SHARE and time.monotonic() < end:
        time.sleep(1.0)
    return busy


def busy_share() -> float:
    """Give the share of all CPUs that was at work just now, 0 to 1; 0 where nobody says it."""
    idle, total = _ticks()
    time.sleep(BUSY_SAMPLE_S)
    later_idle, later_total = _ticks()
    return 1 - (later_idle - idle) / (later_total - total) if later_total > total else 0.0


def _share_of_others(ticks: tuple[int, int], children_s: float) -> float:
    """Give the share of all CPUs that worked since then, but not for our child processes."""
    later_idle, later_total = _ticks()
    total = later_total - ticks[1]
    own = (_children_s() - children_s) * os.sysconf("SC_CLK_TCK")
    return max(0.0, 1 - (later_idle - ticks[0] + own) / total) if total else 0.0


def _children_s() -> float:
    """Give the seconds of CPU time of all child processes that have ended, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _ticks() -> tuple[int, int]:
    """Give clock ticks that all CPUs idled, and all their ticks."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0, 0
    fields = [int(text) for text in stat.read_text().splitlines()[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)


def ratios(above: Outcome, below: Outcome) -> list[float]:
    """Give how many times faster `above` was, for each round that has both; equal work."""
    common = sorted(above.runs.keys() & below.runs.keys())
    return [below.runs[n]["seconds"] / above.runs[n]["seconds"] for n in common]


def spread(values: list[float], digits: int) -> str:
    """Write median [min-max]."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}-{high:.{digits}f}]"


def machine() -> dict[str, Any]:
    """Say what was measured on."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    models = [line.partition(": ")[2] for line in text.splitlines() if line[:10] == "model name"]
    return {
        "cpu": models[0] if models else os.uname().machine,
        "cpus": len(os.sched_getaffinity(0)),
        "system": f"{os.uname().sysname} {os.uname().release}",
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }
