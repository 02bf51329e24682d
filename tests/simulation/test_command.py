"""`python -m simulation run`."""

import json
from pathlib import Path

import pytest

from simulation import run, runner
from simulation.__main__ import main
from simulation.run import Result


def test_json_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--seeds", "0:8", "--jobs", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["seeds"], report["violations"]) == (8, [])
    assert report["seeds_per_s"] > 0
    assert sum(report["faults_injected"].values()) > 20


@pytest.mark.slow
def test_processes_find_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    reports = []
    for jobs in ("1", "2"):
        assert main(["run", "--seeds", "100:112", "--jobs", jobs, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        reports.append((report["seeds"], report["faults_injected"], report["successes"]))
    assert reports[0] == reports[1]


def test_summary_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--seeds", "0:3", "--jobs", "1"]) == 0
    shown = capsys.readouterr().out
    assert "3 seeds in 1 processes" in shown
    assert "violations: 0" in shown


def test_story_of_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--story", "5"]) == 0
    assert capsys.readouterr().out.splitlines() == run.run_seed(5, tells=True).story


def test_a_scenario_is_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "race.txt"
    path.write_text("# Nothing happened.\nprefill P\ndecode D\nrequest 7: 4 tokens, P to D\nD receives 7\nrun 10 ms\n")
    assert main(["run", "--scenario", str(path)]) == 0
    assert "> D receives 7" in capsys.readouterr().out
    path.write_text(f"{path.read_text()}expect D 7: success\n")
    assert main(["run", "--scenario", str(path)]) == 1
    assert "line=7, text='expect D 7: success'" in capsys.readouterr().out
    assert main(["run", "--scenario", str(tmp_path / "none.txt")]) == 2


def test_a_violation_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(seed: int) -> Result:
        return Result(seed, violation="pages are not safe" if seed == 3 else None, time=1.5, num_callbacks=7)

    monkeypatch.setattr(runner, "run_seed", broken)
    assert main(["run", "--seeds", "0:5", "--jobs", "1", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["violations"] == [{"seed": 3, "time": 1.5, "callback": 7, "message": "pages are not safe"}]
    assert main(["run", "--seeds", "0:5", "--jobs", "1"]) == 1
    assert "python -m simulation run --story 3" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--seeds", "5"], ["--seeds", "5:5"], ["--jobs", "0"]])
def test_nonsense_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *options]) == 2
    assert "python -m simulation run: " in capsys.readouterr().err
