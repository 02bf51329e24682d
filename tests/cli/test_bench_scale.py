"""`kvflow bench scale` with next to nothing to measure."""

import json

import anyio
import pytest

from kvflow.cli.bench.scale import memory
from kvflow.cli.main import main

SMALL = ["--in-flight", "2,3", "--peers", "1,2", "--rounds", "1", "--transfers", "2", "--seconds=0.1"]


def test_every_case_has_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scale", "--json", "--cases", "in-flight,peers,waiting", *SMALL]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    cases = {(row["group"], row["case"], row["quantity"]) for row in rows}
    assert len(cases) == len(rows)
    for quantity in ("cpu of a transfer", "wall of a transfer"):
        for count in (2, 3):
            assert ("transfers in flight", f"{count} in flight", quantity) in cases
        for case in ("2 decode ranks to 1 prefill rank", "2 prefill ranks to 1 decode rank"):
            assert ("peers, 256 in flight", case, quantity) in cases
    assert ("waiting", "3 wait, both sides", "CPU") in cases
    assert {row["bare"] for row in rows} == {None}
    for row in rows:
        if row["group"] != "waiting":
            assert row["ratio"] == pytest.approx(row["kvflow"] / row["others"]["reference"], rel=1e-2)


@pytest.mark.parametrize("case", list(memory.CASES))
def test_memory_of_what_waits(case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["memory", case, "rss", "3"])
    assert memory.main() == 0
    here, there = json.loads(capsys.readouterr().out)
    assert here >= 0
    assert there >= 0 or case == "granted"  # what zmq held for the grants may be free again


def test_memory_is_measured_in_a_process_of_its_own() -> None:
    held = anyio.run(memory.measure_in_process, "opened", "tracemalloc", 2)
    assert held.here > 0


@pytest.mark.parametrize("options", [["--rounds", "0"], ["--cases", "nobody"]])
def test_what_cannot_be_measured_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scale", *options]) == 2
    assert "kvflow bench: " in capsys.readouterr().err
