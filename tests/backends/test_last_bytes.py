"""Nothing lands after `Backend.outlast` when a process is killed in the middle of a large NIXL write, on one host."""

import os

import pytest

from tests.backends.last_bytes import kill_writers


@pytest.mark.parametrize(
    "settings", [pytest.param({}, id="default", marks=pytest.mark.slow), pytest.param({"UCX_TLS": "tcp"}, id="tcp")]
)
def test_nothing_lands_after_the_proof_that_the_last_bytes_of_a_killed_process_have(settings: dict[str, str]) -> None:
    """By default the writer copies the bytes itself; over TCP its kernel goes on sending its buffers."""
    for landing in kill_writers(3, {**os.environ, **settings}):
        assert landing.is_proved
        assert landing.num_arrived > 0
        assert landing.num_after_proof == 0


def test_where_queues_in_shared_memory_may_be_used_there_is_no_proof() -> None:
    (landing,) = kill_writers(1, {**os.environ, "UCX_MM_ERROR_HANDLING": "y"})
    assert not landing.is_proved
