"""Nothing that the engine's code does in one request touches another request."""

import asyncio

import anyio
import numpy as np
import pytest

from kvflow.errors import FailureReason
from kvflow.state.tables import Outcome
from tests.observe.lines import printed
from tests.support.failures import catch, undisturbed
from tests.support.instances import Request, deploy

pytestmark = pytest.mark.anyio


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


ERRORS = [ValueError("why"), Unprintable(), SystemExit(3), asyncio.CancelledError(), GeneratorExit()]


def name_of(error: BaseException) -> str:
    return type(error).__name__


class Raising:
    """A callback and a device event that raise."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.num_calls = 0

    def synchronize(self) -> None:
        self.num_calls += 1
        raise self.error

    __call__ = synchronize


async def receive(request: Request, on_change: Raising) -> None:
    async with request.receiver() as receiver:
        receiver.on_change = on_change
        await receiver.done()


@pytest.mark.parametrize("error", ERRORS, ids=name_of)
async def test_a_callback_that_raises_is_logged_and_nothing_else_happens(error: BaseException) -> None:
    with printed() as lines:
        async with deploy() as deployment:
            request, raising = deployment.request(1, 8), Raising(error)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(request.send)
                tasks.start_soon(receive, request, raising)
            assert raising.num_calls
            await undisturbed(deployment)
    assert {line["room"] for line in lines.named("callback_failed")} == {1}


def test_a_keyboard_interrupt_in_a_callback_ends_the_loop_after_the_event_was_handled() -> None:
    outcomes: list[Outcome] = []

    async def run() -> None:
        async with deploy() as deployment:
            request = deployment.request(1, 8)
            async with request.receiver() as receiver, anyio.create_task_group() as tasks:
                receiver.on_change = Raising(KeyboardInterrupt())
                tasks.start_soon(request.send)
                try:
                    await anyio.sleep_forever()
                finally:
                    outcomes.append(receiver.outcome)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())
    assert outcomes == [Outcome.SUCCESS]


@pytest.mark.parametrize("error", [*ERRORS, KeyboardInterrupt()], ids=name_of)
async def test_an_event_that_raises_fails_its_transfer_only(error: BaseException) -> None:
    async with deploy() as deployment:
        request = deployment.request(1, 8)

        async def send() -> None:
            async with deployment.prefill[0].send(1) as sender:
                await sender.finish((0, 8), request.src_pages(0, (0, 8)), ready=Raising(error))
                await sender.delivered()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(catch, send)
            failure = await catch(request.receive)
        assert failure.reason is FailureReason.NOT_READY
        assert type(error).__name__ in failure.detail
        await undisturbed(deployment)


async def test_arrays_and_buffers_may_be_changed_after_the_call() -> None:
    async with deploy() as deployment:
        request = deployment.request(1, 8)
        request.compute(0, 8)
        sources, targets = (np.array(tables[0], np.uint32) for tables in (request.src_tables, request.dst_tables))
        metadata = bytearray(b"first token")
        async with (
            deployment.prefill[0].send(1) as sender,
            deployment.decode[0].receive(1, prefill="prefill", tokens=(0, 8), pages={"kv": targets}) as receiver,
        ):
            await sender.finish((0, 8), {"kv": sources}, metadata=metadata)  # type: ignore[arg-type]
            for array in (sources, targets):
                array[:] = 0
            metadata[:] = bytes(len(metadata))
            assert (await receiver.done()).metadata == b"first token"
            await sender.delivered()
        request.assert_arrived()
