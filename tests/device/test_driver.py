"""The driver of `make test-device`, with tiny steps and none of its own."""

import fcntl
import re
import sys
from pathlib import Path

import pytest

from tests.device.__main__ import main, run
from tests.device.driver import ROOT, SKIPPED, Result, Step, run_steps, table_of
from tests.device.steps import steps_of

LIMIT_S = 100.0
"""More than any of these steps needs."""

TESTS = """
import os
import pytest

pytestmark = pytest.mark.device

def test_good(record_property):
    record_property("device", "a | b")

def test_missing():
    pytest.skip("no such part")

def test_bad():
    assert 1 + 1 == 3, "arithmetic"

def test_crash():
    os.abort()

def test_unmarked():
    pass
"""


def shell(name: str, code: str, limit_s: float = LIMIT_S) -> Step:
    return Step(name, limit_s, ("sh", "-c", code))


def by_name(results: list[Result]) -> dict[str, tuple[str, str]]:
    return {one.step: (one.outcome, one.found) for one in results}


def test_a_failing_and_a_hanging_step_stop_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a hanging step has started ends with it."""
    lock = tmp_path / "lock"
    lock.touch()
    holder = f"import fcntl, signal; file = open({str(lock)!r}); fcntl.flock(file, fcntl.LOCK_EX); signal.pause()"
    steps = [
        shell("fails", "echo one; echo 'no | such file' >&2; exit 3"),
        shell("hangs", f'{sys.executable} -c "{holder}" & printf "t.py::test_a PASSED\\nt.py::test_b "; wait', 2),
        shell("is skipped", f"echo not here; exit {SKIPPED}"),
        shell("crashes", "kill -SEGV $$"),
        shell("works", "echo noise; echo found it"),
    ]
    assert run(steps, tmp_path / "logs", LIMIT_S) == 1
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    printed = capsys.readouterr().out
    assert (tmp_path / "logs/report.md").read_text() in printed
    lines = [re.sub(r" \d+ s \|", "", line) for line in printed.splitlines()]
    logs = tmp_path / "logs"
    assert lines[2:7] == [
        f"| fails | failed | exit code 3: no \\| such file ({logs}/fails.log) |",
        f"| hangs | failed | over its limit of 2 s in test_b, after 1 passed ({logs}/hangs.log) |",
        "| is skipped | skipped | not here |",
        f"| crashes | failed | ended by SIGSEGV ({logs}/crashes.log) |",
        "| works | passed | found it |",
    ]


def test_tests_are_told_by_pytest(tmp_path: Path) -> None:
    file = tmp_path / "test_parts.py"
    file.write_text(TESTS)

    def some(name: str, words: str) -> Step:
        return Step(name, LIMIT_S, tests=(str(file), "-k", words))

    results = by_name(
        list(
            run_steps(
                [some("facts", "good"), some("skips", "missing"), some("both", "good or bad"), some("crash", "crash")],
                tmp_path,
                LIMIT_S,
            )
        )
    )
    assert results["facts"] == ("passed", "device: a | b")
    assert results["skips"] == ("skipped", "no such part")
    outcome, found = results["both"]
    assert outcome == "failed"
    assert found.startswith("1 failed, 1 passed\ntest_bad: AssertionError: arithmetic")
    assert "device: a | b" in found
    assert results["crash"][0] == "failed"
    assert results["crash"][1].startswith("ended by SIGABRT in test_crash, after 0 passed")


def test_steps_without_time_or_interpreter_are_skipped(tmp_path: Path) -> None:
    absent = Step("absent", LIMIT_S, tests=("x.py",), python=f"{ROOT}/.cache/no/python")
    assert by_name(list(run_steps([absent], tmp_path, LIMIT_S))) == {
        "absent": ("skipped", ".cache/no/python is missing")
    }
    late = list(run_steps([shell("late", "true")], tmp_path, 1.0))
    assert by_name(late) == {"late": ("skipped", "no time left of 1 s")}


def test_lines_of_a_cell_are_lines_of_the_table() -> None:
    table = table_of([Result("one", "passed", 1.6, "a|b\n c  d")])
    assert table.splitlines()[2] == "| one | passed | 2 s | a\\|b<br>c d |"


def test_without_a_device_nothing_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FAKE_DEVICE", raising=False)
        patch.setattr("tests.device.__main__.has_cuda_device", lambda: False)
        assert main([]) == 2
    assert "FAKE_DEVICE=low" in capsys.readouterr().err


def test_every_test_of_devices_is_in_one_step() -> None:
    """So `pytest -m device` runs what `make test-device` runs."""
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if file != Path(__file__) and re.search(r"pytest\.mark\.device\b", file.read_text())
    }
    selected: dict[str, list[str]] = {}
    for step in steps_of(ROOT / ".cache", is_rehearsal=True):
        files = [word for word in step.tests if word.endswith(".py")]
        for file in files:
            selected.setdefault(file, []).append(step.tests[-1] if "-k" in step.tests else "")
    assert set(selected) == marked
    for words in selected.values():
        first = words[0].removeprefix("not ")
        assert sorted(words) == ([""] if len(words) == 1 else sorted([first, f"not {first}"]))


def test_a_machine_with_a_device_installs_first() -> None:
    steps = steps_of(ROOT / ".cache", is_rehearsal=False)
    assert [step.name for step in steps if step.command] == [f"install {part}" for part in PARTS]
    names = [step.name for step in steps if not step.command]
    assert names == [step.name for step in steps_of(ROOT / ".cache", is_rehearsal=True)]


PARTS = re.findall(r"^(\w+)\)$", (ROOT / "scripts/install-device.sh").read_text(), re.MULTILINE)
