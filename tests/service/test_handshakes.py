"""Handshakes during which prefill ranks leave, or are refused, at unusual times."""

import anyio
import pytest

import kvflow
from kvflow.config import Timeouts
from kvflow.errors import FailureReason, TransferFailed
from kvflow.state.decode import handshake
from kvflow.wire.messages import Goodbye, Grant, Hello, Refuse
from tests.support.failures import catch
from tests.support.fake_prefill import FakePrefill
from tests.support.instances import QUICK, decode_config, deploy, make_pool
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def receive(decode: kvflow.DecodeRank, room: int) -> None:
    async with decode.receive(room, prefill="prefill", tokens=(0, 4), pages={"kv": [room]}) as receiver:
        await receiver.done()


class Receiving:
    """A receive in a task, and its failure."""

    def __init__(self, decode: kvflow.DecodeRank, room: int) -> None:
        self._decode, self._room = decode, room
        self.failure: TransferFailed | None = None

    async def __call__(self) -> None:
        self.failure = await catch(lambda: receive(self._decode, self._room))


async def test_a_connected_rank_that_forgets_this_one_while_another_is_said_hello_fails_the_handshake_only() -> None:
    async with (
        kvflow.Registry() as registry,
        FakePrefill(registry.endpoint, 0, 2) as first,
        FakePrefill(registry.endpoint, 1, 2) as second,
        kvflow.DecodeRank(
            decode_config(registry.endpoint, timeouts=Timeouts(drain_s=0.1)), make_pool().layout
        ) as decode,
        anyio.create_task_group() as tasks,
    ):
        known, early, last = (Receiving(decode, room) for room in (1, 2, 3))
        tasks.start_soon(known)
        await first.accept_hello()
        await second.accept_hello()
        await first.hear(Grant)
        await second.hear(Grant)
        second.say(Refuse(peer=second.me, to=None, detail="handshake required"))
        await until(lambda: known.failure)
        tasks.start_soon(early)
        await first.accept_hello()
        await second.hear(Hello)
        first.say(Refuse(peer=first.me, to=None, detail="handshake required"))
        await until(lambda: decode.statistics().peers == 0)
        second.welcome()
        await until(lambda: early.failure)
        assert early.failure is not None
        assert early.failure.reason is FailureReason.UNREACHABLE
        assert "does not answer" in early.failure.detail
        async with anyio.create_task_group() as answering:  # the handshake continues, and is wanted again
            answering.start_soon(first.answer_hellos)
            answering.start_soon(second.answer_hellos)
            await until(lambda: decode.statistics().peers == 2)
            answering.cancel_scope.cancel()
        tasks.start_soon(last)
        await first.hear(Grant)
        second.say(Goodbye(peer=second.me))


async def test_a_refusal_of_what_was_said_before_is_no_answer_to_the_hello() -> None:
    """After a long cut the prefill rank has forgotten the decode rank, whose pings arrive before the Hello."""
    timeouts = Timeouts(lease_s=0.6, drain_s=0.1)
    async with (
        kvflow.Registry() as registry,
        FakePrefill(registry.endpoint) as prefill,
        kvflow.DecodeRank(decode_config(registry.endpoint, timeouts=timeouts), make_pool().layout) as decode,
        anyio.create_task_group() as tasks,
    ):
        lost, again = Receiving(decode, 1), Receiving(decode, 2)
        tasks.start_soon(lost)
        await prefill.accept_hello()
        await until(lambda: lost.failure)
        assert lost.failure is not None
        assert lost.failure.reason is FailureReason.PEER_LOST
        tasks.start_soon(again)
        await prefill.hear(Hello)
        prefill.say(Refuse(peer=prefill.me, to=None, detail="handshake required"))
        prefill.welcome()
        granted = await prefill.hear(Grant)
        while granted.room != 2:
            granted = await prefill.hear(Grant)
        prefill.say(Goodbye(peer=prefill.me))


async def test_an_incarnation_that_ended_before_it_answered_gives_its_window_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its record stays in the registry until its lease expires."""
    monkeypatch.setattr(handshake, "UNWANTED_S", 0.5)
    timeouts = Timeouts(handshake_s=0.3, drain_s=0.1)
    async with kvflow.Registry() as registry:
        async with FakePrefill(registry.endpoint) as prefill:
            pass
        await prefill.wait_until_its_port_is_refused()
        async with kvflow.DecodeRank(decode_config(registry.endpoint, timeouts=timeouts), make_pool().layout) as decode:
            failure = await catch(lambda: receive(decode, 1))
            assert failure.reason is FailureReason.UNREACHABLE
            await until(lambda: not decode.statistics().staging.windows_taken)


async def test_of_two_decode_processes_with_one_name_the_second_is_refused_until_the_first_has_ended() -> None:
    async with deploy() as deployment:
        first, second = deployment.request(1, 8), deployment.request(2, 8)
        await first.hand_over()
        [known] = deployment.decode
        config = decode_config(deployment.registry.endpoint, timeouts=QUICK)
        async with kvflow.DecodeRank(config, make_pool().layout) as newcomer:
            failure = await catch(lambda: receive(newcomer, 3))
            assert failure.reason is FailureReason.REFUSED
            assert f"another running process has the name decode/0: {known.me}" in failure.detail
            await second.hand_over()  # the first one keeps working
            await deployment.close(known)
            await until(lambda: newcomer.statistics().peers == 1)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(receive, newcomer, 4)
                async with deployment.prefill[0].send(4) as sender:
                    await sender.finish((0, 4), {"kv": [1]})
