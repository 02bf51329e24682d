"""All rooms of one decode rank. Pure."""

from collections.abc import Mapping
from typing import assert_never

from kvflow.errors import CapacityExceeded, FailureReason, LocalProtocolError, PagesInUse, Stage
from kvflow.room import RoomId
from kvflow.state.by_peer import ByPeer
from kvflow.state.decode.deadlines import (
    DecodeTimer,
    ReceiveDeadline,
    ReceiveStalled,
    ReceiveTimer,
    ReceiveUnanswered,
    ReceiveUndrained,
)
from kvflow.state.decode.ended import Ended, EndedTransfers
from kvflow.state.decode.held import HeldPages
from kvflow.state.decode.room import PAGES_INLINE_IN_ALL, ReceiveContext, Room
from kvflow.state.effects import CountAnomaly, DecodeEffect, SendMessage, WaitForLanding
from kvflow.state.events import ConnectedRank, Landed, ReceiveGranted, ReceiveOpened, Scattered
from kvflow.state.quarantine import Quarantine
from kvflow.state.settings import DecodeSettings
from kvflow.state.tables import Memory, Signal
from kvflow.state.timers import Timers
from kvflow.wire.messages import (
    PAGES_INLINE,
    Drained,
    Failed,
    Failure,
    Notice,
    PagesQuery,
    PeerId,
    SlotQuery,
    SlotReleased,
)

__all__ = ["Rooms"]

MIN_TIMEOUT_S = 1e-3
"""Timeout in a grant whose time is already up, in seconds; the receiver's own deadline fires at once."""

MAX_BACKOFF = 8
"""The pause between retransmissions doubles up to this multiple of the first pause."""

GRANTS_PER_PAUSE = 500
"""With more open rooms than this, each room waits longer before it retransmits its grant. Grants are rarely lost, and
retransmitting thousands of them while prefill lets them wait costs more than the transfers."""


class Rooms:
    """The table of rooms by generation. Methods return effects.

    A room in quarantine releases its room id but stays in the table under its generation, so that a late Drained still
    finds it.

    Attributes:
        generations: Generations by room, without rooms in quarantine.
        announced: Generations of rooms that have no pages yet.
        ended: Transfers that are over, and rooms that were declined before they were opened.
        unproved: Generations of ended transfers whose pages are not safe.
    """

    def __init__(
        self, context: ReceiveContext, settings: DecodeSettings, timers: Timers[DecodeTimer], quarantine: Quarantine
    ) -> None:
        self.rooms: dict[int, Room] = {}
        self.generations: dict[RoomId, int] = {}
        self.announced: dict[int, None] = {}
        self.unproved: dict[int, None] = {}
        self._by_peer: ByPeer[int] = ByPeer()
        self._context = context
        self._timeouts = settings.timeouts
        self._limits = settings.limits
        self._timers = timers
        self._quarantine = quarantine
        self._last_generation = 0
        self.ended = EndedTransfers()
        self.held = HeldPages(settings.layout)

    # Requests from the engine ----------------------------------------------------------------------------------------

    def open(self, opened: ReceiveOpened, now: float) -> Room:
        """Record a room; the caller grants, announces or fails it next.

        Raises:
            LocalProtocolError: The room is already being received, or its generation is not new.
            PagesInUse: Another transfer holds one of the pages.
            CapacityExceeded: Too many rooms are open, or too much memory is in quarantine.
        """
        if opened.room in self.generations:
            raise LocalProtocolError(
                "this room is already being received", room=opened.room, generation=self.generations[opened.room]
            )
        if len(self.rooms) >= self._limits.transfers:
            raise CapacityExceeded("too many rooms are open", limit=self._limits.transfers, setting="limits.transfers")
        self._quarantine.check_admission()
        if opened.generation <= self._last_generation:
            raise LocalProtocolError("generation has already been used", generation=opened.generation)
        self._hold(opened.pages)
        self._last_generation = opened.generation
        room = Room(self._context, opened, now + opened.timeout_s)
        self.rooms[room.generation] = room
        self.generations[opened.room] = room.generation
        if room.is_announced:
            self.announced[room.generation] = None
        self._timers.set(ReceiveDeadline(room.generation), room.deadline)
        return room

    def take_pages(self, given: ReceiveGranted, now: float) -> tuple[Room, list[DecodeEffect]]:
        """Take the pages of an announced room; the caller grants or fails it next. Errors are as in `open`."""
        if given.generation not in self.announced:
            raise LocalProtocolError("transfer is not waiting for pages", room=given.room, generation=given.generation)
        self._quarantine.check_admission()
        self._hold(given.pages)
        del self.announced[given.generation]
        room = self.rooms[given.generation]
        effects = room.take_pages(given, now + given.timeout_s)
        self._timers.set(ReceiveDeadline(room.generation), room.deadline)
        return room, effects

    def connected(self, room: Room, ranks: tuple[ConnectedRank, ...], now: float) -> list[DecodeEffect]:
        """Grant a room to every rank of its instance, or announce it; it fails if it has too many pages for one."""
        num_pages = room.num_pages
        for rank in ranks:
            if num_pages > rank.max_pages:
                limit = f"limits.pending_grant_bytes of {rank.peer.rank} permits {rank.max_pages}"
                detail = f"too many pages for one transfer: {num_pages}, but {limit}"
                return self.fail(room, self._error(FailureReason.CAPACITY, detail), now)
        room.is_inline = num_pages <= PAGES_INLINE and num_pages * len(self.generations) <= PAGES_INLINE_IN_ALL
        effects = room.connected(ranks, self._time_left(room, now), now)
        for peer in room.told:
            self._by_peer.add(peer, room.generation)
        self._timers.set(ReceiveUnanswered(room.generation), now + self._pause_s(room))
        return self._follow(room, effects, now)

    def fail(self, room: Room, failure: Failure, now: float) -> list[DecodeEffect]:
        """End a room without success."""
        return self._follow(room, room.stop(Signal.FAILED, failure), now)

    def abort(self, number: RoomId, failure: Failure, now: float) -> list[DecodeEffect]:
        """End a room because its engine aborted it."""
        room = self.rooms.get(self.generations.get(number, 0))
        return self._follow(room, room.stop(Signal.ABORTED, failure), now) if room else []

    def pending(self, number: RoomId) -> Room | None:
        """Find a room that is still being received."""
        room = self.rooms.get(self.generations.get(number, 0))
        return room if room is not None and room.state.is_pending else None

    def release(self, generation: RoomId, now: float) -> list[DecodeEffect]:
        """Release the pages of a quarantined transfer without a proof.

        Raises:
            LocalProtocolError: The transfer is not in quarantine, or this rank is still writing to its pages.
        """
        room = self.rooms.get(generation) if isinstance(generation, int) else None
        if room is None or room.state.memory is not Memory.QUARANTINED:
            raise LocalProtocolError("transfer is not in quarantine", generation=generation)
        if room.is_scattering:
            raise LocalProtocolError("pages are being written from staging memory", generation=generation)
        return self._follow(room, room.apply(Signal.RELEASED), now)

    def close(self, failure: Failure, now: float) -> list[DecodeEffect]:
        """End every room."""
        effects: list[DecodeEffect] = []
        for room in list(self.rooms.values()):
            effects += self._follow(room, room.stop(Signal.ABORTED, failure), now)
        return effects

    # Messages from prefill ranks -------------------------------------------------------------------------------------

    def notice(self, notice: Notice, sender: PeerId | None, now: float, waited_s: float = 0.0) -> list[DecodeEffect]:
        """Process a notice for the transfer it names; `sender` is None if it arrived in band."""
        room = self._find(notice.room, notice.generation)
        if room is None:
            return self.ended.answer(notice.room, notice.generation, sender, "notice_of_unknown_transfer")
        before = room.tally.num_arrived
        effects = room.notice(notice, sender, now, waited_s)
        is_waiting = room.state.is_pending and not room.is_verifying
        if is_waiting and room.tally.num_arrived != before:
            self._timers.set(ReceiveStalled(room.generation), now + self._timeouts.progress_s)
        return self._follow(room, effects, now)

    def drained(self, peer: PeerId, drained: Drained, now: float) -> list[DecodeEffect]:
        """Handle a rank's promise that it will write nothing more."""
        room = self._find(drained.room, drained.generation)
        if room is None:
            is_late = drained.generation in self.ended
            return [] if is_late else [CountAnomaly("drained_of_unknown_transfer", peer, drained.room)]
        return self._follow(room, room.drained(peer, drained.failure), now)

    def in_flight(self, peer: PeerId, drained: Drained, number: int) -> list[DecodeEffect]:
        """Wait until what a rank still has in flight for a room has landed; `number` is that of the wait."""
        room = self._find(drained.room, drained.generation)
        if room is None or peer not in room.told:
            return self.ended.answer(drained.room, drained.generation, peer, "drained_of_unknown_transfer")
        return [WaitForLanding(peer, drained, number)]

    def landed(self, event: Landed) -> list[DecodeEffect]:
        """Tell a rank that nothing that it had in flight for a room can land any more; it answers with Drained."""
        room = self._find(event.room, event.generation)
        return [] if room is None else room.landed(event.peer)

    def failed(self, peer: PeerId, failed: Failed, now: float) -> list[DecodeEffect]:
        """End a room because a prefill rank reported a failure."""
        room = self._find(failed.room, failed.generation)
        if room is None or peer not in room.told:
            return self.ended.answer(failed.room, failed.generation, peer, "failed_of_unknown_transfer")
        return self._follow(room, room.failed(peer, failed.failure, is_drained=failed.drained), now)

    def answer(self, peer: PeerId, query: PagesQuery | SlotQuery) -> list[DecodeEffect]:
        """Send parts of page tables, or confirm that a slot is no longer read; slots of ended transfers never are."""
        room = self._find(query.room, query.generation)
        if isinstance(query, PagesQuery):
            return [] if room is None else room.send_pages(peer, query)
        if room is not None:
            return room.slot_query(peer, query.seq)
        if query.generation > self._last_generation:
            return [CountAnomaly("slot_query_of_unknown_transfer", peer, query.room)]
        released = SlotReleased(
            room=query.room, generation=query.generation, engine_rank=query.engine_rank, seq=query.seq
        )
        return [SendMessage(peer, released)]

    # Connection and loss of prefill ranks ----------------------------------------------------------------------------

    def peer_connected(self, rank: ConnectedRank) -> list[DecodeEffect]:
        """Ask a rank that has connected, perhaps again, for the proofs that rooms wait for."""
        return [effect for room in self._rooms_of(rank.peer) for effect in room.reconnected(rank)]

    def peer_back(self, peer: PeerId) -> list[DecodeEffect]:
        """Ask a rank that is back for the proofs that rooms wait for."""
        return [effect for room in self._rooms_of(peer) for effect in room.remind(peer)]

    def peer_lost(self, peer: PeerId, failure: Failure, now: float) -> list[DecodeEffect]:
        """Fail every room that still needs a lost rank, if only to hold its pages."""
        effects: list[DecodeEffect] = []
        for room in self._rooms_of(peer):
            effects += self._follow(room, room.lost(peer, failure), now)
        return effects

    def peer_fenced(self, peer: PeerId, failure: Failure, now: float) -> list[DecodeEffect]:
        """Record the proof that no write of a prefill incarnation can land any more."""
        effects: list[DecodeEffect] = []
        for room in self._rooms_of(peer):
            effects += self._follow(room, room.fenced(peer, failure), now)
        return effects

    def involve(self, peer: PeerId) -> bool:
        """Return whether a room, in quarantine or not, was granted or announced to a prefill rank."""
        return bool(self._rooms_of(peer))

    def await_proof_of(self, peer: PeerId) -> bool:
        """Return whether any room waits for a prefill rank to write everything, or to prove that it has stopped."""
        return any(room.awaits_proof_of(peer) for room in self._rooms_of(peer))

    def scatter_from(self, peer: PeerId) -> bool:
        """Return whether staging slots of a prefill rank are being read."""
        return any(room.scatters_from(peer) for room in self._rooms_of(peer))

    def _rooms_of(self, peer: PeerId) -> list[Room]:
        """Return the rooms, in quarantine or not, that a prefill rank was told of, and not another one since."""
        rooms = (self.rooms[generation] for generation in self._by_peer.keys_of(peer))
        return [room for room in rooms if peer in room.told]

    # Reports from the stages -----------------------------------------------------------------------------------------

    def verified(self, generation: int, failure: Failure | None, now: float) -> list[DecodeEffect]:
        """Handle the result of a digest check; the transfer may be over by now."""
        room = self.rooms.get(generation)
        return self._follow(room, room.verified(failure), now) if room else []

    def scattered(self, event: Scattered, now: float) -> list[DecodeEffect]:
        """Handle the end of a scatter; its transfer stays on record until then."""
        room = self.rooms.get(event.generation)
        if room is None:
            return [CountAnomaly("scattered_unknown_transfer", None, event.notice.room)]
        if room.state.is_pending:
            self._timers.set(ReceiveStalled(room.generation), now + self._timeouts.progress_s)
        return self._follow(room, room.scattered(event.notice, event.failure), now)

    # Timers ----------------------------------------------------------------------------------------------------------

    def expired(self, key: ReceiveTimer, now: float) -> list[DecodeEffect]:
        """Handle an expired timer."""
        match key:
            case ReceiveDeadline(generation):
                room = self.rooms[generation]
                if room.is_announced:
                    detail = f"no pages were granted within {room.opened.timeout_s} s of the announcement"
                    return self.fail(room, self._error(FailureReason.NOT_GRANTED, detail), now)
                detail = f"not complete within {room.opened.timeout_s} s"
                return self.fail(room, self._error(FailureReason.DEADLINE, detail), now)
            case ReceiveStalled(generation):
                room, detail = self.rooms[generation], f"nothing arrived for {self._timeouts.progress_s} s"
                return self.fail(room, self._error(FailureReason.STALLED, detail), now)
            case ReceiveUnanswered(generation):
                return self._retransmit(self.rooms[generation], now)
            case ReceiveUndrained(generation):
                room = self.rooms[generation]
                return self._follow(room, room.apply(Signal.IN_DOUBT), now)
            case _:
                assert_never(key)

    def _retransmit(self, room: Room, now: float) -> list[DecodeEffect]:
        effects = room.retransmit(self._time_left(room, now))
        if room.failure is not None and room.granted:  # without a connection, a quarantine would last forever
            effects += self._context.reconnect(room.opened.instance, now)
        self._timers.set(ReceiveUnanswered(room.generation), now + self._pause_s(room))
        return effects

    def _pause_s(self, room: Room) -> float:
        """Return the time until the next retransmission: longer each time, and longer if many rooms are open.

        A failed room asks for the proof that its pages are quiet, and other rooms do not slow it down.
        """
        times: float = min(2**room.num_retransmits, MAX_BACKOFF)
        if room.failure is None:
            times = max(times, len(self.rooms) / GRANTS_PER_PAUSE)
        return self._timeouts.retransmit_s * times

    def _time_left(self, room: Room, now: float) -> float:
        return max(room.deadline - now, MIN_TIMEOUT_S)

    # Rooms -----------------------------------------------------------------------------------------------------------

    def _follow(self, room: Room, effects: list[DecodeEffect], now: float) -> list[DecodeEffect]:
        """Update the timers after a step of a room, and drop the room once it is over."""
        if room.state.is_pending and not room.is_verifying:
            return effects
        generation = room.generation
        if not room.state.is_pending and not room.is_closing:
            room.is_closing = True
            room.num_retransmits = 0
            self._timers.clear(ReceiveDeadline(generation))
            if not room.state.is_safe:
                self.unproved[generation] = None
                self._timers.set(ReceiveUnanswered(generation), now + self._timeouts.retransmit_s)
            if room.failure is not None and not room.granted:
                effects = [*effects, *self._context.decline(room, room.failure, now)]
        if not room.state.is_pending or room.is_verifying:
            self._timers.clear(ReceiveStalled(generation))
        if room.state.memory is Memory.DRAINING:
            self._timers.set_once(ReceiveUndrained(generation), now + self._timeouts.drain_s)
        else:
            self._timers.clear(ReceiveUndrained(generation))
        if room.state.memory in (Memory.SAFE, Memory.QUARANTINED) and self.generations.get(room.room) == generation:
            del self.generations[room.room]
        if room.state.memory is Memory.QUARANTINED:
            self._quarantine.add_pages(generation, room.opened.footprint)
        if room.state.is_safe:
            self._quarantine.remove(generation)
            self.held.drop(room.opened.pages)
            self._timers.clear(ReceiveUnanswered(generation))
            self.ended.close(generation, Ended(room.room, room.told, room.failure))
            self.announced.pop(generation, None)
            self.unproved.pop(generation, None)
            self.rooms.pop(generation, None)
            self._by_peer.remove(generation)
        return effects

    def _hold(self, pages: Mapping[str, bytes]) -> None:
        held = self.held.hold(pages)
        if held is None:
            return
        holder = next(room for room in self.rooms.values() if held.is_in(room.opened.pages))
        raise PagesInUse(
            "another transfer may still write to this page",
            component=held.component,
            page=held.page,
            held_by=holder.room,
            memory=holder.state.memory.value,
        )

    def _find(self, number: RoomId, generation: int) -> Room | None:
        room = self.rooms.get(generation)
        return room if room is not None and room.room == number else None

    def _error(self, reason: FailureReason, detail: str) -> Failure:
        return Failure(reason, Stage.AGGREGATE, str(self._context.me.rank), detail)
