"""The simulation finds what it is there to find: one deliberate fault in the protocol at a time."""

import pytest

from kvflow.simulation import run_seed
from tests.simulation.faulty import FAULTS, Fault

SEEDS = range(2_000)


@pytest.mark.timeout(180)  # the rarest needs hundreds of seeds, on a machine that may be busy
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.replace("_", " "))
def test_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert any(run_seed(seed).violation for seed in SEEDS)
