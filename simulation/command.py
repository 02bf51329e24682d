"""Run whole instances in virtual time under faults of network, transport and processes, and check every guarantee."""

import argparse
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvflow.errors import ConfigError
from simulation import Report, ScenarioError, play, run_seed, simulate

__all__ = ["add_arguments", "prepare"]

EXIT_VIOLATION = 1
MAX_SHOWN = 20
RANGE = re.compile(r"(\d+):(\d+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--seeds", default="0:1000", metavar="A:B", help="run seeds A to B - 1")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="number of processes")
    parser.add_argument("--story", type=int, metavar="SEED", help="print a log of one seed instead")
    parser.add_argument("--scenario", type=Path, metavar="FILE", help="play a scenario and print a log of it instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that runs seeds, or prints a log of one seed or scenario; its exit code is 1 for a violation.

    Raises:
        ConfigError: The seeds or the number of processes are invalid.
    """
    if arguments.story is not None:
        return lambda: _tell(arguments.story)
    if arguments.scenario is not None:
        return lambda: _play(arguments.scenario)
    seeds = _seeds(arguments.seeds)
    if arguments.jobs < 1:
        raise ConfigError("option must be positive", option="--jobs", value=arguments.jobs)
    return lambda: _run(seeds, arguments.jobs, is_json=arguments.json)


def _run(seeds: range, jobs: int, *, is_json: bool) -> int:
    is_shown = sys.stderr.isatty() and not is_json
    report = simulate(seeds, jobs=jobs, on_progress=_show if is_shown else None)
    if is_shown:
        print(file=sys.stderr)
    print(msgspec.json.encode(report).decode() if is_json else _summary(report))
    return EXIT_VIOLATION if report.violations else 0


def _seeds(text: str) -> range:
    found = RANGE.fullmatch(text)
    if found is None or int(found[1]) >= int(found[2]):
        raise ConfigError("seeds must be given as A:B with A less than B", seeds=text)
    return range(int(found[1]), int(found[2]))


def _show(report: Report) -> None:
    found = len(report.violations)
    print(f"\r{report.seeds} seeds, {found} violations, {report.seeds_per_s:.0f} seeds/s ", end="", file=sys.stderr)


def _summary(report: Report) -> str:
    lines = [
        f"{report.seeds} seeds in {report.jobs} processes, {report.seeds_per_s:.0f} seeds/s",
        f"{report.successes} of {report.requests} requests succeeded",
        "faults injected",
        *(f"  {kind:24} {count:8}" for kind, count in report.faults_injected.items()),
        f"violations: {len(report.violations)}",
    ]
    lines += [f"  seed {one.seed}, {one.time:.3f} s: {one.message}" for one in report.violations[:MAX_SHOWN]]
    if report.violations:
        lines.append(f"see one: python -m simulation run --story {report.violations[0].seed}")
    return "\n".join(lines)


def _tell(seed: int) -> int:
    result = run_seed(seed, tells=True)
    print("\n".join(result.story))
    return EXIT_VIOLATION if result.violation is not None else 0


def _play(path: Path) -> int:
    try:
        print("\n".join(play(path.read_text("utf-8"))))
    except OSError as error:
        raise ConfigError("scenario cannot be read", path=str(path), detail=error.strerror) from error
    except ScenarioError as error:
        print("\n".join(error.story))
        print(error)
        return EXIT_VIOLATION
    return 0
