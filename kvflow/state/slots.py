"""Slots of staging memory, on both sides of a packed piece. Pure.

A piece takes two slots: a *local* one, into which it is gathered, and a *remote* one in the window that its decode rank
has given to this life of this rank. A local slot is free again when the write out of it has ended. A remote one is free
when the write into it has ended without leaving anything that may still land, and the decode rank has said that it does
not read it any more: by Unstaged, or by Received or Cancel, after which it reads nothing of that transfer that counts.

Any of these words may be lost, so a slot that does not come back is asked for, again and again. No time and no silence
sets a slot free.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from kvflow.config import Timeouts
from kvflow.state.deadlines import Deadlines
from kvflow.state.effects import Effect, OfferSlots, SendMessage
from kvflow.state.events import DeliveryId, PostSettled
from kvflow.wire.messages import Notice, PeerId, StagingWindow, Unstage, Unstaged

__all__ = ["RemoteSlots", "SlotPool", "Unreturned"]

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


class Unreturned(NamedTuple):
    """Deadline: a slot must have come back from the decode rank."""

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
    """The window in one life of a decode rank."""

    def __init__(self, window: StagingWindow) -> None:
        self.window = window
        self.pool = SlotPool(window.num_slots)
        self.uses: dict[tuple[DeliveryId, int], _Use] = {}
        self.is_connected = True


class RemoteSlots:
    """Slots in the windows of all decode ranks.

    Args:
        timeouts: How long to wait until a slot is asked for.
        deadlines: Where to note that.
    """

    def __init__(self, timeouts: Timeouts, deadlines: Deadlines[Hashable]) -> None:
        self._timeouts = timeouts
        self._deadlines = deadlines
        self._windows: dict[PeerId, _Window] = {}

    def __len__(self) -> int:
        """Slots that are posted for and not known to be free."""
        return sum(len(window.uses) for window in self._windows.values())

    @property
    def num_awaited(self) -> int:
        """Slots that decode ranks who can be reached have yet to give back."""
        return sum(len(window.uses) for window in self._windows.values() if window.is_connected)

    @property
    def num_lost(self) -> int:
        """Slots that are out of use."""
        return sum(window.pool.num_lost for window in self._windows.values())

    def window(self, peer: PeerId) -> StagingWindow | None:
        """Where a decode rank takes packed pieces; None if it does not."""
        found = self._windows.get(peer)
        return found.window if found is not None and found.is_connected else None

    def pool(self, peer: PeerId) -> SlotPool | None:
        """The slots of a decode rank; None if it has none for this rank."""
        found = self._windows.get(peer)
        return found.pool if found is not None else None

    def greeted(self, peer: PeerId, window: StagingWindow | None, now: float) -> None:
        """Note the window that a decode rank has given; what is not free of it from before stays so."""
        self._drop([other for other in self._windows if other.rank == peer.rank and other != peer])
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
                self._deadlines.set(Unreturned(delivery, seq), now)

    def left(self, peer: PeerId) -> None:
        """Note that the acquaintance with a decode rank is over; the same life may greet again."""
        known = self._windows.get(peer)
        if known is None:
            return
        known.is_connected = False
        for delivery, seq in known.uses:
            self._deadlines.clear(Unreturned(delivery, seq))
        if known.pool.is_whole:
            del self._windows[peer]

    def ended(self, peer: PeerId) -> None:
        """Forget a life of a decode rank that is over."""
        self._drop([peer] if peer in self._windows else [])

    def posted(self, delivery: DeliveryId, seq: int, notice: Notice) -> None:
        """Note that a staged notice's bytes are being written into its slot."""
        known = self._windows.get(delivery.peer)
        if known is not None and notice.staged is not None:
            known.uses[delivery, seq] = _Use(notice.staged.slot, notice)

    def doubted(self, delivery: DeliveryId, seq: int) -> list[Effect]:
        """Note that it cannot be told whether a write has ended; nobody need wait for its slot."""
        known, use = self._find(delivery, seq)
        if known is None or use is None:
            return []
        known.pool.lose(use.slot)
        return [OfferSlots(delivery.peer)]

    def settled(self, event: PostSettled, now: float) -> list[Effect]:
        """Note that a write has ended; if it lingers, its slot is lost."""
        known, use = self._find(event.delivery, event.seq)
        if known is None or use is None:
            return []
        if event.lingers:
            known.pool.lose(use.slot)
            del known.uses[event.delivery, event.seq]
            return [OfferSlots(event.delivery.peer)]
        known.pool.find(use.slot)
        use.has_ended, use.is_written = True, event.failure is None
        if known.is_connected and not use.is_unread:
            self._deadlines.set(Unreturned(event.delivery, event.seq), now + self._timeouts.repeat_s)
        return self._review(event.delivery, event.seq)

    def unstaged(self, peer: PeerId, word: Unstaged) -> list[Effect]:
        """Take a decode rank's word that it does not read a slot any more."""
        return self._unread(DeliveryId(word.room, peer, word.generation), word.seq)

    def over(self, delivery: DeliveryId) -> list[Effect]:
        """Take a decode rank's word that a transfer is over: it reads nothing of it any more that counts."""
        known = self._windows.get(delivery.peer)
        effects: list[Effect] = []
        for key in [key for key in known.uses if key[0] == delivery] if known is not None else []:
            effects += self._unread(*key)
        return effects

    def expired(self, key: Unreturned, now: float) -> list[Effect]:
        """Ask for a slot that has not come back."""
        delivery, seq = key
        use = self._find(delivery, seq)[1]
        if use is None:
            return []
        use.num_asked += 1
        pause_s = self._timeouts.repeat_s * min(use.num_asked, MAX_BACKOFF)
        self._deadlines.set(key, now + pause_s)
        word = Unstage(room=delivery.room, generation=delivery.generation, engine_rank=use.notice.engine_rank, seq=seq)
        notices = [SendMessage(delivery.peer, use.notice)] if use.is_written else []
        return [*notices, SendMessage(delivery.peer, word)]

    def _unread(self, delivery: DeliveryId, seq: int) -> list[Effect]:
        """Note that the decode rank does not read a slot any more."""
        use = self._find(delivery, seq)[1]
        if use is None:
            return []
        use.is_unread = True
        return self._review(delivery, seq)

    def _review(self, delivery: DeliveryId, seq: int) -> list[Effect]:
        """Set a slot free if it is."""
        known, use = self._find(delivery, seq)
        if known is None or use is None or not (use.has_ended and use.is_unread):
            return []
        self._deadlines.clear(Unreturned(delivery, seq))
        del known.uses[delivery, seq]
        known.pool.give_back(use.slot)
        if not known.is_connected and known.pool.is_whole:
            del self._windows[delivery.peer]
        return [OfferSlots(delivery.peer)]

    def _find(self, delivery: DeliveryId, seq: int) -> tuple[_Window | None, _Use | None]:
        known = self._windows.get(delivery.peer)
        return known, known.uses.get((delivery, seq)) if known is not None else None

    def _drop(self, peers: list[PeerId]) -> None:
        for peer in peers:
            for delivery, seq in self._windows.pop(peer).uses:
                self._deadlines.clear(Unreturned(delivery, seq))
