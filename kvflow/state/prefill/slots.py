"""Slots of staging memory, on both sides of a packed piece. Pure.

A piece takes two slots: a *local* one, into which it is gathered, and a *remote* one in the window that its decode rank
has given to this incarnation of this rank. A local slot is free again when the write out of it has ended. A remote one
is free when the write into it has ended without leaving anything that may still land, and the decode rank has said that
it does not read it any more: by SlotReleased, or by Ack or Cancel, after which it reads nothing of that transfer that
counts.

Any of these words may be lost, so a slot that does not come back is asked for, again and again. No time and no silence
sets a slot free.
"""

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from kvflow.config import Timeouts
from kvflow.state.effects import PrefillEffect
from kvflow.state.events import DeliveryId, PostEnded
from kvflow.state.prefill.peers import DecodePeers
from kvflow.state.timers import Timers
from kvflow.wire.messages import Notice, PeerId, SlotQuery, SlotReleased, StagingWindow

__all__ = ["RemoteSlots", "SlotPool", "SlotUnreturned"]

MAX_BACKOFF = 2
"""A slot is asked for less often after the first time, but transfers may wait for it: so many times the first pause."""


class SlotPool:
    """Which slots are free, in use, or out of use until it is known what became of them."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = deque(range(num_slots))
        self._lost: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        """Slots that may be taken."""
        return len(self._free)

    @property
    def num_lost(self) -> int:
        """Slots that are out of use."""
        return len(self._lost)

    @property
    def is_whole(self) -> bool:
        """Every slot is free."""
        return len(self._free) == self.num_slots

    @property
    def may_come(self) -> bool:
        """Somebody uses a slot and will give it back."""
        return self.num_free + self.num_lost < self.num_slots

    def take(self) -> int:
        """Take a slot; there must be a free one."""
        return self._free.popleft()

    def give_back(self, slot: int) -> None:
        """Give back a slot that is in use or was lost."""
        self._lost.pop(slot, None)
        self._free.appendleft(slot)  # what was used last is taken first: its memory is there, and perhaps in a cache

    def lose(self, slot: int) -> None:
        """Take a slot that is in use out of use."""
        self._lost[slot] = None

    def find(self, slot: int) -> None:
        """Note that a slot is out of use no more, but still in use."""
        self._lost.pop(slot, None)


class SlotUnreturned(NamedTuple):
    """Timer: a slot must have come back from the decode rank."""

    delivery: DeliveryId
    seq: int


@dataclass(slots=True)
class _Use:
    """What a remote slot was posted for.

    Attributes:
        notice: Says that the bytes are there, once they are.
        is_written: They are: the write has ended well.
        has_ended: The write has ended, well or not.
        is_unread: The decode rank does not read it any more.
        num_asked: How often the slot was asked for.
    """

    slot: int
    notice: Notice
    is_written: bool = False
    has_ended: bool = False
    is_unread: bool = False
    num_asked: int = 0


class _Window:
    """The window in one incarnation of a decode rank."""

    def __init__(self, window: StagingWindow) -> None:
        self.window = window
        self.pool = SlotPool(window.num_slots)
        self.uses: dict[tuple[DeliveryId, int], _Use] = {}
        self.is_connected = True


class RemoteSlots:
    """Slots in the windows of all decode ranks.

    Args:
        peers: Through which they are asked for.
        timeouts: How long to wait until a slot is asked for.
        timers: Where to note that.
        on_change: Told whose slots to look at again: one is free, or there is one less to wait for.
    """

    def __init__(
        self,
        peers: DecodePeers,
        timeouts: Timeouts,
        timers: Timers[Hashable],
        on_change: Callable[[PeerId], None],
    ) -> None:
        self._peers = peers
        self._timeouts = timeouts
        self._timers = timers
        self._on_change = on_change
        self._windows: dict[PeerId, _Window] = {}

    def __len__(self) -> int:
        """Slots that are posted for and not known to be free."""
        return sum(len(window.uses) for window in self._windows.values())

    @property
    def num_windows(self) -> int:
        """Windows that are remembered."""
        return len(self._windows)

    @property
    def num_lost(self) -> int:
        """Slots that are out of use."""
        return sum(window.pool.num_lost for window in self._windows.values())

    def window(self, peer: PeerId) -> StagingWindow | None:
        """Where a decode rank takes packed pieces; None if it does not."""
        found = self._windows.get(peer)
        return found.window if found is not None and found.is_connected else None

    def pool(self, peer: PeerId) -> SlotPool | None:
        """Find the slots of a decode rank; None if it has none for this rank."""
        found = self._windows.get(peer)
        return found.pool if found is not None else None

    def connected(self, peer: PeerId, window: StagingWindow | None, now: float) -> None:
        """Note the window that a decode rank has given; what is not free of it from before stays so."""
        known = self._windows.get(peer)
        if known is None or (known.pool.is_whole and known.window != window):
            self._windows.pop(peer, None)
            if window is not None:
                self._windows[peer] = _Window(window)
            return
        known.is_connected = known.window == window
        for (delivery, seq), use in known.uses.items():
            if use.has_ended:
                use.num_asked = 0
                self._timers.set(SlotUnreturned(delivery, seq), now)

    def disconnected(self, peer: PeerId) -> None:
        """Note that a decode rank is not connected any more; the same incarnation may connect again."""
        known = self._windows.get(peer)
        if known is None:
            return
        known.is_connected = False
        for delivery, seq in known.uses:
            self._timers.clear(SlotUnreturned(delivery, seq))
        self._forget_if_whole(peer)

    def peer_restarted(self, peer: PeerId) -> list[PeerId]:
        """Forget earlier incarnations of a decode rank, and return them."""
        earlier = [other for other in self._windows if other.rank == peer.rank and other != peer]
        self._drop(earlier)
        return earlier

    def left(self, peer: PeerId) -> None:
        """Forget an incarnation of a decode rank that is over."""
        self._drop([peer] if peer in self._windows else [])

    def posted(self, delivery: DeliveryId, seq: int, notice: Notice) -> None:
        """Note that a staged notice's bytes are being written into its slot."""
        known = self._windows.get(delivery.peer)
        if known is not None and notice.staged is not None:
            known.uses[delivery, seq] = _Use(notice.staged.slot, notice)

    def not_posted(self, delivery: DeliveryId, seq: int) -> None:
        """Note that nothing is written into the slot of a piece after all; `give_back` follows."""
        known = self._windows.get(delivery.peer)
        if known is not None:
            known.uses.pop((delivery, seq), None)

    def give_back(self, peer: PeerId, slot: int) -> None:
        """Take a slot back that was never written into."""
        known = self._windows.get(peer)
        if known is not None:
            known.pool.give_back(slot)
            self._forget_if_whole(peer)

    def in_doubt(self, delivery: DeliveryId, seq: int) -> None:
        """Note that it cannot be told whether a write has ended; nobody need wait for its slot."""
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
        if known.is_connected and not use.is_unread:
            self._timers.set(SlotUnreturned(event.delivery, event.seq), now + self._timeouts.retransmit_s)
        self._review(event.delivery, event.seq)

    def released(self, peer: PeerId, message: SlotReleased) -> None:
        """Note that a decode rank does not read a slot any more."""
        self._unread(DeliveryId(message.room, peer, message.generation), message.seq)

    def closed(self, delivery: DeliveryId) -> None:
        """Note that a transfer is over on its decode rank, which reads none of its slots from now on."""
        known = self._windows.get(delivery.peer)
        for key in [key for key in known.uses if key[0] == delivery] if known is not None else []:
            self._unread(*key)

    def expired(self, key: SlotUnreturned, now: float) -> list[PrefillEffect]:
        """Ask for a slot that has not come back."""
        delivery, seq = key
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
        """Note that the decode rank does not read a slot any more."""
        use = self._find(delivery, seq)[1]
        if use is not None:
            use.is_unread = True
            self._review(delivery, seq)

    def _review(self, delivery: DeliveryId, seq: int) -> None:
        """Set a slot free if it is."""
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
            del self._windows[peer]

    def _find(self, delivery: DeliveryId, seq: int) -> tuple[_Window | None, _Use | None]:
        known = self._windows.get(delivery.peer)
        return known, known.uses.get((delivery, seq)) if known is not None else None

    def _drop(self, peers: list[PeerId]) -> None:
        for peer in peers:
            for delivery, seq in self._windows.pop(peer).uses:
                self._timers.clear(SlotUnreturned(delivery, seq))
