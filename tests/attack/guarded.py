"""Deployments with keys, and attackers with some keys or none."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest

import kvflow
from kvflow.control.channel import ZmqControl
from kvflow.errors import TransferFailed
from kvflow.trust import ClientKeys
from kvflow.wire.codec import decode, encode
from kvflow.wire.messages import AnyMessage, Message
from tests.support.instances import DEFAULT_LIMITS, Deployment, deploy
from tests.support.trusts import trusts
from tests.support.waiting import until

__all__ = ["BACKENDS", "Attacker", "Guarded", "guarded", "outcome", "works"]


BACKENDS = ("memory", pytest.param("nixl", marks=pytest.mark.slow))
"""Transports for attacks whose outcome could depend on them."""


class Guarded(Deployment):
    """A deployment with keys, and the keys of other instances."""

    keys: dict[str, kvflow.Trust]


@asynccontextmanager
async def guarded(
    *others: str, backend: str = "memory", limits: kvflow.Limits = DEFAULT_LIMITS
) -> AsyncIterator[Guarded]:
    """Open a registry, a prefill and a decode rank with keys, and create keys for other instances that all trust."""
    registry, keys = trusts("prefill", "decode", *others)
    async with deploy(
        backend,
        limits=limits,
        sending={"trust": keys["prefill"]},
        receiving={"trust": keys["decode"]},
        registry_trust=registry,
    ) as deployment:
        deployment.__class__ = Guarded
        assert isinstance(deployment, Guarded)
        deployment.keys = keys | {"registry": registry}
        yield deployment


async def works(deployment: Deployment, room: int = 1) -> None:
    request = deployment.request(room, 12)
    await request.hand_over()
    request.assert_arrived()
    deployment.give_back(request)


async def outcome(transfer: Callable[[], Awaitable[object]]) -> TransferFailed | None:
    """Return the failure of a transfer; None if it succeeds."""
    try:
        await transfer()
    except TransferFailed as error:
        return error
    return None


class Attacker:
    """A connection to a listener that sends any message, with some keys or none."""

    def __init__(self, endpoint: str, keys: ClientKeys | None) -> None:
        self.heard: list[AnyMessage] = []
        self.refused: list[str] = []
        self.connection = ZmqControl().connect(
            endpoint, self._take, lambda: None, keys=keys, on_refused=self.refused.append
        )
        self.close = self.connection.close

    def say(self, message: Message) -> None:
        self.connection.send(encode(message))

    async def answer(self, kind: type[Message], within_s: float = 1.0) -> AnyMessage | None:
        with anyio.move_on_after(within_s):
            await until(lambda: [one for one in self.heard if isinstance(one, kind)])
            return next(one for one in self.heard if isinstance(one, kind))
        return None

    def _take(self, frames: Sequence[bytes]) -> None:
        self.heard.append(decode(*frames))
