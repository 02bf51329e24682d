"""What must hold for a core after every event. Checked by tests; too slow to check in service."""

from kvflow.errors import KvflowError
from kvflow.state.core import Core
from kvflow.state.quarantine import Footprint
from kvflow.state.receivers import Receivers
from kvflow.state.senders import Senders
from kvflow.state.tables import Memory, Outcome, TransferState

__all__ = ["InvariantBroken", "check_invariants"]


class InvariantBroken(KvflowError):
    """The core contradicts itself."""


def check_invariants(core: Core) -> None:
    """Look at everything a core remembers.

    Raises:
        InvariantBroken: Naming what does not hold.
    """
    _check_senders(core.senders)
    _check_receivers(core.receivers)
    _check_quarantine(core)


def _require(condition: bool, message: str, **values: object) -> None:
    if not condition:
        raise InvariantBroken(message, **values)


def _check_facts(state: TransferState, **values: object) -> None:
    """Success means that the memory is safe, and only what is decided can drain or be in quarantine."""
    if state.outcome is Outcome.SUCCESS:
        _require(state.memory is Memory.SAFE, "success without safe memory", memory=state.memory, **values)
    if state.outcome is Outcome.PENDING:
        is_calm = state.memory in (Memory.HELD, Memory.SAFE)
        _require(is_calm, "pending without held or written memory", memory=state.memory, **values)


def _check_quarantine(core: Core) -> None:
    """What is held back is counted, once each."""
    senders, receivers = core.senders.rooms.values(), core.receivers.receivers.values()
    held = [sender.footprint for sender in senders if sender.state.memory is Memory.QUARANTINED]
    held += [receiver.opened.footprint for receiver in receivers if receiver.state.memory is Memory.QUARANTINED]
    total = Footprint(sum(item.num_pages for item in held), sum(item.num_bytes for item in held))
    _require(core.quarantine.total == total, "quarantine is miscounted", counted=core.quarantine.total, is_=total)


def _check_senders(senders: Senders) -> None:
    waiting, counted = len(senders.waiting.everybody()), len(senders.waiting)
    _require(waiting == counted, "waiting grants are miscounted", counted=counted, is_=waiting)
    for delivery in senders.unproved:
        _require(not delivery.is_proved, "delivery is proved but not forgotten", delivery=delivery.id)
    for room, sender in senders.rooms.items():
        _check_facts(sender.state, room=room)
        is_over = sender.state.is_safe and not sender.state.is_pending
        _require(not is_over, "room is over but not forgotten", room=room)
        _require(room not in senders.waiting, "grants wait for an open room", room=room)
        for delivery in sender.deliveries.values():
            _check_facts(delivery.state, delivery=delivery.id)
            if delivery.state.is_safe:
                _require(not delivery.has_posts, "safe delivery with a running post", delivery=delivery.id)
            if not sender.state.is_pending:
                _require(not delivery.state.is_pending, "room has ended, delivery has not", delivery=delivery.id)


def _check_receivers(receivers: Receivers) -> None:
    for generation, receiver in receivers.receivers.items():
        _check_facts(receiver.state, generation=generation)
        _require(not receiver.state.is_safe, "room is over but not forgotten", generation=generation)
        if receiver.state.memory in (Memory.HELD, Memory.DRAINING):
            owner = receivers.rooms.get(receiver.room)
            _require(owner == generation, "room does not lead to its transfer", generation=generation, found=owner)
    for room, generation in receivers.rooms.items():
        _require(generation in receivers.receivers, "room leads nowhere", room=room, generation=generation)
