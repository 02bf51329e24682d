"""What answers ranks that register and look up, over the socket of a registry or of a prefill rank."""

from collections.abc import Callable
from typing import Final, get_args

import msgspec
from msgspec import structs

from kvflow.aio.alarm import Alarm
from kvflow.directory.table import Answer, RegistryTable
from kvflow.errors import RemoteProtocolError, Unreachable
from kvflow.observe.trace import AnomalyLog
from kvflow.state.budgets import Budgets
from kvflow.wire.codec import MAX_REQUEST_BYTES, Unread, encode
from kvflow.wire.messages import (
    Lookup,
    Message,
    PeerId,
    RankId,
    RankRecord,
    Refuse,
    RegistrationConflict,
    SealedRecord,
    SealedRecords,
    SealedRegister,
    Unregister,
)
from kvflow.wire.principals import principal_of, speaks_for

__all__ = ["DIRECTORY_KINDS", "DirectoryMessage", "DirectoryService", "seal"]

REGISTRY: Final = PeerId(RankId("registry", 0), 0)
"""Who refuses, if it is no rank."""

REGISTERS_AT_ONCE_BYTES: Final = 64 * 2**20
REGISTERS_PER_S_BYTES: Final = 8 * 2**20
"""Of one principal; of one connection without keys. Layouts are not read here, so that this is a few hundredths of the
time; 400 ranks whose records have 60 KB are renewed with it."""

ANSWERS_AT_ONCE_BYTES: Final = 256 * 2**20
ANSWERS_PER_S_BYTES: Final = 64 * 2**20
"""Records that are sent, of one principal as above: a question is short, and its answer may have 8 MiB. Ranks ask
again."""

DirectoryMessage = SealedRegister | Unregister | Lookup
"""What it takes."""

DIRECTORY_KINDS: Final = get_args(DirectoryMessage)


class DirectoryService:
    """Keeps a table, and answers over somebody's listener.

    A registry answers for every instance. A prefill rank answers for its own: whatever name a lookup has, it hears of
    this one, and nobody else may register.

    Args:
        send: Queues bytes for a connection; raises Unreachable if that is gone.
        names_of: Gives the instances that the other end of a connection may speak for.
        now: Gives monotonic seconds.
        anomalies: Counts what is refused.
        own: The rank that answers; None for a registry.

    Attributes:
        table: Who is registered.
    """

    def __init__(
        self,
        send: Callable[[bytes, bytes], None],
        names_of: Callable[[bytes], tuple[str, ...]],
        now: Callable[[], float],
        anomalies: AnomalyLog,
        own: RankRecord | None = None,
    ) -> None:
        self._send_bytes = send
        self._names_of = names_of
        self._now = now
        self._anomalies = anomalies
        self._own = None if own is None else seal(own)
        self._registers = Budgets[str | bytes](REGISTERS_AT_ONCE_BYTES, REGISTERS_PER_S_BYTES)
        self._answers = Budgets[str | bytes](ANSWERS_AT_ONCE_BYTES, ANSWERS_PER_S_BYTES)
        self.table = RegistryTable()
        if self._own is not None:
            self.table.hold(self._own)
        self._alarm = Alarm(self.table.timers.next, self._expire, now)

    @property
    def num_ranks(self) -> int:
        """Ranks that are registered."""
        return self.table.num_ranks

    def is_too_much(self, connection: bytes, unread: Unread) -> bool:
        """Return whether a message is one more than its sender may say now; it is counted and not answered."""
        if unread.kind is not SealedRegister:
            return False
        if self._registers.take(self._taker(connection), self._now(), len(unread.data)):
            return False
        self._anomalies.count("register_over_budget")
        return True

    def take(self, connection: bytes, message: DirectoryMessage) -> None:
        """Do what a message asks for.

        Raises:
            RemoteProtocolError: It is not for this directory; its sender was told, if it can be.
        """
        now = self._now()
        principal = principal_of(self._names_of(connection))
        match message:
            case SealedRegister(record=record, lease_s=lease_s):
                self._check_key(connection, record.peer)
                self._check_belongs(connection, record)
                self._check_place(connection, record, principal)
                # What a killed process had sent may be read after the first message of its successor. Nothing but its
                # connection, which is gone, tells it from the message of a living one, so the answer goes first.
                if self._send(self.table.answer_to(record, connection)):
                    self._send_all(self.table.register(record, lease_s, connection, now, principal))
            case Unregister(peer=peer):
                self._check_key(connection, peer)
                self.table.unregister(peer)
            case Lookup():
                self._look_up(connection, message, now, principal)
        self._alarm.check()

    def _look_up(self, connection: bytes, lookup: Lookup, now: float, principal: str | None) -> None:
        instance, number = lookup.instance, lookup.number
        if self._own is not None:
            instance = self._own.peer.rank.instance
        if instance is None:
            self._send(Answer(connection, SealedRecords(instance=None, records=(), number=number)))
            return
        if not self.table.may_wait(instance, connection, principal):
            self._anomalies.count("lookup_over_share", prefill=instance)
        self._send_all(self.table.lookup(instance, lookup.timeout_s, connection, now, number, principal))

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
        if not speaks_for(self._names_of(connection), peer.rank.instance):
            answerer = self._own.peer if self._own is not None else REGISTRY
            detail = f"your key is not listed for {peer.rank.instance}"
            self._send(Answer(connection, Refuse(peer=answerer, to=peer, detail=detail)))
            raise RemoteProtocolError("key is not listed for this instance", rank=str(peer.rank))

    def _check_belongs(self, connection: bytes, record: SealedRecord) -> None:
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

    def _check_place(self, connection: bytes, record: SealedRecord, principal: str | None) -> None:
        """Refuse a rank of somebody who has used up a share of the table.

        Raises:
            RemoteProtocolError: It is one; its sender was told.
        """
        if not self.table.has_place(record, principal):
            answerer = self._own.peer if self._own is not None else REGISTRY
            self._send(
                Answer(connection, Refuse(peer=answerer, to=record.peer, detail="too many ranks are registered"))
            )
            raise RemoteProtocolError("too many ranks are registered", rank=str(record.peer.rank))

    def _taker(self, connection: bytes) -> str | bytes:
        return principal_of(self._names_of(connection)) or connection

    def _expire(self) -> None:
        self._send_all(self.table.expire(self._now()))

    def _send_all(self, answers: list[Answer]) -> None:
        for answer in answers:
            self._send(answer)

    def _send(self, answer: Answer) -> bool:
        """Send an answer, and say whether its connection is there and takes it."""
        message: Message = answer.message
        if isinstance(message, SealedRecords) and not self._may_be_told(answer.connection, message):
            return False
        data = encode(message)
        if isinstance(message, SealedRecords) and len(data) > MAX_REQUEST_BYTES:
            self._anomalies.count("answer_too_long", prefill=str(message.instance), num_bytes=len(data))
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

    def _may_be_told(self, connection: bytes, answer: SealedRecords) -> bool:
        """Return whether records may be sent to whoever asked for them; it is counted if not."""
        num_bytes = sum(record.num_bytes for record in answer.records)
        if self._answers.take(self._taker(connection), self._now(), num_bytes):
            return True
        self._anomalies.count("lookup_over_budget", prefill=str(answer.instance))
        return False


def seal(record: RankRecord) -> SealedRecord:
    """Return a record as a directory keeps it."""
    return SealedRecord(
        peer=record.peer,
        num_ranks=record.num_ranks,
        endpoint=record.endpoint,
        backend=record.backend,
        layout=msgspec.Raw(msgspec.msgpack.encode(record.layout)),
    )
