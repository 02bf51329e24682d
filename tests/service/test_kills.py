"""Processes that are killed, stopped or abort in the middle of a transfer, and their surviving peers."""

import signal
from contextlib import AsyncExitStack

import anyio
import pytest
from msgspec.structs import replace

import kvflow
from benchmarks.failures import CASES, Engine, EngineOptions, FailureRow, FailureSettings, measure_failures
from benchmarks.processes import ChildFailed
from benchmarks.sides import DECODE, PREFILL
from kvflow.cli.tasks import open_tasks
from tests.support.slow import slow_except

pytestmark = pytest.mark.anyio

QUICK = {"abort-decode"}
"""The case outside the slow tests; a decode process is also killed below."""

ROUNDS = {"sigkill": 4, "sigstop": 2, "abort": 5}
"""Rounds of each case. Four kills cover restarts at once or later, at the same address or another."""


def run(case: str, engine: EngineOptions) -> FailureRow:
    act = case.partition("-")[0]
    settings = FailureSettings(cases=(case,), rounds=ROUNDS[act], engine=engine)
    (row,) = anyio.run(measure_failures, settings)
    return row


@pytest.mark.parametrize("case", slow_except(QUICK, CASES))
def test_survivor_learns_of_it_keeps_its_pages_and_goes_on(case: str) -> None:
    """The measurement raises if a process writes to standard error, or exits with a code other than 0 unless killed."""
    row = run(case, EngineOptions(lease_s=1.0))
    assert row.faults == {}
    assert (row.ok, row.next_transfer_ok, row.quarantined_pages) == (row.rounds, row.rounds, 0)
    assert row.fds <= 0
    assert row.threads <= 0


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sigkill-prefill", "sigkill-decode", "sigstop-decode", "abort-prefill"])
def test_survivor_of_a_transfer_over_mooncake_goes_on(case: str) -> None:
    """Its engine may keep connections to the dead process for some time, but no pages."""
    row = run(case, EngineOptions(lease_s=1.0, backend="mooncake"))
    assert row.faults == {}
    assert (row.ok, row.next_transfer_ok, row.quarantined_pages) == (row.rounds, row.rounds, 0)
    assert row.threads <= 0


async def test_source_pages_come_back_although_the_decode_process_never_does() -> None:
    options = EngineOptions(lease_s=1.0)
    async with kvflow.Registry() as registry, open_tasks() as tasks, AsyncExitStack() as stack:
        workers = []
        for side in (PREFILL, DECODE):
            own = replace(options, side=side, registry=registry.endpoint)
            workers.append(await stack.enter_async_context(Engine(own, tasks)))
        prefill, decode = workers
        for worker in (prefill, decode):
            await worker.expect_ready()
        for room in (1, 2):
            for worker in (prefill, decode):
                await worker.tell("transfer", room=room)
            await prefill.wait_for(room, "chunk 3")
            if room == 2:
                decode.send_signal(signal.SIGKILL)
            ended = await prefill.expect("ended", room)
        assert ended["reason"] in {"write_failed", "peer_lost"}
        await prefill.tell("settle")
        account = await prefill.expect("account")
        assert account["is_settled"]
        assert account["pages"]["free"] == account["pages"]["all"]


def test_worker_that_cannot_start_is_named_with_its_error() -> None:
    with pytest.raises(ChildFailed, match="unknown backend") as caught:
        run("abort-decode", EngineOptions(backend="carrier pigeon"))
    assert "carrier pigeon" in caught.value.message
    assert caught.value.values["child"] in {"prefill", "decode"}


@pytest.mark.slow
def test_worker_whose_pool_is_empty_says_so_at_once() -> None:
    with pytest.raises(ChildFailed) as caught:
        run("abort-decode", EngineOptions(num_pages=100))
    assert "pool is empty" in str(caught.value.values["detail"])
