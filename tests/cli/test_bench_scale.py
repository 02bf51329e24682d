"""`kvflow bench scale` with next to nothing to measure."""

import json

import pytest

from kvflow.cli.bench.scale.memory import CASES
from kvflow.cli.main import main

SMALL = "--in-flight 2,3 --peers 1,2 --waiting 3 --rounds 1 --transfers 2 --seconds 0.01".split()


def test_every_case_has_its_row(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scale", "--json", *SMALL]) == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    cases = {(row["group"], row["case"], row["quantity"]) for row in rows}
    assert len(cases) == len(rows)
    for quantity in ("cpu of a transfer", "wall of a transfer"):
        for count in (2, 3):
            assert ("transfers in flight", f"{count} in flight", quantity) in cases
        for case in ("2 decode ranks to 1 prefill rank", "2 prefill ranks to 1 decode rank"):
            assert ("peers, 256 in flight", case, quantity) in cases
    assert ("waiting", "3 wait, both sides", "CPU") in cases
    held = [row for row in rows if row["quantity"] == "memory"]
    assert {row["case"].rpartition(",")[0] for row in held} == {name for name, _ in CASES.values()}
    assert all(row["kvflow"] > 0 for row in held)
    assert {row["bare"] for row in rows} == {None}
    for row in rows:
        if row["group"] != "waiting":
            assert row["ratio"] == pytest.approx(row["kvflow"] / row["others"]["reference"], rel=1e-2)


def test_numbers_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scale", "--rounds", "0"]) == 2
    assert "must be positive" in capsys.readouterr().err
