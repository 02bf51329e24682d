"""Invariants of a core, which hold after every event. Checked by tests too; too slow for production."""

from collections import Counter

import numpy as np

from kvflow.errors import KvflowError
from kvflow.geometry.pages import WIRE_PAGES
from kvflow.state.decode.core import DecodeCore
from kvflow.state.decode.deadlines import OfferOverdue
from kvflow.state.decode.room import Room as DecodeRoom
from kvflow.state.prefill.core import PrefillCore
from kvflow.state.prefill.deadlines import OfferExpired
from kvflow.state.prefill.delivery import STANDING, Delivery
from kvflow.state.prefill.room import Room as PrefillRoom
from kvflow.state.quarantine import Footprint, Quarantine
from kvflow.state.tables import QUIET, Memory, Outcome, RankState, RequestState, TransferState

__all__ = ["InvariantBroken", "check_invariants"]


class InvariantBroken(KvflowError):
    """A core contradicts itself."""


def check_invariants(core: PrefillCore | DecodeCore) -> None:
    """Check the whole state of a core.

    Raises:
        InvariantBroken: An invariant does not hold; the error names it.
    """
    if isinstance(core, PrefillCore):
        _check_prefill(core)
    else:
        _check_decode(core)


def _require(condition: bool, message: str, **values: object) -> None:
    if not condition:
        raise InvariantBroken(message, **values)


def _check_facts(state: TransferState, **values: object) -> None:
    """Check that success implies safe memory, and that a pending transfer neither drains nor is in quarantine."""
    if state.outcome is Outcome.SUCCESS:
        _require(state.memory is Memory.SAFE, "success without safe memory", memory=state.memory, **values)
    if state.outcome is Outcome.PENDING:
        is_calm = state.memory in (Memory.HELD, Memory.SAFE)
        _require(is_calm, "pending without held or written memory", memory=state.memory, **values)


def _check_quarantine(quarantine: Quarantine, held: list[Footprint]) -> None:
    """Check that all memory in quarantine is counted once."""
    total = Footprint(sum(item.num_pages for item in held), sum(item.num_bytes for item in held))
    _require(quarantine.total == total, "quarantine is miscounted", counted=quarantine.total, found=total)


def _check_prefill(core: PrefillCore) -> None:
    rooms = core.rooms
    _check_quarantine(
        core.quarantine,
        [room.footprint for room in rooms.rooms.values() if room.state.memory is Memory.QUARANTINED],
    )
    for peer, offer in core.offers._open:
        _require(peer in core.peers, "offer is open whose sender is gone", peer=peer, offer=offer)
        _require(OfferExpired(peer, offer) in core.timers, "offer is open for ever", peer=peer, offer=offer)
    _require(core.offers._shares.total == len(core.offers), "offers are miscounted", found=len(core.offers))
    counts = Counter(delivery.id.peer for delivery in rooms.unfenced)
    by_peer = {peer: len(keys) for peer, keys in rooms.unfenced._by_peer._keys.items()}
    _require(by_peer == counts, "unfenced deliveries are miscounted", counted=by_peer)
    to_gone = sum(count for peer, count in counts.items() if peer not in core.peers)
    _require(rooms.unfenced.num_to_gone == to_gone, "unfenced deliveries to disconnected ranks are miscounted")
    for delivery in rooms.unfenced:
        _require(not delivery.is_fenced, "delivery is fenced but not forgotten", delivery=delivery.id)
    for number, room in rooms.rooms.items():
        _check_facts(room.state, room=number)
        is_over = room.state.is_safe and not room.state.is_pending
        _require(not is_over, "room is over but not forgotten", room=number)
        _require(not core.requests.waiting.peers(number), "grants wait for an open room", room=number)
        _require_timers(room)
        _check_announced(core, room)
        standings = [STANDING[delivery.state.outcome, delivery.state.memory] for delivery in room.deliveries.values()]
        totals = tuple(sum(facts) for facts in zip(*standings, strict=True)) or (0, 0, 0)
        counted = (room.num_delivered, room.num_safe, room.num_quarantined)
        _require(counted == totals, "deliveries of a room are counted wrongly", room=number)
        for delivery in room.deliveries.values():
            _check_facts(delivery.state, delivery=delivery.id)
            _require_timers(delivery)
            if delivery.state.is_safe:
                _require(not delivery.posted, "safe delivery with a running post", delivery=delivery.id)
            _require(_has_tail(delivery), "a piece is under way before one that waits", delivery=delivery.id)
            if not room.state.is_pending:
                _require(not delivery.state.is_pending, "room has ended, delivery has not", delivery=delivery.id)
    if not rooms.rooms and not rooms.unfenced:
        _require(len(core.queue) == 0, "pieces wait for no room", pieces=len(core.queue))


def _require_timers(waiting: PrefillRoom | Delivery) -> None:
    """Check that the timers of a room or a delivery are up to date."""
    waits, set_for = waiting.deadlines_from(0.0).keys(), waiting.deadlines.keys()
    _require(waits == set_for, "timers are not up to date", waits=list(waits), set_for=list(set_for))


def _has_tail(delivery: Delivery) -> bool:
    """Return whether the waiting pieces come after all others, so that they can be dropped."""
    begun = [*delivery._planned, *delivery._posted, *(notice.seq for notice in delivery._written)]
    numbers = sorted(begun) + list(delivery._unposted)
    is_gapless = numbers == list(range(delivery._next_seq))
    return numbers == sorted(numbers) and (is_gapless or not delivery.state.is_pending)


def _check_announced(core: PrefillCore, room: PrefillRoom) -> None:
    """Check that only a pending room waits for announced grants, and only for those of connected ranks."""
    _require(room.state.is_pending or not room.announced, "room that has ended waits for grants", room=room.room)
    for peer in room.announced:
        _require(peer in core.peers, "grant is announced by a rank that is gone", room=room.room, peer=peer)
        _require(peer.rank not in room.deliveries, "grant is announced and there", room=room.room, peer=peer)


def _check_decode(core: DecodeCore) -> None:
    rooms = core.rooms
    _check_quarantine(
        core.quarantine,
        [room.opened.footprint for room in rooms.rooms.values() if room.state.memory is Memory.QUARANTINED],
    )
    _check_held(core)
    for offer, made in core.offers._made.items():
        _require(OfferOverdue(offer) in core.timers, "offer waits for ever", offer=offer)
        _require((made.peer is None) == (offer in core.offers.unsent), "offer is neither sent nor waiting")
        _require(made.peer is None or made.peer in core.peers, "offer waits for a rank that is gone", offer=offer)
    for generation, room in rooms.rooms.items():
        _check_facts(room.state, generation=generation)
        is_over = room.state.is_safe and not room.state.is_pending
        _require(not is_over, "room is over but not forgotten", generation=generation)
        _check_request(core, room)
        ranks, tally = room.ranks.values(), room.tally
        counts = (
            sum(progress.state is RankState.COMPLETE for progress in ranks),
            sum(progress.state in QUIET for progress in ranks),
            sum(len(progress._notices) for progress in ranks),
            sum(len(progress._scattering) for progress in ranks),
        )
        counted = (tally.num_complete, tally.num_quiet, tally.num_notices, tally.num_scattering)
        _require(counted == counts, "ranks of a room are counted wrongly", generation=generation)
        if room.state.memory in (Memory.HELD, Memory.DRAINING):
            found = rooms.generations.get(room.room)
            _require(found == generation, "room does not lead to its transfer", generation=generation, found=found)
    for room in _waiting(core):
        _require(rooms.rooms.get(room.generation) is room, "room that is over waits for a handshake", room=room.room)
    for number, generation in rooms.generations.items():
        _require(generation in rooms.rooms, "room leads nowhere", room=number, generation=generation)
    for generation in rooms.announced:
        _require(generation in rooms.rooms, "announcement of no room", generation=generation)


def _waiting(core: DecodeCore) -> list[DecodeRoom]:
    """Return all rooms that wait for their instance."""
    return [room for instance in core.instances._instances for room, *_ in instance.waiting.values()]


def _check_request(core: DecodeCore, room: DecodeRoom) -> None:
    """Check that a room waits or is served as its request says, and that an announced one needs no memory."""
    is_waiting = any(waiting is room for waiting in _waiting(core))
    if not room.state.is_pending:
        _require(not is_waiting, "room that has ended waits for a handshake", room=room.room)
        return
    is_announced = room.request is RequestState.ANNOUNCED
    must_wait = room.request is RequestState.WAITING or not room.told
    _require(is_waiting == must_wait, "pending room is neither served nor waiting", room=room.room)
    _require((room.generation in core.rooms.announced) == is_announced, "announcements are miscounted", room=room.room)
    _require(room.state.is_safe == is_announced, "memory does not begin with the pages", room=room.room)
    _require(not (is_announced and room.opened.pages), "announced room has pages", room=room.room)


def _check_held(core: DecodeCore) -> None:
    """Check that no two transfers share a page, and that exactly the pages of transfers are held."""
    held = core.rooms.held.count()
    num_pages = dict.fromkeys(held, 0)
    seen: dict[str, set[int]] = {name: set() for name in held}
    for room in core.rooms.rooms.values():
        for name, data in room.opened.pages.items():
            pages = np.frombuffer(data, WIRE_PAGES).tolist()
            seen[name].update(pages)
            num_pages[name] += len(pages)
    distinct = {name: len(pages) for name, pages in seen.items()}
    _require(distinct == num_pages, "a page is in two transfers", distinct=distinct, pages=num_pages)
    _require(held == num_pages, "pages are held for nobody, or are not held", held=held, pages=num_pages)
