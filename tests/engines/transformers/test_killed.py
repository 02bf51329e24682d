"""A prefill process that is killed in the middle of a handover, over NIXL."""

import signal
from typing import Any

import anyio
import pytest

pytest.importorskip("transformers")

import kvflow
from kvflow import FailureReason
from kvflow.cli.processes import ChildProcess, open_tasks
from tests.engines.transformers.models import prompt
from tests.engines.transformers.pair import Pair
from tests.engines.transformers.worker import Options

PROMPT = prompt(1, 100)
ROOMS = ("fails", "is computed here")


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
