"""Helpers that expect transfers to fail, and check that ranks still work."""

from collections.abc import Awaitable, Callable

import anyio
import pytest

from kvflow.errors import TransferFailed
from tests.support.instances import Deployment, Request

__all__ = ["catch", "catch_into", "receive_failure", "undisturbed"]


async def catch(act: Callable[[], Awaitable[object]]) -> TransferFailed:
    """Return the `TransferFailed` that an act raises; fail if there is none."""
    with pytest.raises(TransferFailed) as caught:
        await act()
    return caught.value


async def catch_into(failures: dict[str, TransferFailed], name: str, act: Callable[[], Awaitable[object]]) -> None:
    """Store the failure of an act under a name, for use as a task."""
    failures[name] = await catch(act)


async def receive_failure(request: Request) -> TransferFailed:
    """Send and receive a request, both of which fail; return the failure of the receive."""
    failures: dict[str, TransferFailed] = {}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(catch, request.send)
        tasks.start_soon(catch_into, failures, "decode", request.receive)
    return failures["decode"]


async def undisturbed(deployment: Deployment, room: int = 900) -> None:
    """Check that the ranks still work: another transfer succeeds, and nothing stays open."""
    request = deployment.request(room, 10)
    await request.hand_over(chunk=4)
    request.assert_arrived()
    deployment.give_back(request)
    await deployment.settle()
