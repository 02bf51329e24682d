"""Processes that are killed in the middle of a handover over NIXL."""

import signal
from typing import Any

import anyio
import pytest

pytest.importorskip("transformers")

import kvflow
from benchmarks.processes import ChildProcess
from kvflow import FailureReason
from kvflow.cli.tasks import open_tasks
from kvflow.testing.adapter import check_kill
from tests.engines.transformers.models import prompt
from tests.engines.transformers.pair import Pair
from tests.engines.transformers.processes import Processes
from tests.engines.transformers.worker import Options
from tests.support.stopping import is_stopped
from tests.support.waiting import until

PROMPT = prompt(1, 100)
ROOMS = ("fails", "is computed here")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_either_side_is_killed() -> None:
    with Processes() as processes:
        check_kill(processes, PROMPT)


@pytest.mark.slow
def test_killed_prefill_fails_or_has_decode_compute_the_prompt() -> None:
    with Pair(backend="nixl") as pair:
        expected = pair.reference(PROMPT)
        anyio.run(hand_over_and_kill, pair)
        output: Any = pair.output("fails")
        receiver = pair.receivers["fails"]
        assert receiver.failure.reason in (FailureReason.PEER_LOST, FailureReason.PEER_CLOSED)
        assert "peer" in output.error
        assert output.generated_tokens == []
        assert pair.output("is computed here").generated_tokens == expected
        assert receiver.until_safe(20) is kvflow.Memory.SAFE


async def hand_over_and_kill(pair: Pair) -> None:
    options = Options(dict.fromkeys(ROOMS, PROMPT), pair.fingerprint)
    async with open_tasks() as tasks:
        worker = ChildProcess("prefill", "tests.engines.transformers.worker", options, tasks, shows_errors=True)
        async with worker as prefill:
            tickets = (await prefill.expect("tickets"))["tickets"]
            pair.decode(PROMPT, tickets["fails"])
            pair.decode(PROMPT, tickets["is computed here"], on_failure="recompute")
            await prefill.expect("hangs")
            prefill.send_signal(signal.SIGKILL)


def test_blocks_that_are_not_quiet_stay_allocated_until_they_are() -> None:
    with Pair(backend="nixl", drain_s=0.2) as pair:
        anyio.run(abort_beside_a_stopped_process, pair)


async def abort_beside_a_stopped_process(pair: Pair) -> None:
    async with open_tasks() as tasks:
        options = Options({"stuck": PROMPT}, pair.fingerprint)
        worker = ChildProcess("prefill", "tests.engines.transformers.worker", options, tasks, shows_errors=True)
        async with worker as prefill:
            pair.decode(PROMPT, (await prefill.expect("tickets"))["tickets"]["stuck"])
            await prefill.expect("hangs")
            prefill.send_signal(signal.SIGSTOP)
            await until(lambda: is_stopped(prefill.pid))  # or it could still acknowledge the abort
            pair.abort("decode", "stuck")
            receiver = pair.receivers["stuck"]
            receiver.wait(20)
            assert receiver.memory is kvflow.Memory.QUARANTINED
            assert len(pair.decode_end.engine._held) == 1
            assert pair.reference(PROMPT) == own_output(pair)  # in other blocks
            assert pair.used_pages("decode") == 1
            prefill.send_signal(signal.SIGKILL)
            assert receiver.until_safe(20) is kvflow.Memory.SAFE
            while pair.used_pages("decode"):  # until the next step of the loop
                receiver.wait(0.01)


def own_output(pair: Pair) -> Any:
    """Return what the decode manager generates from a prompt that it computes itself."""
    manager = pair.decode_end.engine.manager
    manager.add_request(PROMPT, request_id="own")
    return pair.output("own").generated_tokens
