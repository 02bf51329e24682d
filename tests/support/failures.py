"""What a failed transfer looks like from outside."""

from collections.abc import Awaitable, Callable

import pytest

from kvflow.errors import TransferFailed
from tests.support.instances import Deployment

__all__ = ["catch", "undisturbed"]


async def catch(act: Callable[[], Awaitable[object]]) -> TransferFailed:
    """The failure that something ends in."""
    with pytest.raises(TransferFailed) as caught:
        await act()
    return caught.value


async def undisturbed(deployment: Deployment, room: int = 900) -> None:
    """Check that the ranks still work: another transfer passes, and nothing stays open."""
    request = deployment.request(room, 10)
    await request.hand_over(chunk=4)
    request.assert_arrived()
    deployment.give_back(request)
    await deployment.settle()
