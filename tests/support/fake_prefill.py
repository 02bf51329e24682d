"""A prefill rank that does only what a test tells it to."""

from types import TracebackType
from typing import TypeVar

from typing_extensions import Self

from kvflow.wire.channel import Dialer, Listener
from kvflow.wire.codec import decode_frames, encode
from kvflow.wire.messages import (
    PROTOCOL_VERSION,
    Card,
    Hello,
    Message,
    PeerId,
    RankId,
    Register,
    Registered,
    Welcome,
)
from tests.support.instances import make_pool

__all__ = ["FakePrefill"]

AnyKind = TypeVar("AnyKind", bound=Message)

LEASE_S = 60.0


class FakePrefill:
    """One rank of the instance "prefill", registered; it answers nothing by itself."""

    def __init__(self, registry: str, rank: int = 0, num_ranks: int = 1) -> None:
        self.me = PeerId(RankId("prefill", rank), 1_000 + rank)
        self._listener = Listener("tcp://127.0.0.1:0")
        self._registry = Dialer(registry)
        self._card = Card(
            peer=self.me,
            num_ranks=num_ranks,
            endpoint=self._listener.endpoint,
            backend="memory",
            layout=make_pool(num_ranks, rank).layout,
        )
        self._line = b""

    async def __aenter__(self) -> Self:
        self._registry.send(encode(Register(card=self._card, lease_s=LEASE_S)))
        assert isinstance(decode_frames(await self._registry.receive()), Registered)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._listener.close()
        self._registry.close()

    async def hear(self, kind: type[AnyKind]) -> AnyKind:
        """Wait for a message of some kind, whatever else comes before it; answers go to where it came from."""
        while True:
            self._line, frames = await self._listener.receive()
            message = decode_frames(frames)
            if isinstance(message, kind):
                return message

    def say(self, message: Message) -> None:
        """Send to whoever was heard last."""
        self._listener.send(self._line, encode(message))

    def welcome(self) -> None:
        """Accept the hello that was heard last."""
        self.say(Welcome(peer=self.me, version=PROTOCOL_VERSION))

    async def greet(self) -> Hello:
        """Wait for a hello and accept it."""
        hello = await self.hear(Hello)
        self.welcome()
        return hello
