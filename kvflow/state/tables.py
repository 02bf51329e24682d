"""Every state and every transition of kvflow, as data. Nothing outside this file decides what may follow what.

Theory of operation
===================

A transfer has two facts, and they are kept apart on purpose.

*Outcome*: will the engine get what it asked for? It is decided once and never changes again.

*Memory*: can somebody still touch the pages? A writer that was told to stop may have bytes on their way, so a failed
transfer is not a finished one. Pages start HELD. Success makes them SAFE, because success means that every write has
completed. Any other end makes them DRAINING: everybody who could write was told to stop, and each must prove that it
has. All proofs make them SAFE; proofs that do not come in time make them QUARANTINED, and only a late proof makes those
SAFE, or the word of an operator who takes the risk. Time alone never does.

Both ends of a transfer use the same two tables. The receiver's pages are destinations, and the proofs come from the
prefill ranks. The sender's pages are sources, and the proofs come from its own transport: they are SAFE as soon as its
writes have ended, while the outcome stays PENDING until the receiver says that it has everything.

A receiver also follows each prefill rank that owes it bytes (`RANK`), keyed by `engine_rank`. The transfer is
complete when every rank is COMPLETE and what arrived has the digests that were asked for, if any. It is quiet when
every rank is COMPLETE or DRAINED and nobody works out digests of its pages any more.

A rank follows each peer (`PEER`): one life of one rank at the other end, from the handshake to its loss. A `BREAKER`
keeps it from asking again and again those who fail again and again.

Each table is total: a pair that changes nothing is written down as such, so that nothing is decided by omission.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = [
    "BREAKER",
    "MEMORY",
    "OUTCOME",
    "PEER",
    "RANK",
    "BreakerSignal",
    "BreakerState",
    "Memory",
    "Outcome",
    "PeerSignal",
    "PeerState",
    "RankSignal",
    "RankState",
    "Signal",
    "TransferState",
]


class Signal(str, enum.Enum):
    """What can happen to a transfer as a whole."""

    WRITTEN = "written"
    """Every write that was owed has completed here; the other side has not said so yet."""
    COMPLETED = "completed"
    """Every write that was owed has completed, and the side that receives knows it."""
    FAILED = "failed"
    """It cannot succeed any more."""
    ABORTED = "aborted"
    """The engine on this side gave it up."""
    QUIET = "quiet"
    """It is proved that nobody can touch the pages any more."""
    DOUBTED = "doubted"
    """The proof did not come in time, or cannot come."""
    RELEASED = "released"
    """An operator took the pages back without a proof."""


class Outcome(str, enum.Enum):
    """Whether the engine gets what it asked for."""

    PENDING = "pending"
    """Not decided."""
    SUCCESS = "success"
    """Every byte is there, and the side that receives knows it."""
    FAILED = "failed"
    """Something prevented it; the failure says what."""
    ABORTED = "aborted"
    """The engine on this side gave it up before it was decided."""


class Memory(str, enum.Enum):
    """Whether somebody can still touch the pages."""

    HELD = "held"
    """The transfer needs the pages."""
    DRAINING = "draining"
    """The transfer is over; who could touch the pages was told to stop and must prove that it has."""
    QUARANTINED = "quarantined"
    """The proof did not come in time. The pages must not be used; a late proof still frees them."""
    SAFE = "safe"
    """Nobody can touch the pages any more."""


OUTCOME: Final[Mapping[tuple[Outcome, Signal], Outcome]] = MappingProxyType(
    {
        # Written is not delivered: its notice may still be lost.
        (Outcome.PENDING, Signal.WRITTEN): Outcome.PENDING,
        (Outcome.PENDING, Signal.COMPLETED): Outcome.SUCCESS,
        (Outcome.PENDING, Signal.FAILED): Outcome.FAILED,
        (Outcome.PENDING, Signal.ABORTED): Outcome.ABORTED,
        (Outcome.PENDING, Signal.QUIET): Outcome.PENDING,
        (Outcome.PENDING, Signal.DOUBTED): Outcome.FAILED,
        # Only what is in quarantine can be released, and that is never pending.
        (Outcome.PENDING, Signal.RELEASED): Outcome.PENDING,
        # Decided once; whatever comes later is late.
        **{
            (outcome, signal): outcome
            for outcome in (Outcome.SUCCESS, Outcome.FAILED, Outcome.ABORTED)
            for signal in Signal
        },
    }
)

MEMORY: Final[Mapping[tuple[Memory, Signal], Memory]] = MappingProxyType(
    {
        (Memory.HELD, Signal.WRITTEN): Memory.SAFE,
        (Memory.HELD, Signal.COMPLETED): Memory.SAFE,
        (Memory.HELD, Signal.FAILED): Memory.DRAINING,
        (Memory.HELD, Signal.ABORTED): Memory.DRAINING,
        # Quiet before the end is no news: more chunks may follow.
        (Memory.HELD, Signal.QUIET): Memory.HELD,
        (Memory.HELD, Signal.DOUBTED): Memory.QUARANTINED,
        (Memory.HELD, Signal.RELEASED): Memory.HELD,
        # Written after all: the last writes landed before the stop reached them.
        (Memory.DRAINING, Signal.WRITTEN): Memory.SAFE,
        (Memory.DRAINING, Signal.COMPLETED): Memory.SAFE,
        (Memory.DRAINING, Signal.FAILED): Memory.DRAINING,
        (Memory.DRAINING, Signal.ABORTED): Memory.DRAINING,
        (Memory.DRAINING, Signal.QUIET): Memory.SAFE,
        (Memory.DRAINING, Signal.DOUBTED): Memory.QUARANTINED,
        # The proof may still come; there is nothing to risk yet.
        (Memory.DRAINING, Signal.RELEASED): Memory.DRAINING,
        (Memory.QUARANTINED, Signal.WRITTEN): Memory.SAFE,
        (Memory.QUARANTINED, Signal.COMPLETED): Memory.SAFE,
        (Memory.QUARANTINED, Signal.FAILED): Memory.QUARANTINED,
        (Memory.QUARANTINED, Signal.ABORTED): Memory.QUARANTINED,
        (Memory.QUARANTINED, Signal.QUIET): Memory.SAFE,
        (Memory.QUARANTINED, Signal.DOUBTED): Memory.QUARANTINED,
        (Memory.QUARANTINED, Signal.RELEASED): Memory.SAFE,
        **{(Memory.SAFE, signal): Memory.SAFE for signal in Signal},
    }
)


class RankSignal(str, enum.Enum):
    """What one prefill rank can tell, or have happen to it, within one transfer."""

    NOTICED = "noticed"
    """A notice that leaves others missing."""
    COMPLETED = "completed"
    """The notice that makes the count whole."""
    DRAINED = "drained"
    """It said that nothing can be written any more."""
    LOST = "lost"
    """It is silent, so that it proves nothing for now."""
    FENCED = "fenced"
    """Its life is certainly over, and its transport lets nothing land after that."""


class RankState(str, enum.Enum):
    """How far one prefill rank is, as one decode rank sees it."""

    OWING = "owing"
    """It was granted pages and has not accounted for all that it owes."""
    COMPLETE = "complete"
    """It has accounted for every byte."""
    DRAINED = "drained"
    """It can write nothing more, although not everything was written."""
    LOST = "lost"
    """It is silent or has left, and has proved nothing."""

    @property
    def is_quiet(self) -> bool:
        """It can write nothing more."""
        return self in (RankState.COMPLETE, RankState.DRAINED)


RANK: Final[Mapping[tuple[RankState, RankSignal], RankState]] = MappingProxyType(
    {
        (RankState.OWING, RankSignal.NOTICED): RankState.OWING,
        (RankState.OWING, RankSignal.COMPLETED): RankState.COMPLETE,
        (RankState.OWING, RankSignal.DRAINED): RankState.DRAINED,
        (RankState.OWING, RankSignal.LOST): RankState.LOST,
        (RankState.OWING, RankSignal.FENCED): RankState.DRAINED,
        # A complete rank has nothing left to write; neither its drain nor its death is news.
        **{(RankState.COMPLETE, signal): RankState.COMPLETE for signal in RankSignal},
        # A drained rank promised silence; a notice that was still on its way does not undo the drain.
        **{(RankState.DRAINED, signal): RankState.DRAINED for signal in RankSignal},
        # A lost rank may have been cut off only: what it proves late still counts.
        (RankState.LOST, RankSignal.NOTICED): RankState.LOST,
        (RankState.LOST, RankSignal.COMPLETED): RankState.COMPLETE,
        (RankState.LOST, RankSignal.DRAINED): RankState.DRAINED,
        (RankState.LOST, RankSignal.LOST): RankState.LOST,
        (RankState.LOST, RankSignal.FENCED): RankState.DRAINED,
    }
)


class PeerSignal(str, enum.Enum):
    """What can happen to the acquaintance with one life of a peer."""

    GREETED = "greeted"
    """The handshake succeeded."""
    HEARD = "heard"
    """A message came."""
    EXPIRED = "expired"
    """Nothing came within the lease."""
    LEFT = "left"
    """It said goodbye, one of the two gave the other up, or a later life of the same rank appeared."""


class PeerState(str, enum.Enum):
    """How one life of a peer stands."""

    CONNECTED = "connected"
    """It has been greeted, and heard from within its lease."""
    LOST = "lost"
    """Silent for longer than its lease: perhaps dead, perhaps cut off."""
    LEFT = "left"
    """Over. Should this life ever be heard of again, it begins anew, with a handshake."""


PEER: Final[Mapping[tuple[PeerState, PeerSignal], PeerState]] = MappingProxyType(
    {
        (PeerState.CONNECTED, PeerSignal.GREETED): PeerState.CONNECTED,
        (PeerState.CONNECTED, PeerSignal.HEARD): PeerState.CONNECTED,
        (PeerState.CONNECTED, PeerSignal.EXPIRED): PeerState.LOST,
        (PeerState.CONNECTED, PeerSignal.LEFT): PeerState.LEFT,
        (PeerState.LOST, PeerSignal.GREETED): PeerState.CONNECTED,
        # It was only cut off. What was open between us has failed on both sides, by generation.
        (PeerState.LOST, PeerSignal.HEARD): PeerState.CONNECTED,
        (PeerState.LOST, PeerSignal.EXPIRED): PeerState.LOST,
        (PeerState.LOST, PeerSignal.LEFT): PeerState.LEFT,
        **{(PeerState.LEFT, signal): PeerState.LEFT for signal in PeerSignal},
    }
)


class BreakerSignal(str, enum.Enum):
    """What can happen to the confidence in a peer."""

    SUCCEEDED = "succeeded"
    """A transfer with it succeeded."""
    FAILED = "failed"
    """A transfer failed because of it, and fewer in a row than it takes."""
    TRIPPED = "tripped"
    """The failure that was one too many."""
    PROBED = "probed"
    """The pause is over and one transfer is let through."""
    UNDECIDED = "undecided"
    """The one that was let through ended without saying anything about the peer."""


class BreakerState(str, enum.Enum):
    """Whether a peer is trusted with transfers."""

    CLOSED = "closed"
    """Trusted."""
    OPEN = "open"
    """Nothing is let through."""
    PROBING = "probing"
    """One transfer is let through, and decides."""


BREAKER: Final[Mapping[tuple[BreakerState, BreakerSignal], BreakerState]] = MappingProxyType(
    {
        (BreakerState.CLOSED, BreakerSignal.SUCCEEDED): BreakerState.CLOSED,
        # One strike is no reason.
        (BreakerState.CLOSED, BreakerSignal.FAILED): BreakerState.CLOSED,
        (BreakerState.CLOSED, BreakerSignal.TRIPPED): BreakerState.OPEN,
        (BreakerState.CLOSED, BreakerSignal.PROBED): BreakerState.CLOSED,
        (BreakerState.CLOSED, BreakerSignal.UNDECIDED): BreakerState.CLOSED,
        # A transfer from before the pause got through after all.
        (BreakerState.OPEN, BreakerSignal.SUCCEEDED): BreakerState.CLOSED,
        (BreakerState.OPEN, BreakerSignal.FAILED): BreakerState.OPEN,
        (BreakerState.OPEN, BreakerSignal.TRIPPED): BreakerState.OPEN,
        (BreakerState.OPEN, BreakerSignal.PROBED): BreakerState.PROBING,
        (BreakerState.OPEN, BreakerSignal.UNDECIDED): BreakerState.OPEN,
        (BreakerState.PROBING, BreakerSignal.SUCCEEDED): BreakerState.CLOSED,
        (BreakerState.PROBING, BreakerSignal.FAILED): BreakerState.OPEN,
        (BreakerState.PROBING, BreakerSignal.TRIPPED): BreakerState.OPEN,
        (BreakerState.PROBING, BreakerSignal.PROBED): BreakerState.PROBING,
        # The pause is over already, so the next one is let through.
        (BreakerState.PROBING, BreakerSignal.UNDECIDED): BreakerState.OPEN,
    }
)


class TransferState:
    """The two facts of one transfer; `apply` is the only thing that ever changes them.

    Attributes:
        outcome: Whether the engine gets what it asked for.
        memory: Whether somebody can still touch the pages.
        is_pending: The outcome is open.
        is_safe: Nobody can touch the pages any more.
        is_going_on: Nothing is decided, and the pages are needed.
    """

    __slots__ = ("is_going_on", "is_pending", "is_safe", "memory", "outcome")

    def __init__(self) -> None:
        self._become(Outcome.PENDING, Memory.HELD)

    def apply(self, signal: Signal) -> None:
        """Change both facts as the tables say."""
        self._become(OUTCOME[self.outcome, signal], MEMORY[self.memory, signal])

    def _become(self, outcome: Outcome, memory: Memory) -> None:
        self.outcome, self.memory = outcome, memory
        self.is_pending = outcome is Outcome.PENDING
        self.is_safe = memory is Memory.SAFE
        self.is_going_on = self.is_pending and memory is Memory.HELD

    def __repr__(self) -> str:
        return f"TransferState({self.outcome.value}, {self.memory.value})"
