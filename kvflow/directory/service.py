"""What answers ranks that register and look up, over the socket of a registry or of a prefill rank."""

from collections.abc import Callable
from typing import Final

from msgspec import structs

from kvflow.aio.alarm import Alarm
from kvflow.directory.table import Answer, RegistryTable
from kvflow.errors import RemoteProtocolError, Unreachable
from kvflow.observe.trace import AnomalyLog
from kvflow.wire.codec import MAX_REQUEST_BYTES, encode
from kvflow.wire.messages import (
    AnyMessage,
    Lookup,
    Message,
    PeerId,
    RankId,
    RankRecord,
    Records,
    Refuse,
    Register,
    RegistrationConflict,
    Unregister,
)

__all__ = ["DirectoryMessage", "DirectoryService"]

REGISTRY: Final = PeerId(RankId("registry", 0), 0)
"""Who refuses, if it is no rank."""

DirectoryMessage = Register | Unregister | Lookup
"""What it takes; anything else is refused."""


class DirectoryService:
    """Keeps a table, and answers over somebody's listener.

    A registry answers for every instance. A prefill rank answers for its own: whatever name a lookup has, it hears of
    this one, and nobody else may register.

    Args:
        send: Queues bytes for a connection; raises Unreachable if that is gone.
        now: Gives monotonic seconds.
        anomalies: Counts what is refused.
        own: The rank that answers; None for a registry.
        may_speak: Says whether who is at the other end of a connection may register a rank of an instance.

    Attributes:
        table: Who is registered.
    """

    def __init__(
        self,
        send: Callable[[bytes, bytes], None],
        now: Callable[[], float],
        anomalies: AnomalyLog,
        own: RankRecord | None = None,
        *,
        may_speak: Callable[[bytes, PeerId], bool] = lambda _connection, _peer: True,
    ) -> None:
        self._send_bytes = send
        self._now = now
        self._anomalies = anomalies
        self._own = own
        self._may_speak = may_speak
        self.table = RegistryTable()
        if own is not None:
            self.table.hold(own)
        self._alarm = Alarm(self.table.timers.next, self._expire, now)

    @property
    def num_ranks(self) -> int:
        """Ranks that are registered."""
        return self.table.num_ranks

    def take(self, connection: bytes, message: AnyMessage) -> None:
        """Do what a message asks for.

        Raises:
            RemoteProtocolError: It is not for this directory; its sender was told, if it can be.
        """
        now = self._now()
        match message:
            case Register(record=record, lease_s=lease_s):
                self._check_key(connection, record.peer)
                self._check_belongs(connection, record)
                self._check_place(connection, record.peer)
                # What a killed process had sent may be read after the first message of its successor. Nothing but its
                # connection, which is gone, tells it from the message of a living one, so the answer goes first.
                if self._send(self.table.answer_to(record, connection)):
                    self._send_all(self.table.register(record, lease_s, connection, now))
            case Unregister(peer=peer):
                self._check_key(connection, peer)
                self.table.unregister(peer)
            case Lookup(timeout_s=timeout_s, number=number):
                instance = message.instance if self._own is None else self._own.peer.rank.instance
                if instance is None:
                    self._send(Answer(connection, Records(instance=None, records=(), number=number)))
                else:
                    self._send_all(self.table.lookup(instance, timeout_s, connection, now, number))
            case _:
                raise RemoteProtocolError("message is not for a registry", message=type(message).__name__)
        self._alarm.check()

    def withdraw(self) -> None:
        """Forget the rank that answers: nobody finds it any more."""
        if self._own is not None:
            self.table.let_go(self._own.peer)

    def close(self) -> None:
        """Answer nobody any more. May be called twice."""
        self._alarm.close()

    def _check_key(self, connection: bytes, peer: PeerId) -> None:
        """Refuse who speaks for an instance that his key is not listed for.

        Raises:
            RemoteProtocolError: It does; its sender was told.
        """
        if not self._may_speak(connection, peer):
            answerer = self._own.peer if self._own is not None else REGISTRY
            detail = f"your key is not listed for {peer.rank.instance}"
            self._send(Answer(connection, Refuse(peer=answerer, to=peer, detail=detail)))
            raise RemoteProtocolError("key is not listed for this instance", rank=str(peer.rank))

    def _check_belongs(self, connection: bytes, record: RankRecord) -> None:
        """Refuse a rank of another instance, or one that claims to be the rank that answers.

        Raises:
            RemoteProtocolError: It is one; its sender was told.
        """
        own, rank = self._own, record.peer.rank
        if own is None:
            return
        if rank == own.peer.rank:
            conflict = RegistrationConflict(peer=record.peer, other=own.peer, other_endpoint=own.endpoint, refused=True)
            self._send(Answer(connection, conflict))
            raise RemoteProtocolError("another process registers under the name of this rank", rank=str(rank))
        if (rank.instance, record.num_ranks) != (own.peer.rank.instance, own.num_ranks):
            detail = f"this is {own.peer.rank} of {own.num_ranks} ranks, which is the registry of its own instance only"
            self._send(Answer(connection, Refuse(peer=own.peer, to=record.peer, detail=detail)))
            raise RemoteProtocolError(
                "rank of a different instance registers", rank=str(rank), num_ranks=record.num_ranks
            )

    def _check_place(self, connection: bytes, peer: PeerId) -> None:
        """Refuse a rank of an instance that has used up its share of the table.

        Raises:
            RemoteProtocolError: It has; its sender was told.
        """
        if not self.table.has_place(peer):
            answerer = self._own.peer if self._own is not None else REGISTRY
            self._send(Answer(connection, Refuse(peer=answerer, to=peer, detail="too many ranks are registered")))
            raise RemoteProtocolError("too many ranks are registered", rank=str(peer.rank))

    def _expire(self) -> None:
        self._send_all(self.table.expire(self._now()))

    def _send_all(self, answers: list[Answer]) -> None:
        for answer in answers:
            self._send(answer)

    def _send(self, answer: Answer) -> bool:
        """Send an answer, and say whether its connection is there and takes it."""
        message: Message = answer.message
        data = encode(message)
        if isinstance(message, Records) and len(data) > MAX_REQUEST_BYTES:
            self._anomalies.count("answer_too_long", instance=str(message.instance), num_bytes=len(data))
            data = encode(structs.replace(message, records=()))
        try:
            self._send_bytes(answer.connection, data)
        except Unreachable as error:
            self._anomalies.count("answer_undeliverable", detail=str(error))
            return False
        if isinstance(message, RegistrationConflict) and message.refused:
            self._anomalies.count(
                "registration_conflict",
                message.peer,
                holder=str(message.other),
                holder_endpoint=message.other_endpoint,
            )
        if answer.then is not None:
            self._send(answer.then)
        return True
