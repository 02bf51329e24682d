"""What a failed transfer looks like from outside."""

from collections.abc import Awaitable, Callable

import anyio
import pytest

from kvflow.errors import TransferFailed
from tests.support.instances import Deployment, Request

__all__ = ["catch", "catch_into", "receive_failure", "undisturbed"]


async def catch(act: Callable[[], Awaitable[object]]) -> TransferFailed:
    """The failure that something ends in."""
    with pytest.raises(TransferFailed) as caught:
        await act()
    return caught.value


async def catch_into(failures: dict[str, TransferFailed], name: str, act: Callable[[], Awaitable[object]]) -> None:
    """Note the failure that something ends in, under a name; to be run as a task."""
    failures[name] = await catch(act)


async def receive_failure(request: Request) -> TransferFailed:
    """The failure of receiving a request; sending it fails too."""
    failures: dict[str, TransferFailed] = {}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(catch, request.send)
        tasks.start_soon(catch_into, failures, "decode", request.receive)
    return failures["decode"]


async def undisturbed(deployment: Deployment, room: int = 900) -> None:
    """Check that the ranks still work: another transfer passes, and nothing stays open."""
    request = deployment.request(room, 10)
    await request.hand_over(chunk=4)
    request.assert_arrived()
    deployment.give_back(request)
    await deployment.settle()
