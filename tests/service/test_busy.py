"""An engine that holds the GIL: kvflow's tasks and threads do not run meanwhile, but those of libzmq do."""

import anyio
import pytest

import kvflow
from tests.support.instances import decode_config, make_pool
from tests.support.prefill_client import hand_over, prefill_process, receive
from tests.support.prefill_process import hold_interpreter

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

HOLD_S = 10
"""How long the engine holds the GIL: more than three leases."""


@pytest.mark.parametrize("who", ["prefill", "decode"])
async def test_who_holds_the_interpreter_loses_no_peer_and_no_transfer(who: str) -> None:
    pool = make_pool()
    async with kvflow.Registry() as registry, prefill_process(registry.endpoint, 0) as prefill:
        settings = decode_config(registry.endpoint, backend="nixl")
        async with kvflow.DecodeRank(settings, pool.layout) as decode:
            await hand_over(decode, prefill, 1)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(receive, decode, 2)
                await prefill.tell("send", room=2)
                await prefill.expect("half", 2)
                if who == "prefill":
                    await prefill.tell("hold", seconds=HOLD_S)
                    await prefill.expect("held")
                else:
                    hold_interpreter(HOLD_S)
                await prefill.tell("finish")
            await prefill.expect("over", 2)
            assert decode.statistics().peers == 1
            await hand_over(decode, prefill, 3)
