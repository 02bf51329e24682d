"""The registry as a service: hosted by any process of a deployment, or on its own by `kvflow registry`."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import anyio.lowlevel

from kvflow.aio.alarm import Alarm
from kvflow.config import check_bind
from kvflow.directory.table import Answer, RegistryTable
from kvflow.errors import LocalProtocolError, RemoteProtocolError, Unreachable
from kvflow.observe.logs import get_logger
from kvflow.observe.trace import AnomalyLog
from kvflow.ports import Listener, Ports
from kvflow.system import system_ports
from kvflow.wire.codec import decode_frames, encode
from kvflow.wire.messages import Lookup, Message, Register, RegistrationConflict, Unregister

__all__ = ["Registry"]


class Registry:
    """Serves lookups while it is open. Use it as an async context manager.

    Args:
        bind: "tcp://host:port"; port 0 takes a free one.
        advertise: Host to give to others, if not the one bound; needed if `bind` is a wildcard.
        ports: Sockets and clock; the real ones if None.

    Attributes:
        endpoint: Address for the `registry` setting of ranks.

    Raises:
        ConfigError: The address is malformed, or others could not use it; on entry: it cannot be bound.
        LocalProtocolError: On entry: it is open.
    """

    endpoint: str

    def __init__(
        self, bind: str = "tcp://127.0.0.1:0", advertise: str | None = None, ports: Ports | None = None
    ) -> None:
        check_bind(bind, advertise)
        self._bind = bind
        self._advertise = advertise
        self._ports = ports or system_ports()
        self._log = get_logger(stage="registry")
        self._listener: Listener | None = None

    async def __aenter__(self) -> Self:
        if self._listener is not None:
            raise LocalProtocolError("registry is open already", endpoint=self.endpoint)
        self._table = RegistryTable()
        self._anomalies = AnomalyLog(self._log, self._ports.now)
        self._listener = self._ports.control.listen(self._bind, self._advertise, self._on_message)
        self._alarm = Alarm(self._table.timers.next, self._expire, self._ports.now)
        self.endpoint = self._listener.endpoint
        self._log.info("registry_opened", endpoint=self.endpoint)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._listener is not None:
            self._alarm.close()
            self._listener.close()
            self._listener = None
            self._log.info("registry_closed", endpoint=self.endpoint, ranks=self._table.num_ranks)
        await anyio.lowlevel.cancel_shielded_checkpoint()

    def _on_message(self, connection: bytes, frames: Sequence[bytes]) -> None:
        try:
            self._obey(connection, decode_frames(frames))
        except RemoteProtocolError as error:
            self._anomalies.count("message_rejected", connection=connection.hex(), detail=str(error))
        self._alarm.check()

    def _obey(self, connection: bytes, message: Message) -> None:
        now = self._ports.now()
        match message:
            case Register(record=record, lease_s=lease_s):
                # What a killed process had sent may be read after the first message of its successor. Nothing but its
                # connection, which is gone, tells it from the message of a living one, so the answer goes first.
                if self._send(self._table.answer_to(record, connection)):
                    self._send_all(self._table.register(record, lease_s, connection, now))
            case Unregister(peer=peer):
                self._table.unregister(peer)
            case Lookup(instance=instance, timeout_s=timeout_s):
                self._send_all(self._table.lookup(instance, timeout_s, connection, now))
            case _:
                raise RemoteProtocolError("message is not for a registry", message=type(message).__name__)

    def _expire(self) -> None:
        self._send_all(self._table.expire(self._ports.now()))

    def _send_all(self, answers: list[Answer]) -> None:
        for answer in answers:
            self._send(answer)

    def _send(self, answer: Answer) -> bool:
        """Send an answer, and say whether its connection is there and takes it."""
        if self._listener is None:
            return False
        try:
            self._listener.send(answer.connection, encode(answer.message))
        except Unreachable as error:
            self._anomalies.count("answer_undeliverable", connection=answer.connection.hex(), detail=str(error))
            return False
        if isinstance(answer.message, RegistrationConflict) and answer.message.refused:
            self._report(answer.message)
        if answer.then is not None:
            self._send(answer.then)
        return True

    def _report(self, conflict: RegistrationConflict) -> None:
        self._anomalies.count(
            "registration_conflict", conflict.peer, holder=str(conflict.other), holder_endpoint=conflict.other_endpoint
        )
