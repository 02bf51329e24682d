"""Fuzzed messages to live ranks with and without keys: nothing breaks or grows, and no peer is affected.

`make fuzz` sends a million of them, or KVFLOW_FUZZ_MESSAGES.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import zmq

from kvflow.control.curve import be_client
from kvflow.control.sockets import NOBLOCK, POLLIN, Context, ZmqSocket
from kvflow.gate import rates
from kvflow.gate.rates import Budget
from kvflow.trust import ClientKeys
from tests.attack.fuzz import Fuzz, corpus_of
from tests.attack.guarded import Guarded, guarded, works
from tests.attack.insiders import hello_to, under_way
from tests.support.instances import Deployment, deploy
from tests.support.memory import resident_mib

NUM_MESSAGES = int(os.environ.get("KVFLOW_FUZZ_MESSAGES", "6000"))
NUM_LINES = 4
GROWTH_MIB = 64

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60 + NUM_MESSAGES // 100)]


@pytest.fixture(autouse=True)
def heard_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the limit of refused messages, which would close the connections of the fuzzer."""
    monkeypatch.setattr(rates, "REJECTIONS", Budget(2 * NUM_MESSAGES, 64))


@asynccontextmanager
async def exceptions() -> AsyncIterator[list[dict[str, Any]]]:
    """Collect the uncaught exceptions of the event loop."""
    escaped: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _loop, context: escaped.append(context))
    yield escaped
    loop.set_exception_handler(before)


def lines_to(deployment: Deployment, stack: ExitStack) -> list[ZmqSocket]:
    """Open connections to both listeners, which reconnect when they break."""
    context: Context = zmq.Context.instance()
    lines = []
    for number in range(NUM_LINES):
        listener = deployment.registry if number == 0 else deployment.prefill[0]
        line: ZmqSocket = context.socket(zmq.DEALER)
        stack.callback(line.close, 0)
        line.setsockopt(zmq.SNDHWM, 50)
        line.setsockopt(zmq.RECONNECT_IVL, 10)
        if isinstance(deployment, Guarded):
            name = "registry" if number == 0 else "prefill"
            keys = ClientKeys(deployment.keys["other"], (deployment.keys[name].public,))
            be_client(line, keys.trust, keys.servers[0])
        line.connect(listener.endpoint)
        lines.append(line)
    return lines


async def say(lines: list[ZmqSocket], fuzz: Fuzz, count: int) -> None:
    """Send `count` messages as fast as the sockets accept them."""
    for number in range(count):
        line, frames = lines[number % len(lines)], fuzz.message()
        while True:
            try:
                line.send_multipart(frames, NOBLOCK)
            except zmq.Again:
                await anyio.sleep(0.001)
            else:
                break
        while int(line.getsockopt(zmq.EVENTS)) & POLLIN:
            line.recv_multipart(NOBLOCK)
        if number % 16 == 0:
            await anyio.lowlevel.checkpoint()


async def fuzzed(deployment: Deployment) -> None:
    prefill = deployment.prefill[0]
    await works(deployment)
    fuzz = Fuzz(corpus_of(hello_to(deployment, instance="other")), seed=1)
    resident = resident_mib()
    with ExitStack() as stack:
        lines = lines_to(deployment, stack)
        async with exceptions() as escaped, under_way(deployment) as honest:
            await say(lines, fuzz, NUM_MESSAGES)
            await honest.go_on()
            assert resident_mib() < resident + GROWTH_MIB
    assert escaped == []
    assert prefill.statistics().anomalies["message_rejected"] > NUM_MESSAGES // 8
    assert deployment.registry._anomalies.counts["message_rejected"] > NUM_MESSAGES // 16


async def test_messages_that_no_rank_says_without_keys() -> None:
    async with deploy() as deployment:
        await fuzzed(deployment)


async def test_messages_that_no_rank_says_with_a_right_key() -> None:
    async with guarded("other") as deployment:
        await fuzzed(deployment)
