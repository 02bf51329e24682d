"""A rank's connection to the registry."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from kvflow.errors import RemoteProtocolError, Unreachable
from kvflow.observe.logs import BoundLogger
from kvflow.ports import OnRefused, ignore_refusal
from kvflow.state.budgets import Budgets
from kvflow.trust import ClientKeys
from kvflow.wire.codec import Reader, encode
from kvflow.wire.messages import (
    Lookup,
    Message,
    PeerId,
    RankRecord,
    Records,
    Refuse,
    Register,
    Registered,
    RegistrationConflict,
    Unregister,
)
from kvflow.wire.reading import OrderedReading, ReadingContext

__all__ = ["RegistryClient"]

LEASE_S: Final = 9.0
"""How long a record stays after its rank fell silent."""

RENEWALS_PER_LEASE: Final = 3

LOOKUP_S: Final = 0.8
"""How long the registry may wait for an instance to be complete before it answers with the ranks that it knows."""

RECORDS_AT_ONCE_BYTES: Final = 32 * 2**20
RECORDS_PER_S_BYTES: Final = 2**20
"""Of one registry, in answers that are long: a megabyte of layouts takes 0.2 s to read. Who is not heard is asked
again."""

Answer = Registered | RegistrationConflict | Refuse
ANSWERS: Final[Reader[Answer | Records]] = Reader(Answer)
ANSWERS_AND_RECORDS: Final[Reader[Answer | Records]] = Reader(Answer | Records)

OnRecords = Callable[[str | None, tuple[RankRecord, ...], int], None]


class RegistryClient:
    """Registers one rank and looks up instances, with callbacks on the event loop.

    Args:
        endpoint: Address of the registry; it need not be up yet.
        log: Where to say that it is silent, or that two processes claim to be this rank.
        context: Sockets, a clock, and what long answers are read with.
        on_records: Takes the name of an instance, its records, by engine rank, and the number of the question, whenever
            the registry sends them; they are refused if it is None.
        keys: Of those of whom one must answer there; everybody may if None.
        on_refused: Told why the registry and this rank will not have each other.

    Raises:
        ConfigError: The address is malformed.
        Unreachable: This process has no sockets left.
    """

    def __init__(
        self,
        endpoint: str,
        log: BoundLogger,
        context: ReadingContext,
        on_records: OnRecords | None = None,
        *,
        keys: ClientKeys | None = None,
        on_refused: OnRefused = ignore_refusal,
    ) -> None:
        self._endpoint = endpoint
        self._log = log.bind(registry=endpoint)
        self._context = context
        self._on_records = on_records
        self._loop = asyncio.get_running_loop()
        self._registration: _Registration | None = None
        self._on_refused = on_refused
        self._is_closed = False
        self._reader = ANSWERS if on_records is None else ANSWERS_AND_RECORDS
        self._reading = OrderedReading(self._reader, context, lambda _: "", self._take, self._reject)
        self._long_answers = Budgets[None](RECORDS_AT_ONCE_BYTES, RECORDS_PER_S_BYTES)
        self._connection = context.ports.control.connect(
            endpoint, self._on_message, self._on_lost, keys=keys, on_refused=self._refused
        )

    def look_up(self, instance: str | None, number: int = 0) -> None:
        """Ask for the ranks of an instance, once.

        The registry answers when they are complete, or with those that it knows after 0.8 s. If it is silent, nothing
        follows: ask again.

        Args:
            instance: A name that `kvflow.config.is_instance_name` takes; None for that of whoever answers.
            number: The answer repeats it, or a higher one that was asked with meanwhile.
        """
        self._send(Lookup(instance=instance, timeout_s=LOOKUP_S, number=number))

    def publish(self, record: RankRecord) -> None:
        """Keep a rank registered until it is withdrawn; a registry that is silent is logged and tried again."""
        if self._registration is not None:
            self._registration.stop()
        self._registration = _Registration(record, self._send, self._log, self._loop)
        self._registration.renew()

    def withdraw(self, peer: PeerId) -> None:
        """Tell the registry to forget a rank, and do not register it again."""
        if self._registration is not None:
            self._registration.stop()
            self._registration = None
        self._send(Unregister(peer=peer))

    def renew(self, keys: ClientKeys | None) -> None:
        """Go by other keys from now on."""
        if keys is not None:
            self._connection.renew(keys)

    def close(self) -> None:
        """Close the connection; no callback follows. May be called twice."""
        self._is_closed = True
        if self._registration is not None:
            self._registration.stop()
            self._registration = None
        self._connection.close()

    def _send(self, message: Message) -> None:
        with suppress(Unreachable):  # its silence is noticed where the answer is missed
            self._connection.send(encode(message))

    def _refused(self, detail: str) -> None:
        self._count("registry_refused", detail)
        self._on_refused(detail)

    def _on_lost(self) -> None:
        """Be there at once when a registry that was restarted comes back."""
        if self._registration is not None:
            self._registration.send()

    def _count(self, kind: str, detail: str, peer: PeerId | None = None) -> None:
        self._context.count(kind, peer, registry=self._endpoint, detail=detail)

    def _on_message(self, frames: Sequence[bytes]) -> None:
        try:
            unread = self._reader.look(frames)
        except RemoteProtocolError as error:
            self._count("message_rejected", str(error))
            return
        if unread.is_long and not self._long_answers.take(None, self._context.ports.now(), len(unread.data)):
            self._count("records_over_budget", f"{len(unread.data)} bytes")
            return
        self._reading.take(b"", unread)

    def _reject(self, _connection: bytes, error: RemoteProtocolError, _num_bytes: int) -> None:
        self._count("message_rejected", str(error))

    def _take(self, _connection: bytes, message: Answer | Records, _num_bytes: int) -> None:
        if self._is_closed:
            return
        match message:
            case Records(instance=instance, records=records, number=number):
                if self._on_records is not None:
                    self._on_records(instance, records, number)
            case Registered(peer=peer) if self._registration is not None:
                self._registration.confirm(peer)
            case RegistrationConflict() if self._registration is not None:
                self._registration.dispute(message)
            case Refuse() if self._registration is not None:
                self._registration.refuse(message)
            case Registered() | RegistrationConflict():  # late: the rank was withdrawn
                pass
            case Refuse():
                self._count("lookup_refused", message.detail, message.peer)


class _Registration:
    """One record that is kept registered, and what was logged about that."""

    def __init__(
        self,
        record: RankRecord,
        send: Callable[[Message], None],
        log: BoundLogger,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._record = record
        self._send = send
        self._log = log
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._was_registered = False
        self._is_answered = True
        self._is_silent = False
        self._dispute: tuple[PeerId, bool] | None = None
        self._refusal: str | None = None

    def send(self) -> None:
        """Register, or renew the lease."""
        self._send(Register(record=self._record, lease_s=LEASE_S))

    def renew(self) -> None:
        """Register now and then."""
        if not self._is_answered and not self._is_silent:
            self._is_silent = True
            self._log.warning("registry_silent", was_registered=self._was_registered)
        self._is_answered = False
        self.send()
        self._timer = self._loop.call_later(LEASE_S / RENEWALS_PER_LEASE, self.renew)

    def stop(self) -> None:
        """Register no more."""
        if self._timer is not None:
            self._timer.cancel()

    def confirm(self, peer: PeerId) -> None:
        """Take in that the registry has noted a rank."""
        if peer != self._record.peer:
            return
        self._note_answer()
        if not self._was_registered:
            self._was_registered = True
            self._log.info("registered")
        if self._dispute is not None and self._dispute[1]:  # the other process has ended, or was withdrawn
            self._dispute = None
            self._log.info("registered_after_conflict")

    def dispute(self, conflict: RegistrationConflict) -> None:
        """Log that another living process claims to be the same rank; once for each."""
        if conflict.peer != self._record.peer:
            return
        self._note_answer()
        dispute = (conflict.other, conflict.refused)
        if dispute != self._dispute:
            self._dispute = dispute
            self._log.error(
                "registration_conflict",
                other=str(conflict.other),
                other_endpoint=conflict.other_endpoint,
                refused=conflict.refused,
            )

    def refuse(self, refuse: Refuse) -> None:
        """Log that who answers there does so for another instance, or for none; once for each reason."""
        if refuse.to not in (None, self._record.peer):
            return
        self._note_answer()
        if refuse.detail != self._refusal:
            self._refusal = refuse.detail
            self._log.error("registration_refused", other=str(refuse.peer), detail=refuse.detail)

    def _note_answer(self) -> None:
        self._is_answered = True
        if self._is_silent:
            self._is_silent = False
            if self._was_registered:
                self._log.info("registry_back")
