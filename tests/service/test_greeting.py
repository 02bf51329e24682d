"""Handshakes in which prefill ranks do what they rarely do."""

import anyio
import pytest

import kvflow
from kvflow.config import Timeouts
from kvflow.errors import FailureReason, TransferFailed
from kvflow.wire.messages import Goodbye, Grant, Hello, Refuse
from tests.support.failures import catch
from tests.support.fake_prefill import FakePrefill
from tests.support.instances import decode_config, make_pool
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def receive(decode: kvflow.DecodeRank, room: int) -> None:
    async with decode.receive(room, prefill="prefill", tokens=(0, 4), pages={"kv": [1]}) as receiver:
        await receiver.done()


class Receiving:
    """A receive that is under way, and how it ended."""

    def __init__(self, decode: kvflow.DecodeRank, room: int) -> None:
        self._decode, self._room = decode, room
        self.failure: TransferFailed | None = None

    async def __call__(self) -> None:
        self.failure = await catch(lambda: receive(self._decode, self._room))


async def test_a_known_rank_that_leaves_while_another_one_is_greeted_fails_the_handshake_only() -> None:
    async with (
        kvflow.Registry() as registry,
        FakePrefill(registry.endpoint, 0, 2) as first,
        FakePrefill(registry.endpoint, 1, 2) as second,
        kvflow.DecodeRank(
            decode_config(registry.endpoint, timeouts=Timeouts(drain_s=0.1)), make_pool().layout
        ) as decode,
        anyio.create_task_group() as tasks,
    ):
        known, hasty, last = (Receiving(decode, room) for room in (1, 2, 3))
        tasks.start_soon(known)
        await first.greet()
        await second.greet()
        await first.hear(Grant)
        await second.hear(Grant)
        second.say(Goodbye(peer=second.me))
        await until(lambda: known.failure)
        tasks.start_soon(hasty)
        await first.greet()
        await second.hear(Hello)
        first.say(Goodbye(peer=first.me))
        await until(lambda: decode.statistics().peers == 0)
        second.welcome()
        await until(lambda: hasty.failure)
        assert hasty.failure is not None
        assert hasty.failure.reason is FailureReason.UNREACHABLE
        assert "left during the handshake" in hasty.failure.detail
        tasks.start_soon(last)
        await first.greet()
        await second.greet()
        await first.hear(Grant)
        second.say(Goodbye(peer=second.me))


async def test_a_refusal_of_what_was_said_before_is_no_answer_to_the_hello() -> None:
    """The rank was cut off for so long that it has forgotten the decode rank, and its pings were on the line first."""
    timeouts = Timeouts(lease_s=0.6, drain_s=0.1)
    async with (
        kvflow.Registry() as registry,
        FakePrefill(registry.endpoint) as prefill,
        kvflow.DecodeRank(decode_config(registry.endpoint, timeouts=timeouts), make_pool().layout) as decode,
        anyio.create_task_group() as tasks,
    ):
        lost, again = Receiving(decode, 1), Receiving(decode, 2)
        tasks.start_soon(lost)
        await prefill.greet()
        await until(lambda: lost.failure)
        assert lost.failure is not None
        assert lost.failure.reason is FailureReason.PEER_LOST
        tasks.start_soon(again)
        await prefill.hear(Hello)
        prefill.say(Refuse(peer=prefill.me, to=None, detail="say hello first"))
        prefill.welcome()
        granted = await prefill.hear(Grant)
        while granted.room != 2:
            granted = await prefill.hear(Grant)
        prefill.say(Goodbye(peer=prefill.me))


async def test_a_life_that_ended_before_it_answered_gives_its_window_back() -> None:
    """Its card stays in the registry for as long as its lease."""
    timeouts = Timeouts(handshake_s=0.3, drain_s=0.1)
    async with kvflow.Registry() as registry:
        async with FakePrefill(registry.endpoint):
            pass
        async with kvflow.DecodeRank(decode_config(registry.endpoint, timeouts=timeouts), make_pool().layout) as decode:
            failure = await catch(lambda: receive(decode, 1))
            assert failure.reason is FailureReason.UNREACHABLE
            await until(lambda: not decode.statistics().staging.windows_taken)
