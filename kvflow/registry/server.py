"""The registry as a service: hosted by any process of a deployment, or on its own by `kvflow registry`."""

from types import TracebackType

import anyio
from typing_extensions import Self

from kvflow.aio.clock import Clock, now
from kvflow.aio.tasks import OwnedTasks
from kvflow.config import check_address
from kvflow.errors import RemoteProtocolError, Unreachable
from kvflow.observe.logs import get_logger
from kvflow.registry.table import Answer, RegistryTable
from kvflow.wire.channel import Listener
from kvflow.wire.codec import decode_frames, encode
from kvflow.wire.messages import Lookup, Message, Register, Registered, Unregister

__all__ = ["Registry"]


class Registry:
    """Serves lookups while it is open. Use it as an async context manager.

    Args:
        bind: "tcp://host:port"; port 0 takes a free one.
        advertise: Host to give to others, if not the one bound.

    Attributes:
        endpoint: Address for the `registry` setting of ranks.

    Raises:
        ConfigError: The address is malformed, or on entry: it cannot be bound.
    """

    def __init__(self, bind: str = "tcp://127.0.0.1:0", advertise: str | None = None) -> None:
        check_address("bind", bind)
        self._bind = bind
        self._advertise = advertise
        self._table = RegistryTable()
        self._log = get_logger(stage="registry")

    async def __aenter__(self) -> Self:
        self._listener = Listener(self._bind, self._advertise)
        self.endpoint = self._listener.endpoint
        self._clock = Clock(self._table.deadlines.next, self._expire)
        self._tasks = OwnedTasks(lambda error: self._log.error("registry_broken", exc_info=error))
        try:
            await self._tasks.open()
        except BaseException:
            self._listener.close()
            raise
        self._tasks.start(self._serve)
        self._tasks.start(self._clock.run)
        self._log.info("registry_opened", endpoint=self.endpoint)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with anyio.CancelScope(shield=True):
                await self._tasks.close()
        finally:
            self._listener.close()
            self._log.info("registry_closed", endpoint=self.endpoint, ranks=self._table.num_ranks)

    async def _serve(self) -> None:
        while True:
            connection, frames = await self._listener.receive()
            try:
                self._obey(connection, decode_frames(frames))
            except RemoteProtocolError as error:
                self._log.warning("message_rejected", connection=connection.hex(), detail=str(error))
            self._clock.check()

    def _obey(self, connection: bytes, message: Message) -> None:
        at = now()
        match message:
            case Register(card=card, lease_s=lease_s):
                answers = self._table.register(card, lease_s, at)
                self._send(connection, Registered(peer=card.peer))
                self._answer(answers)
            case Unregister(peer=peer):
                self._table.unregister(peer)
            case Lookup(instance=instance, timeout_s=timeout_s):
                self._answer(self._table.lookup(instance, timeout_s, connection, at))
            case _:
                raise RemoteProtocolError("message is not for a registry", message=type(message).__name__)

    def _expire(self) -> None:
        self._answer(self._table.expire(now()))

    def _answer(self, answers: list[Answer]) -> None:
        for answer in answers:
            self._send(answer.connection, answer.cards)

    def _send(self, connection: bytes, message: Message) -> None:
        try:
            self._listener.send(connection, encode(message))
        except Unreachable as error:
            self._log.warning("answer_undeliverable", connection=connection.hex(), detail=str(error))
