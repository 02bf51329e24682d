"""Slots of staging memory, on both sides of a packed piece. Pure.

A piece takes two slots: a *local* one, which it is gathered into, and a *remote* one in the window that its decode rank
has assigned to this incarnation of this rank. A local slot is free again when the write from it has ended. A remote
slot is free when the write into it has ended with nothing left to land, and the decode rank has confirmed that it no
longer reads the slot: with SlotReleased, or with Ack or Cancel, after which it ignores what it reads for that transfer.

Any of these messages may be lost, so this rank queries slots that are not returned, repeatedly. No timeout frees a
slot.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from kvflow.config import Timeouts
from kvflow.state.by_peer import Incarnations
from kvflow.state.effects import PrefillEffect
from kvflow.state.events import DeliveryId, PostEnded
from kvflow.state.prefill.deadlines import PrefillTimer, SlotUnreturned
from kvflow.state.prefill.peers import DecodePeers
from kvflow.state.timers import Timers
from kvflow.wire.messages import Notice, PeerId, SlotQuery, SlotReleased, StagingWindow

__all__ = ["RemoteSlots", "SlotPool", "SlotUnreturned"]

MAX_BACKOFF = 2
"""The pause between queries for a slot grows to this multiple of the first pause, and no further, because transfers may
wait for the slot."""


class SlotPool:
    """Slots that are free, in use, or lost until their state is known."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = deque(range(num_slots))
        self._lost: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    @property
    def num_lost(self) -> int:
        """Number of lost slots."""
        return len(self._lost)

    @property
    def is_whole(self) -> bool:
        """Whether every slot is free."""
        return len(self._free) == self.num_slots

    @property
    def may_come(self) -> bool:
        """Whether a slot is in use and will be returned."""
        return self.num_free + self.num_lost < self.num_slots

    def take_slot(self) -> int:
        """Take a free slot; there must be one."""
        return self._free.popleft()

    def give_back(self, slot: int) -> None:
        """Return a slot that is in use or was lost."""
        self._lost.pop(slot, None)
        self._free.appendleft(slot)  # reuse the last slot first: its memory is mapped, and may be cached

    def lose(self, slot: int) -> None:
        """Mark a slot in use as lost."""
        self._lost[slot] = None

    def find(self, slot: int) -> None:
        """Mark a slot as no longer lost, but still in use."""
        self._lost.pop(slot, None)


@dataclass(slots=True)
class _Use:
    """The use of a remote slot by a post, whose notice reports the bytes once they are written.

    The write `has_ended`, successfully if it `is_written`; if it `is_unread`, the decode rank no longer reads the slot.
    """

    slot: int
    notice: Notice
    is_written: bool = False
    has_ended: bool = False
    is_unread: bool = False
    num_asked: int = 0


class _Window:
    """This rank's window in one incarnation of a decode rank."""

    def __init__(self, window: StagingWindow) -> None:
        self.window = window
        self.pool = SlotPool(window.num_slots)
        self.uses: dict[tuple[DeliveryId, int], _Use] = {}
        self.is_connected = True


class RemoteSlots:
    """Slots in the windows of all decode ranks; `on_change` is called with one whose slot became free or lost."""

    def __init__(
        self,
        peers: DecodePeers,
        timeouts: Timeouts,
        timers: Timers[PrefillTimer],
        on_change: Callable[[PeerId], None],
    ) -> None:
        self._peers = peers
        self._timeouts = timeouts
        self._timers = timers
        self._on_change = on_change
        self._windows: dict[PeerId, _Window] = {}
        self._incarnations = Incarnations()

    def __len__(self) -> int:
        """Return the number of slots that were posted to and are not known to be free."""
        return sum(len(window.uses) for window in self._windows.values())

    @property
    def num_lost(self) -> int:
        """Number of lost slots."""
        return sum(window.pool.num_lost for window in self._windows.values())

    def pool(self, peer: PeerId) -> SlotPool | None:
        """Return the slots of this rank's window in a connected decode rank; None if there is none."""
        found = self._windows.get(peer)
        return found.pool if found is not None and found.is_connected else None

    def connected(self, peer: PeerId, window: StagingWindow | None, now: float) -> None:
        """Record the window of a decode rank that has connected; slots still in use stay in use."""
        known = self._windows.get(peer)
        if known is None or (known.pool.is_whole and known.window != window):
            self._drop([peer])
            if window is not None:
                self._windows[peer] = _Window(window)
                self._incarnations.add(peer)
            return
        known.is_connected = known.window == window
        for (delivery, seq), use in known.uses.items():
            if use.has_ended:
                use.num_asked = 0
                self._timers.set(SlotUnreturned(delivery, seq), now)

    def disconnected(self, peer: PeerId) -> None:
        """Note that a decode rank has disconnected; the same incarnation may reconnect."""
        known = self._windows.get(peer)
        if known is None:
            return
        known.is_connected = False
        for delivery, seq in known.uses:
            self._timers.clear(SlotUnreturned(delivery, seq))
        self._forget_if_whole(peer)

    def peer_restarted(self, peer: PeerId) -> list[PeerId]:
        """Forget earlier incarnations of a decode rank, and return them."""
        earlier = self._incarnations.others(peer)
        self._drop(earlier)
        return earlier

    def left(self, peer: PeerId) -> None:
        """Forget a terminated incarnation of a decode rank."""
        self._drop([peer])

    def posted(self, delivery: DeliveryId, seq: int, notice: Notice) -> None:
        """Note that the bytes of a staged notice are being written into its slot."""
        known = self._windows.get(delivery.peer)
        if known is not None and notice.staged is not None:
            known.uses[delivery, seq] = _Use(notice.staged.slot, notice)

    def not_posted(self, delivery: DeliveryId, seq: int) -> None:
        """Note that nothing was written into the slot of a piece after all; `give_back` follows."""
        known = self._windows.get(delivery.peer)
        if known is not None:
            known.uses.pop((delivery, seq), None)

    def give_back(self, peer: PeerId, slot: int) -> None:
        """Return a slot that was never written into."""
        known = self._windows.get(peer)
        if known is not None:
            known.pool.give_back(slot)
            self._forget_if_whole(peer)

    def in_doubt(self, delivery: DeliveryId, seq: int) -> None:
        """Mark a slot as lost, because the transport cannot tell whether the write into it has ended."""
        known, use = self._find(delivery, seq)
        if known is not None and use is not None:
            known.pool.lose(use.slot)
            self._on_change(delivery.peer)

    def ended(self, event: PostEnded, now: float) -> None:
        """Note that a write has ended; if it lingers, its slot is lost."""
        known, use = self._find(event.delivery, event.seq)
        if known is None or use is None:
            return
        if event.lingers:
            known.pool.lose(use.slot)
            del known.uses[event.delivery, event.seq]
            self._on_change(event.delivery.peer)
            return
        known.pool.find(use.slot)
        use.has_ended, use.is_written = True, event.failure is None
        use.notice = replace(use.notice, stamps=event.stamps)
        if known.is_connected and not use.is_unread:
            self._timers.set(SlotUnreturned(event.delivery, event.seq), now + self._timeouts.retransmit_s)
        self._review(event.delivery, event.seq)

    def released(self, peer: PeerId, message: SlotReleased) -> None:
        """Note that a decode rank no longer reads a slot."""
        self._unread(DeliveryId(message.room, peer, message.generation), message.seq)

    def closed(self, delivery: DeliveryId) -> None:
        """Note that a transfer is over on its decode rank, which no longer reads its slots."""
        known = self._windows.get(delivery.peer)
        for key in [key for key in known.uses if key[0] == delivery] if known is not None else []:
            self._unread(*key)

    def expired(self, key: SlotUnreturned, now: float) -> list[PrefillEffect]:
        """Query a slot that has not been returned."""
        delivery, seq = key.delivery, key.seq
        use = self._find(delivery, seq)[1]
        if use is None:
            return []
        use.num_asked += 1
        self._timers.set(key, now + self._timeouts.retransmit_s * min(use.num_asked, MAX_BACKOFF))
        query = SlotQuery(
            room=delivery.room, generation=delivery.generation, engine_rank=use.notice.engine_rank, seq=seq
        )
        notice = self._peers.send(delivery.peer, use.notice) if use.is_written else []
        return [*notice, *self._peers.send(delivery.peer, query)]

    def _unread(self, delivery: DeliveryId, seq: int) -> None:
        """Note that the decode rank no longer reads a slot."""
        use = self._find(delivery, seq)[1]
        if use is not None:
            use.is_unread = True
            self._review(delivery, seq)

    def _review(self, delivery: DeliveryId, seq: int) -> None:
        """Free a slot if its write has ended and it is no longer read."""
        known, use = self._find(delivery, seq)
        if known is None or use is None or not (use.has_ended and use.is_unread):
            return
        self._timers.clear(SlotUnreturned(delivery, seq))
        del known.uses[delivery, seq]
        known.pool.give_back(use.slot)
        self._forget_if_whole(delivery.peer)
        self._on_change(delivery.peer)

    def _forget_if_whole(self, peer: PeerId) -> None:
        known = self._windows[peer]
        if not known.is_connected and known.pool.is_whole:
            self._drop([peer])

    def _find(self, delivery: DeliveryId, seq: int) -> tuple[_Window | None, _Use | None]:
        known = self._windows.get(delivery.peer)
        return known, known.uses.get((delivery, seq)) if known is not None else None

    def _drop(self, peers: list[PeerId]) -> None:
        for peer in peers:
            known = self._windows.pop(peer, None)
            if known is not None:
                self._incarnations.remove(peer)
                for delivery, seq in known.uses:
                    self._timers.clear(SlotUnreturned(delivery, seq))
