"""Runs steps one after another, each in a process of its own with a time limit, and tells in a table what came of each.

It starts before anything is installed, so it uses only the standard library. A step fails, hangs or crashes alone. The
table is written after each step, so that nothing is lost if the machine is taken away.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple
from xml.etree import ElementTree

__all__ = ["ROOT", "SKIPPED", "Result", "Step", "run_steps", "table_of"]

ROOT: Final = Path(__file__).parents[2]

SKIPPED: Final = 77
"""Exit code of a command that found nothing to do, as in Automake."""

MIN_S: Final = 5.0
"""A step that gets less time is skipped."""

ABORT_S: Final = 3.0
"""How long a process may print its stack before it is killed."""

MAX_LINE: Final = 400
"""Of a cell."""

SHOWN_FAILURES: Final = 3

Outcome = Literal["passed", "failed", "skipped"]


class Step(NamedTuple):
    """A command, or tests.

    Attributes:
        name: Name in the table.
        limit_s: Maximum time.
        command: Exits with 0, or with `SKIPPED`; its last line is shown.
        tests: Arguments for pytest, instead of a command. Properties that the tests record are shown.
        python: Interpreter that runs the tests.
    """

    name: str
    limit_s: float
    command: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    python: str = sys.executable


class Result(NamedTuple):
    """What came of a step: why it failed or was skipped, or what it found."""

    step: str
    outcome: Outcome
    seconds: float
    found: str


class Tests(NamedTuple):
    """Results of the tests of a step, from pytest's report."""

    passed: int
    failures: tuple[str, ...]
    skips: tuple[str, ...]
    facts: tuple[str, ...]


def run_steps(steps: Sequence[Step], folder: Path, total_s: float) -> Iterator[Result]:
    """Run steps.

    Args:
        steps: In this order.
        folder: Directory for their logs.
        total_s: Maximum time of all together. Steps for which none is left are skipped.

    Yields:
        The result of each, when it has ended.
    """
    ends_at = time.monotonic() + total_s
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        left_s = ends_at - time.monotonic()
        if left_s < MIN_S:
            yield Result(step.name, "skipped", 0.0, f"no time left of {total_s:.0f} s")
        elif step.tests and not Path(step.python).exists():
            yield Result(step.name, "skipped", 0.0, f"{_shown(step.python)} is missing")
        else:
            yield _run(step, folder / re.sub(r"\W+", "-", step.name), min(step.limit_s, left_s - ABORT_S))


def table_of(results: Sequence[Result]) -> str:
    """Return a Markdown table."""
    rows = [f"| {_cell(one.step)} | {one.outcome} | {one.seconds:.0f} s | {_cell(one.found)} |" for one in results]
    return "\n".join(["| step | result | time | what was found |", "|---|---|---|---|", *rows, ""])


def _run(step: Step, stem: Path, limit_s: float) -> Result:
    log, report = stem.with_suffix(".log"), stem.with_suffix(".xml")
    report.unlink(missing_ok=True)
    command = step.command or (
        *(step.python, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider", "-m", "device"),
        *("-c", str(ROOT / "pyproject.toml"), "-o", "junit_family=xunit1"),  # which has properties
        *(f"--junitxml={report}", f"--timeout={max(1.0, limit_s / 2):.0f}", *step.tests),
    )
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    began = time.monotonic()
    code = _run_command(command, log, limit_s, {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"})
    seconds = time.monotonic() - began
    tests = _read_report(report)
    printed = log.read_text(errors="replace").splitlines()
    if code is None:
        text = f"over its limit of {limit_s:.0f} s{_where(printed)}"
        return Result(step.name, "failed", seconds, f"{text} ({_shown(log)})")
    outcome, found = _judge_command(step, code, printed) if tests is None else _judge_tests(tests, code)
    return Result(step.name, outcome, seconds, found if outcome != "failed" else f"{found} ({_shown(log)})")


def _run_command(command: Sequence[str], log: Path, limit_s: float, environment: Mapping[str, str]) -> int | None:
    """Run a command, and end its process group; return its exit code, or None if it was over its limit."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # pytest's fault handler prints the stacks
            with suppress(subprocess.TimeoutExpired):
                process.wait(ABORT_S)
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # stuck in a driver
                process.wait(ABORT_S)


def _read_report(report: Path) -> Tests | None:
    if not report.exists():
        return None
    passed, failures, skips, facts = 0, [], [], []
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - written by our own pytest
        facts += [f"{one.get('name')}: {one.get('value')}" for one in case.iter("property")]
        bad = case.find("failure") if case.find("error") is None else case.find("error")
        skip = case.find("skipped")
        if bad is not None:
            failures.append(f"{case.get('name')}: {bad.get('message', '')}")
        elif skip is not None:
            skips.append(skip.get("message", ""))
        else:
            passed += 1
    return Tests(passed, tuple(failures), tuple(skips), tuple(facts))


def _judge_tests(tests: Tests, code: int) -> tuple[Outcome, str]:
    reasons = ", ".join(dict.fromkeys(tests.skips))
    counts = f"{tests.passed} passed" + (f", {len(tests.skips)} skipped ({reasons})" if tests.skips else "")
    facts = "\n".join(tests.facts)
    if tests.failures:
        lines = (f"{len(tests.failures)} failed, {counts}", *tests.failures[:SHOWN_FAILURES], facts)
        return "failed", "\n".join(filter(None, lines))
    if tests.skips and not tests.passed:
        return "skipped", reasons
    if not tests.passed:
        return "failed", f"there was no test: {_exit_text(code)}"
    if code:
        return "failed", f"{counts}, then {_exit_text(code)}"
    return "passed", facts or counts


def _judge_command(step: Step, code: int, printed: Sequence[str]) -> tuple[Outcome, str]:
    """Judge a command by its exit code, and tests that left no report as a failure."""
    last = next((line.strip() for line in reversed(printed) if line.strip()), "")
    if code == SKIPPED:
        return "skipped", last
    if code == 0 and not step.tests:
        return "passed", last
    where = _where(printed) or (last and f": {last}")
    return "failed", f"{_exit_text(code)}{where}"


def _exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"


def _where(printed: Sequence[str]) -> str:
    """Return which test was running according to pytest's output, or nothing."""
    tests = [line for line in printed if re.match(r"\S*::test_", line)]
    if not tests or re.search(r" (PASSED|FAILED|SKIPPED|ERROR)\b", tests[-1]):
        return ""
    done = sum(" PASSED" in line for line in tests)
    name = tests[-1].partition("::")[2].split(" Fatal Python error")[0].strip()
    return f" in {name}, after {done} passed"


def _shown(path: str | Path) -> str:
    return str(path).removeprefix(f"{ROOT}/")


def _cell(text: str) -> str:
    lines = [" ".join(line.split()).replace("|", "\\|") for line in text.splitlines()]
    return "<br>".join(line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}..." for line in lines)
