"""A fake prefill rank, controlled by a test."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypeVar

import anyio

from kvflow.system import system_ports
from kvflow.wire.codec import decode, encode
from kvflow.wire.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Hello,
    Message,
    PeerId,
    RankId,
    RankRecord,
    Register,
    Registered,
    Welcome,
)
from tests.support.instances import make_pool
from tests.support.waiting import POLL_S

__all__ = ["FakePrefill"]

AnyKind = TypeVar("AnyKind", bound=Message)

LEASE_S = 60.0


class FakePrefill:
    """A registered rank of the instance "prefill", which answers nothing by itself."""

    def __init__(self, registry: str, rank: int = 0, num_ranks: int = 1) -> None:
        self.me = PeerId(RankId("prefill", rank), 1_000 + rank)
        self.hello: Hello | None = None
        self._control = control = system_ports().control
        self._heard, self._arrived = anyio.create_memory_object_stream[tuple[bytes, AnyMessage]](1_000)
        self._registered = anyio.Event()
        self._listener = control.listen("tcp://127.0.0.1:0", None, self._on_message)
        self._registry = control.connect(registry, self._on_registry_message, lambda: None)
        self._record = RankRecord(
            peer=self.me,
            num_ranks=num_ranks,
            endpoint=self._listener.endpoint,
            backend="memory",
            layout=make_pool(num_ranks, rank).layout,
        )
        self._connection = b""
        self._welcomed = -1

    async def __aenter__(self) -> Self:
        self._registry.send(encode(Register(record=self._record, lease_s=LEASE_S)))
        await self._registered.wait()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._listener.close()
        self._registry.close()
        self._heard.close()
        self._arrived.close()

    async def wait_until_its_port_is_refused(self) -> None:
        """Wait until libzmq has closed the port of a rank whose block was left; it does so in the background."""
        while not await self._control.is_refused(self._record.endpoint, 1.0):  # noqa: ASYNC110 - as in `until`
            await anyio.sleep(POLL_S)

    def _on_message(self, connection: bytes, frames: Sequence[bytes]) -> None:
        self._heard.send_nowait((connection, decode(*frames)))

    def _on_registry_message(self, frames: Sequence[bytes]) -> None:
        if isinstance(decode(*frames), Registered):
            self._registered.set()

    async def hear(self, kind: type[AnyKind]) -> AnyKind:
        """Wait for a message of some kind, and skip others; `say` answers on its connection.

        A Hello that was retransmitted before its Welcome arrived does not count.
        """
        while True:
            self._connection, message = await self._arrived.receive()
            if isinstance(message, Hello) and message.attempt == self._welcomed:
                continue
            if isinstance(message, Hello):
                self.hello = message
            if isinstance(message, kind):
                return message

    def say(self, message: Message) -> None:
        """Send a message on the connection of the last received message."""
        self._listener.send(self._connection, encode(message))

    def welcome(self) -> None:
        """Accept the last received hello."""
        assert self.hello is not None
        self._welcomed = self.hello.attempt
        self.say(
            Welcome(
                peer=self.me, attempt=self.hello.attempt, version=PROTOCOL_VERSION, endpoint=self._listener.endpoint
            )
        )

    async def accept_hello(self) -> Hello:
        """Wait for a hello and accept it."""
        hello = await self.hear(Hello)
        self.welcome()
        return hello

    async def answer_hellos(self) -> None:
        """Accept hellos forever."""
        while True:
            await self.accept_hello()
