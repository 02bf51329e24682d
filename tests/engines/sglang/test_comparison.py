"""The benchmark that compares kvflow with SGLang's own backend."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.sglang_transfer import CASES, RIVALS

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


def test_every_case_is_measured_against_every_rival(capfd: pytest.CaptureFixture[str]) -> None:
    """Every byte is checked, so both ways do the same work."""
    small = ("--shape=tiny", "--tokens=64", "--requests=4", "--rounds=1")
    assert main(["sglang_transfer", *small, "--json"]) == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    expected = {
        f"{case.label}, {lanes} in flight; SGLang with {rival}"
        for case in CASES.values()
        for lanes in (1, 16)
        for rival in RIVALS
    }
    measured = {row["case"] for row in rows if row["quantity"] == "requests a second"}
    assert measured == expected
