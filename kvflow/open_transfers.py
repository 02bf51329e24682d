"""The transfers of a rank: those that are open, and those whose pages are in quarantine."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Generic, Protocol, TypeVar

import anyio
import numpy as np
from numpy.typing import NDArray

from kvflow.errors import FailureReason, LocalProtocolError
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import WIRE_PAGES, PageTable
from kvflow.observe.logs import LOGGER, BoundLogger
from kvflow.observe.totals import TransferTotals
from kvflow.observe.trace import log_transfer
from kvflow.room import RoomId
from kvflow.state import effects as ef
from kvflow.state.quarantine import Footprint, MissingProof, ProofKind, Quarantine
from kvflow.state.tables import Memory, Outcome
from kvflow.transfer import AT_REST, Tracer, Transfer, check_room
from kvflow.wire.messages import Failure, PeerId

__all__ = ["OpenTransfers", "QuarantineRecord", "QuarantineView"]

AnyTransfer = TypeVar("AnyTransfer", bound=Transfer)


@dataclass(frozen=True, eq=False)
class QuarantineRecord:
    """A snapshot of an ended transfer whose pages may still be in use.

    Attributes:
        room: Room of the transfer.
        label: The engine's own ID for it, if it set one.
        key: Identifies the transfer within its rank; a room does not, because it may have been reused.
        pages: Pages of each component that must not be used, int32.
        num_bytes: Their size in the pools.
        since_s: How long they have been in quarantine, in seconds.
        failure: Why the transfer failed.
        missing: The missing proof of each peer that still has to provide one.
    """

    room: RoomId
    label: str | None
    key: RoomId
    pages: Mapping[str, NDArray[np.int32]]
    num_bytes: int
    since_s: float
    failure: Failure | None
    missing: tuple[MissingProof, ...]

    def __str__(self) -> str:
        pages = ", ".join(f"{len(pages)} of {name}" for name, pages in self.pages.items())
        proofs = "; ".join(proof.detail for proof in self.missing)
        return f"room {self.room}: pages {pages} ({self.num_bytes} bytes) for {self.since_s:.1f} s: {proofs}"


class NoteIncident(Protocol):
    """Notes that something has gone wrong, see `kvflow.incidents`."""

    def __call__(self, text: str, room: RoomId | None = None, missing: tuple[str, ...] = (), /) -> None:
        """Note it, with the room and the missing proofs."""


ORDERLY: Final = (FailureReason.ABORTED, FailureReason.PEER_CLOSED)
"""How a transfer ends without success if nothing has gone wrong: an engine gave it up, or a rank is closing."""


class QuarantineView(Protocol):
    """What a core knows about the pages of transfers."""

    quarantine: Quarantine

    def missing_proofs(self, key: Any, /) -> Sequence[MissingProof]:
        """Return the missing proofs for a transfer's pages."""

    def pages_of(self, key: Any, /) -> Mapping[str, bytes]:
        """Return the pages of a transfer as `WIRE_PAGES`, by component."""

    def peers_of(self, key: Any, /) -> Sequence[PeerId]:
        """Return the ranks at the other end of a transfer, as far as they are known."""


class OpenTransfers(Generic[AnyTransfer]):
    """The transfers of a rank by their keys, until nothing more can happen to them. Used on one event loop.

    Attributes:
        by_key: The transfers.
        num_unsettled: How many have no outcome yet, or pages that are neither safe nor in quarantine.
        takes_proofs: False once the core reports no more.
        totals: What the transfers so far add up to.
        tracer: Makes spans of them.
        core: Set it before a transfer is reported.
        note_incident: Called with what has gone wrong, the room, and the missing proofs.
    """

    core: QuarantineView
    note_incident: NoteIncident

    def __init__(self, layout: KVLayout, log: BoundLogger, tracer: Tracer | None = None) -> None:
        self.tracer = tracer
        self.by_key: dict[RoomId, AnyTransfer] = {}
        self.num_unsettled = 0
        self.totals = TransferTotals()
        self._page_bytes = {component.name: component.page_bytes for component in layout.components}
        self.takes_proofs = True
        self._log = log
        self._settled = anyio.Event()

    def add(self, key: RoomId, transfer: AnyTransfer) -> AnyTransfer | None:
        """Add a transfer, and return the one that had its key."""
        before = self.by_key.get(key)
        self.by_key[key] = transfer
        self.num_unsettled += 1
        if self.tracer is not None:
            self.tracer.begin_span(transfer)
        return before

    def remove_refused(self, key: RoomId, transfer: AnyTransfer, before: AnyTransfer | None) -> None:
        """Remove a transfer that the core has refused; `before` has its key again."""
        transfer._mark_refused()
        if self.tracer is not None:
            self.tracer.end_span(transfer)
        if self.takes_proofs:
            self.num_unsettled -= 1
        del self.by_key[key]
        if before is not None:
            self.by_key[key] = before

    def report(self, key: RoomId, effect: ef.ReportSender | ef.ReportReceiver) -> None:
        """Report the state of a transfer to the engine, and forget the transfer once nothing more can follow."""
        transfer = self.by_key.get(key)
        if transfer is None:
            return
        was_pending, before = transfer.outcome is Outcome.PENDING, transfer.memory
        transfer._report(effect.outcome, effect.memory, effect.failure)
        is_over = effect.outcome is not Outcome.PENDING
        if was_pending and is_over:
            self.totals.ended[effect.outcome, None if effect.failure is None else effect.failure.reason] += 1
            if self.tracer is not None:
                self.tracer.end_span(transfer)
            if LOGGER.isEnabledFor(logging.WARNING if effect.failure else logging.DEBUG):
                log_transfer(self._log, transfer._log_line())
            if effect.failure is not None and effect.failure.reason not in ORDERLY:
                self.note_incident(f"{effect.failure.reason.value}: {effect.failure.detail}", transfer.room)
        if (effect.memory is Memory.QUARANTINED) is not (before is Memory.QUARANTINED):
            self._log_quarantine(key, transfer)
        if effect.memory is Memory.SAFE and is_over:
            del self.by_key[key]
        if is_over and effect.memory in AT_REST and (was_pending or before not in AT_REST):
            self.num_unsettled -= 1
            if not self.num_unsettled:
                self._settled.set()

    def fail(self, failure: Failure) -> None:
        """Fail every open transfer. Pages in use can no longer be proved safe."""
        self.takes_proofs = False
        self.note_incident(f"{failure.reason.value}: {failure.detail}")
        for transfer in list(self.by_key.values()):
            outcome = transfer.outcome
            was_pending = outcome is Outcome.PENDING
            if was_pending:
                outcome = Outcome.FAILED
                self.totals.ended[outcome, failure.reason] += 1
            memory = Memory.SAFE if transfer.memory is Memory.SAFE else Memory.QUARANTINED
            transfer._report(outcome, memory, transfer.failure or failure)
            if was_pending and self.tracer is not None:
                self.tracer.end_span(transfer)
        self.num_unsettled = 0
        self._settled.set()

    def end_proofs(self) -> None:
        """Record that no further proof will arrive, because the rank is closed."""
        self.takes_proofs = False
        for transfer in self.by_key.values():
            transfer._mark_rank_closed()

    def release(self, key: RoomId) -> None:
        """Report the pages of a transfer as safe, and forget it."""
        transfer = self.by_key.pop(key)
        transfer._report(transfer.outcome, Memory.SAFE, transfer.failure)

    async def wait_until_settled(self, timeout_s: float) -> None:
        """Wait until every transfer has an outcome, with its pages safe or in quarantine, or until the timeout."""
        with anyio.move_on_after(timeout_s):
            while self.num_unsettled:
                if self._settled.is_set():
                    self._settled = anyio.Event()
                await self._settled.wait()

    def footprint(self, tables: Mapping[str, PageTable]) -> Footprint:
        """Return the number of pages and bytes that page tables occupy in the pools."""
        num_pages = num_bytes = 0
        for name, table in tables.items():
            num_pages += len(table.pages)
            num_bytes += len(table.pages) * self._page_bytes[name]
        return Footprint(num_pages, num_bytes)

    @property
    def oldest_quarantine_s(self) -> float:
        """How long the oldest quarantine has lasted, in seconds; 0 if nothing is in quarantine."""
        return max((transfer._quarantined_s for transfer in self.by_key.values()), default=0.0)

    @property
    def num_quarantined(self) -> int:
        """How many transfers are in quarantine."""
        return sum(transfer._is_quarantined for transfer in self.by_key.values())

    def oldest(self, limit: int) -> Iterable[tuple[RoomId, AnyTransfer]]:
        """Return the first of all transfers, in the order in which they were opened, with their keys."""
        return islice(self.by_key.items(), limit)

    def quarantined(self, limit: int | None = None) -> list[QuarantineRecord]:
        """List the transfers in quarantine, or the first of them, in the order in which they were opened."""
        found = ((key, transfer) for key, transfer in self.by_key.items() if transfer._is_quarantined)
        return [self._record_of(key, transfer) for key, transfer in islice(found, limit)]

    def find_quarantined(self, which: RoomId | QuarantineRecord, because: str | None = None) -> list[RoomId]:
        """Return the keys of a room's transfers in quarantine, or of one record's; raise LocalProtocolError if none."""
        room = which.room if isinstance(which, QuarantineRecord) else check_room(which)
        found = {key: it for key, it in self.by_key.items() if it._is_quarantined and it.room == room}
        if isinstance(which, QuarantineRecord):
            found = {key: it for key, it in found.items() if key == which.key}
        if not found:
            raise LocalProtocolError("room is not in quarantine", room=room)
        for transfer in found.values():
            values = {"failure": transfer.failure} | ({} if because is None else {"because": because})
            self._log.warning("quarantine_released", room=transfer.room, **values)
        return list(found)

    def _record_of(self, key: RoomId, transfer: AnyTransfer) -> QuarantineRecord:
        pages = {
            name: np.frombuffer(data, WIRE_PAGES).astype(np.int32) for name, data in self.core.pages_of(key).items()
        }
        return QuarantineRecord(
            room=transfer.room,
            label=transfer.label,
            key=key,
            pages=pages,
            num_bytes=sum(len(indices) * self._page_bytes[name] for name, indices in pages.items()),
            since_s=transfer._quarantined_s,
            failure=transfer.failure,
            missing=tuple(
                self.core.missing_proofs(key) if self.takes_proofs else [MissingProof("", "", ProofKind.BROKEN)]
            ),
        )

    def _log_quarantine(self, key: RoomId, transfer: AnyTransfer) -> None:
        """Log that the pages of a transfer have entered the quarantine, or left it."""
        if not transfer._is_quarantined:
            self._log.info("quarantine_left", room=transfer.room, quarantined=len(self.core.quarantine))
            return
        record = self._record_of(key, transfer)
        self._log.warning(
            "pages_quarantined",
            room=record.room,
            pages={name: len(pages) for name, pages in record.pages.items()},
            num_bytes=record.num_bytes,
            missing=[proof.detail for proof in record.missing],
            quarantined=len(self.core.quarantine),
        )
        self.note_incident("pages in quarantine", record.room, tuple(proof.detail for proof in record.missing))
