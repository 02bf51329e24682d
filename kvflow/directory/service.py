"""Answers Register and Lookup messages, over the socket of a registry or of a prefill rank."""

import logging
from collections.abc import Callable
from typing import Final, get_args

import msgspec
from msgspec import structs

from kvflow.aio.alarm import Alarm
from kvflow.directory.table import Answer, RegistryTable
from kvflow.errors import RemoteProtocolError, Unreachable
from kvflow.gate.identity import REGISTRY, registration_denial
from kvflow.gate.rates import ListenerGate
from kvflow.gate.sizes import MAX_RECORDS_BYTES
from kvflow.observe.trace import AnomalyLog
from kvflow.ports import Listener
from kvflow.wire.codec import encode
from kvflow.wire.messages import (
    EVERY_INSTANCE,
    Lookup,
    Message,
    PeerId,
    RankRecord,
    Refuse,
    RegistrationConflict,
    SealedRecord,
    SealedRecords,
    SealedRegister,
    Unregister,
)

__all__ = ["DIRECTORY_KINDS", "DirectoryMessage", "DirectoryService", "seal"]

DirectoryMessage = SealedRegister | Unregister | Lookup
"""Messages to a directory."""

DIRECTORY_KINDS: Final = get_args(DirectoryMessage)


class DirectoryService:
    """A directory of ranks that answers over the listener of its host, a registry or a prefill rank.

    A registry serves all instances. A prefill rank, whose record is `own`, serves its own instance: it returns that
    instance whatever name a Lookup has, and rejects ranks of other instances.
    """

    def __init__(
        self,
        listener: Listener,
        gate: ListenerGate,
        now: Callable[[], float],
        anomalies: AnomalyLog,
        own: RankRecord | None = None,
    ) -> None:
        self._listener = listener
        self._gate = gate
        self._now = now
        self._anomalies = anomalies
        self._own = None if own is None else seal(own)
        self.table = RegistryTable()
        if self._own is not None:
            self.table.hold(self._own)
            self.table.changes.clear()
        self._alarm = Alarm(self.table.timers.next, self._expire, now)

    def handle_message(self, connection: bytes, message: DirectoryMessage) -> None:
        """Handle a message; raise RemoteProtocolError if it is rejected, after telling a sender that is reachable."""
        now = self._now()
        principal = self._gate.principal_of(connection)
        match message:
            case SealedRegister(record=record, lease_s=lease_s):
                self._check_permission(connection, record.peer, record.num_ranks)
                # A message of a killed process may be read after the first message of its successor. Only its lost
                # connection distinguishes it from a message of a live process, so the reply is sent first.
                if not self.table.has_place(record, principal):
                    self._refuse_place(connection, record.peer)
                elif self._send(self.table.answer_to(record, connection)):
                    self._send_all(self.table.register(record, lease_s, connection, now, principal))
            case Unregister(peer=peer):
                self._check_permission(connection, peer)
                self.table.unregister(peer)
            case Lookup():
                self._look_up(connection, message, now)
        self._log_changes("unregistered")
        self._alarm.check()

    def _look_up(self, connection: bytes, lookup: Lookup, now: float) -> None:
        instance, number = lookup.instance, lookup.number
        if self._own is not None:
            instance = self._own.peer.rank.instance
        if instance is None:
            self._send(Answer(connection, SealedRecords(instance=None, records=(), number=number)))
            return
        if instance == EVERY_INSTANCE and self._own is None:
            records = self.table.list_ranks()
            self._send(Answer(connection, SealedRecords(instance=instance, records=records, number=number)))
            return
        taker = self._gate.principal_of(connection) or self._listener.host_of(connection)
        if not self.table.may_wait(instance, connection, taker):
            self._anomalies.postpone("lookup_over_share", prefill=instance)
        self._send_all(self.table.lookup(instance, lookup.timeout_s, connection, now, number, taker))

    def withdraw(self) -> None:
        """Remove the hosting rank, so that lookups no longer return it."""
        if self._own is not None:
            self.table.let_go(self._own.peer)
            self.table.changes.clear()

    def close(self) -> None:
        """Stop expiring leases and lookups. May be called twice."""
        self._alarm.close()

    def _check_permission(self, connection: bytes, peer: PeerId, num_ranks: int | None = None) -> None:
        """Check that the sender may register or unregister a rank here.

        Raises:
            RemoteProtocolError: It may not; it has been told.
        """
        denied = registration_denial(self._listener.names_of(connection), peer, num_ranks, self._own)
        if denied is not None:
            answer, why = denied
            self._send(Answer(connection, answer))
            raise RemoteProtocolError(why, rank=str(peer.rank))

    def _refuse_place(self, connection: bytes, peer: PeerId) -> None:
        """Tell a rank that its share of the table is used up. It may be honest, and registers again."""
        answerer = REGISTRY if self._own is None else self._own.peer
        detail = self.table.shares.refusal()
        self._anomalies.log(logging.WARNING, "registry_full", {"peer": str(peer), "detail": detail})
        self._send(Answer(connection, Refuse(peer=answerer, to=peer, detail=detail)))

    def _expire(self) -> None:
        self._send_all(self.table.expire(self._now()))
        self._log_changes("lease expired")

    def _log_changes(self, why_gone: str) -> None:
        """Log who has registered, left or been replaced."""
        changes, self.table.changes = self.table.changes, []
        for before, after, endpoint in changes:
            values = {"peer": str(after or before), "endpoint": endpoint}
            if after is None:
                self._anomalies.log(logging.INFO, "rank_left", {**values, "detail": why_gone})
            elif before is None:
                self._anomalies.log(logging.INFO, "rank_registered", values)
            else:
                self._anomalies.log(logging.INFO, "rank_replaced", {**values, "before": str(before)})

    def _send_all(self, answers: list[Answer]) -> None:
        for answer in answers:
            self._send(answer)

    def _send(self, answer: Answer) -> bool:
        """Send an answer; return whether it was queued."""
        message: Message = answer.message
        if isinstance(message, SealedRecords):
            num_bytes = sum(record.num_bytes for record in message.records)
            verdict = self._gate.may_tell(answer.connection, num_bytes, self._now())
            if not self._anomalies.carry_out(verdict, prefill=str(message.instance)):
                return False
        data = encode(message)
        if isinstance(message, SealedRecords) and len(data) > MAX_RECORDS_BYTES:
            self._anomalies.count("answer_too_long", prefill=str(message.instance), num_bytes=len(data))
            data = encode(structs.replace(message, records=()))
        try:
            self._listener.send(answer.connection, data)
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


def seal(record: RankRecord) -> SealedRecord:
    """Return a record as a directory stores it."""
    return SealedRecord(
        peer=record.peer,
        num_ranks=record.num_ranks,
        endpoint=record.endpoint,
        backend=record.backend,
        layout=msgspec.Raw(msgspec.msgpack.encode(record.layout)),
    )
