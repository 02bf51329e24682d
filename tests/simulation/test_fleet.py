"""Fleets in virtual time, of sizes that take seconds; `python -m simulation fleet` runs larger ones."""

from pathlib import Path

import pytest

from simulation.__main__ import main
from simulation.fleet import run_fleet


@pytest.mark.parametrize(
    ("num_prefill", "num_decode"),
    [(1, 4), (4, 1), pytest.param(1, 40, marks=pytest.mark.slow), pytest.param(40, 1, marks=pytest.mark.slow)],
)
def test_a_fleet_whose_processes_are_replaced_loses_nothing(num_prefill: int, num_decode: int) -> None:
    row = run_fleet(1, num_prefill, num_decode, requests_per_s=10.0)
    assert row.violation is None
    assert row.replaced >= 2
    assert row.successes > 0.7 * row.requests
    assert row.connections <= num_prefill + num_decode, "one connection for each peer, and one to the registry"


def test_idle_peers_cost_a_heartbeat_each() -> None:
    few, many = (run_fleet(1, 1, number, requests_per_s=10.0) for number in (2, 12))
    assert many.idle_messages == pytest.approx(6 * few.idle_messages, rel=0.25)
    assert many.messages_per_request <= 1.2 * few.messages_per_request


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "fleets.svg"
    assert main(["fleet", "--sizes", "1x1", "--rate", "5", "--picture", str(picture)]) == 0
    assert "1x1" in capsys.readouterr().out
    assert "<svg" in picture.read_text()
    assert main(["fleet", "--sizes", "1-1"]) == 2
    assert "--sizes" in capsys.readouterr().err
