"""Processes that are killed, frozen or change their mind in the middle of a transfer, and those who live through it."""

import anyio
import pytest

from kvflow.cli.bench.failures import CASES, FailureRow, FailureSettings, measure_failures
from kvflow.cli.bench.workers.options import WorkerOptions
from kvflow.cli.bench.workers.process import WorkerFailed

ROUNDS = {"sigkill": 4, "sigstop": 2, "abort": 5}
"""Four kills are one of each kind: at once or later, at the same address or another."""


def run(case: str, worker: WorkerOptions) -> FailureRow:
    act = case.partition("-")[0]
    settings = FailureSettings(cases=(case,), rounds=ROUNDS[act], worker=worker)
    (row,) = anyio.run(measure_failures, settings)
    return row


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES)
def test_survivor_learns_of_it_keeps_its_pages_and_goes_on(case: str) -> None:
    """No process prints anything, and each that is not killed ends with code 0, or the measurement raises."""
    row = run(case, WorkerOptions(lease_s=1.0))
    assert row.faults == {}
    assert (row.ok, row.next_transfer_ok, row.quarantined_pages) == (row.rounds, row.rounds, 0)
    assert row.fds <= 0
    assert row.threads <= 0


def test_worker_that_cannot_start_is_named_with_what_it_printed() -> None:
    with pytest.raises(WorkerFailed) as caught:
        run("abort-decode", WorkerOptions(backend="carrier pigeon"))
    assert caught.value.values["event"] == "ready"
    assert "carrier pigeon" in str(caught.value.values["printed"])
