"""Peers that die, and are replaced by another incarnation of the same name."""

import signal

import anyio
import pytest

import kvflow
from kvflow.config import Timeouts
from kvflow.errors import FailureReason
from kvflow.state.tables import Memory
from tests.support.failures import catch
from tests.support.instances import decode_config, make_pool
from tests.support.ports import unused_port
from tests.support.prefill_client import give_ticket, hand_over, prefill_process, receive
from tests.support.prefill_process import FILL, PAGES, TOKENS

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "is_port_fixed", [pytest.param(False, id="any port", marks=pytest.mark.slow), pytest.param(True, id="same port")]
)
async def test_killed_prefill_is_noticed_and_its_successor_is_connected(is_port_fixed: bool) -> None:
    """The registry still lists the dead incarnation at the second request; both may have the same address."""
    port = unused_port() if is_port_fixed else 0
    pool = make_pool()
    async with kvflow.Registry() as registry:
        settings = decode_config(registry.endpoint, backend="nixl", timeouts=Timeouts(lease_s=1.0, drain_s=0.5))
        async with kvflow.DecodeRank(settings, pool.layout) as decode:
            async with prefill_process(registry.endpoint, port) as first, anyio.create_task_group() as tasks:
                await hand_over(decode, first, 1)
                receiver = decode.receive(2, prefill="prefill", tokens=TOKENS, pages=PAGES)

                async def receive_and_lose() -> None:
                    async def act() -> None:
                        async with receiver:
                            await receiver.done()

                    failure = await catch(act)
                    assert (failure.reason, failure.detected_by) == (FailureReason.PEER_LOST, "decode/0")

                tasks.start_soon(receive_and_lose)
                await first.tell("send", room=2)
                await first.expect("half", 2)
                first.send_signal(signal.SIGKILL)
            assert await receiver.until_safe() is Memory.SAFE, "the kernel shows that nothing of it lands any more"
            assert decode.quarantined() == []
            async with prefill_process(registry.endpoint, port) as second:
                await hand_over(decode, second, 2)
                assert {int(cell) for page in PAGES["kv"] for cell in pool.cell("v", 1, page, 3, 5)} == {FILL}
                assert decode.statistics().peers == 1


async def test_without_a_registry_a_killed_prefill_is_replaced_and_its_tickets_are_refused() -> None:
    port, pool = unused_port(), make_pool()
    address = kvflow.Endpoint("127.0.0.1", port)
    settings = decode_config(None, backend="nixl", timeouts=Timeouts(lease_s=1.0, drain_s=0.5))
    async with kvflow.DecodeRank(settings, pool.layout) as decode:
        async with prefill_process(None, port) as first:
            await hand_over(decode, first, 1, await give_ticket(first, 1))
            stale = await give_ticket(first, 2)
            first.send_signal(signal.SIGKILL)
        async with prefill_process(None, port) as second:
            failure = await catch(lambda: receive(decode, 2, stale))
            assert failure.reason is FailureReason.STALE_TICKET
            assert not failure.quarantined
            await hand_over(decode, second, 2, await give_ticket(second, 2))
            await hand_over(decode, second, 3, address)
            assert {int(cell) for page in PAGES["kv"] for cell in pool.cell("v", 1, page, 3, 5)} == {FILL}
            assert decode.statistics().peers == 1
