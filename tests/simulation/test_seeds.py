"""Instances in virtual time keep every promise, seed after seed, and each seed is reproducible."""

import os
import subprocess
import sys

import pytest

from simulation import Faults, run_seed
from tests.support.slow import slow_except

REGRESSIONS = (
    8154,  # a killed rank's message reached the registry after its successor's Register, and replaced it
    27974,  # the same
    36229,  # the same
    43013,  # the same
    64540,  # the same, twice, and the successor was refused
    74040,  # as 8154
    90683,  # the same
    97411,  # the same
    11464,  # a prefill rank closed right after it disconnected a decode rank, which never received its Goodbye
    13987,  # the same
    31513,  # messages of a rank that had left arrived after its port had been refused, and were dropped
    72576,  # a disconnected decode rank could not look the instance up before the prefill rank closed
    33314,  # a port was refused because its rank had closed, while bytes of a failed write were still in flight
    69871,  # the pool was full of quarantined pages until an operator came, just before the rate was measured
    79652,  # a Hello of a dead decode process replaced a live one, which was refused for good
    92537,  # the same
)
"""Seeds that once broke a promise. A seed's course changes with the draws, so each fix has other tests as well."""

BATCH = 25
NUM_BATCHES = 8

TELL = """
import sys
from simulation import run_seed
print("\\n".join(run_seed(int(sys.argv[1]), tells=True).story))
"""


@pytest.mark.parametrize("first", slow_except([0], range(0, BATCH * NUM_BATCHES, BATCH)))
def test_no_promise_is_broken(first: int) -> None:
    broken = {seed: found for seed in range(first, first + BATCH) if (found := run_seed(seed).violation)}
    assert not broken


@pytest.mark.slow
@pytest.mark.parametrize("seed", REGRESSIONS)
def test_no_promise_is_broken_again(seed: int) -> None:
    assert run_seed(seed, by_name=True).violation is None


def test_without_faults_every_request_succeeds() -> None:
    for seed in range(8):
        result = run_seed(seed, faults=Faults(), tells=True)
        assert result.violation is None
        assert result.num_requests == result.num_successes > 0
        assert result.injected == {}
        assert not [line for line in result.story if "ENDS failed" in line]


@pytest.mark.parametrize("seed", slow_except([3], [3, 65]))
def test_the_story_does_not_depend_on_the_process(seed: int) -> None:
    stories = [_tell(seed, hash_seed) for hash_seed in ("1", "2")]
    assert stories[0] == stories[1] == run_seed(seed, tells=True).story
    assert len(stories[0]) > 50


def test_telling_changes_nothing() -> None:
    for seed in range(4):
        told, untold = run_seed(seed, tells=True), run_seed(seed)
        assert (told.num_callbacks, told.time, told.injected) == (untold.num_callbacks, untold.time, untold.injected)


def _tell(seed: int, hash_seed: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", TELL, str(seed)],
        capture_output=True,
        check=True,
        timeout=50,
        text=True,
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
    )
    return done.stdout.splitlines()
