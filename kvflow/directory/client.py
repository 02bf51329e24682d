"""A rank's connection to the registry."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from kvflow.control.reading import OrderedReading, ReadingContext
from kvflow.errors import RemoteProtocolError, Unreachable
from kvflow.gate.rates import RECORDS_BYTES, Budgets
from kvflow.observe.logs import BoundLogger
from kvflow.ports import OnObstacle, ignore
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

__all__ = ["RegistryClient"]

LEASE_S: Final = 9.0
"""How long the registry keeps a record without a renewal."""

RENEWALS_PER_LEASE: Final = 3

CONNECTED: Final = "it is connected, but does not answer"

LOOKUP_S: Final = 0.8
"""How long the registry may wait for an instance to be complete before it answers with the ranks known."""

Answer = Registered | RegistrationConflict | Refuse
ANSWERS: Final[Reader[Answer | Records]] = Reader(Answer)
ANSWERS_AND_RECORDS: Final[Reader[Answer | Records]] = Reader(Answer | Records)

OnRecords = Callable[[str | None, tuple[RankRecord, ...], int], None]


class RegistryClient:
    """Registers one rank and looks up instances, with callbacks on the event loop.

    Args:
        endpoint: Address of the registry; it need not be up yet.
        log: Reports a silent registry, and other processes that claim to be this rank.
        context: Sockets, clock, and the means to parse long answers.
        on_records: Takes the instance's name, its records by engine rank, and the lookup's number. If None, Records are
            rejected.
        keys: Keys to use, and those of which the registry must have one; None for a plain connection.
        on_obstacle: Takes the reason why there is no answer, and whether this process lacks a resource.

    Raises:
        ConfigError: The address is malformed.
        Shortage: This process has no descriptors left.
    """

    def __init__(
        self,
        endpoint: str,
        log: BoundLogger,
        context: ReadingContext,
        on_records: OnRecords | None = None,
        *,
        keys: ClientKeys | None = None,
        on_obstacle: OnObstacle = ignore,
    ) -> None:
        self._endpoint = endpoint
        self._log = log.bind(registry=endpoint)
        self._context = context
        self._on_records = on_records
        self._loop = asyncio.get_running_loop()
        self._registration: _Registration | None = None
        self._on_obstacle = on_obstacle
        self._is_closed = False
        self._obstacle: str | None = None
        self._reader = ANSWERS if on_records is None else ANSWERS_AND_RECORDS
        self._reading = OrderedReading(self._reader, context, lambda _: "", self._handle_answer, self._reject)
        self._budgets = Budgets()
        self._connection = context.ports.control.connect(
            endpoint,
            self._on_message,
            self._on_lost,
            keys=keys,
            on_refused=self._refused,
            on_obstacle=self._take_obstacle,
        )

    def look_up(self, instance: str | None, number: int = 0) -> None:
        """Send a Lookup for the ranks of an instance, once; without a name, of that of the rank that answers.

        The registry answers when the instance is complete, or after 0.8 s with the ranks known. It repeats this number,
        or a higher one sent in the meantime. A lost Lookup is not repeated: call this again.
        """
        self._send(Lookup(instance=instance, timeout_s=LOOKUP_S, number=number))

    def publish(self, record: RankRecord) -> None:
        """Keep a rank registered until `withdraw`. If the registry is silent, log that and keep trying."""
        if self._registration is not None:
            self._registration.stop()
        self._registration = _Registration(record, self._send, self._log, self._loop, lambda: self._obstacle)
        self._registration.renew()

    def withdraw(self, peer: PeerId) -> None:
        """Stop renewing a registration, and send Unregister."""
        if self._registration is not None:
            self._registration.stop()
            self._registration = None
        self._send(Unregister(peer=peer))

    def renew(self, keys: ClientKeys | None) -> None:
        """Use these keys from now on."""
        if keys is not None:
            self._connection.renew(keys)

    def close(self) -> None:
        """Close the connection. No callback is called any more. May be called twice."""
        self._is_closed = True
        if self._registration is not None:
            self._registration.stop()
            self._registration = None
        self._connection.close()

    def _send(self, message: Message) -> None:
        with suppress(Unreachable):  # the missing answer is handled as silence
            self._connection.send(encode(message))

    def _take_obstacle(self, detail: str, is_short: bool) -> None:
        self._obstacle = detail
        self._on_obstacle(detail or CONNECTED, is_short)

    def _refused(self, detail: str) -> None:
        self._obstacle = detail
        self._count("registry_refused", detail)
        self._on_obstacle(detail, False)

    def _on_lost(self) -> None:
        """Register immediately, so that a restarted registry has the record as soon as it is back."""
        if self._registration is not None:
            self._registration.send()

    def _count(self, kind: str, detail: str, peer: PeerId | None = None) -> None:
        self._context.anomalies.count(kind, peer, registry=self._endpoint, detail=detail)

    def _on_message(self, frames: Sequence[bytes]) -> None:
        try:
            unread = self._reader.identify_message(frames)
        except RemoteProtocolError as error:
            self._count("message_rejected", str(error))
            return
        now = self._context.ports.now()
        is_within = not unread.is_long or self._budgets.spend(RECORDS_BYTES, "", now, len(unread.data))
        if not (is_within and self._reading.parse_message(b"", unread)):  # it is requested again
            self._context.anomalies.postpone("records_over_budget", registry=self._endpoint, num_bytes=len(unread.data))

    def _reject(self, _connection: bytes, error: RemoteProtocolError, _num_bytes: int) -> None:
        self._count("message_rejected", str(error))

    def _handle_answer(self, _connection: bytes, message: Answer | Records, _num_bytes: int) -> None:
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
    """Keeps one record registered, and logs changes of its state."""

    def __init__(
        self,
        record: RankRecord,
        send: Callable[[Message], None],
        log: BoundLogger,
        loop: asyncio.AbstractEventLoop,
        obstacle: Callable[[], str | None],
    ) -> None:
        self._obstacle = obstacle
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
        """Send a Register, which also renews the lease."""
        self._send(Register(record=self._record, lease_s=LEASE_S))

    def renew(self) -> None:
        """Register now and periodically. Log if the previous Register was not answered."""
        if not self._is_answered and not self._is_silent:
            self._is_silent = True
            obstacle = self._obstacle()
            detail = "no answer" if obstacle is None else obstacle or CONNECTED
            self._log.warning("registry_silent", was_registered=self._was_registered, detail=detail)
        self._is_answered = False
        self.send()
        self._timer = self._loop.call_later(LEASE_S / RENEWALS_PER_LEASE, self.renew)

    def stop(self) -> None:
        """Stop renewing the registration."""
        if self._timer is not None:
            self._timer.cancel()

    def confirm(self, peer: PeerId) -> None:
        """Handle a Registered."""
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
        """Handle a RegistrationConflict; log it unless it repeats the last one."""
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
        """Handle a Refuse; log it unless it repeats the last reason."""
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
