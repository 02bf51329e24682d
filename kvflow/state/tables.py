"""Every state and transition of kvflow, as data. No code outside this module decides on transitions.

Theory of operation
===================

A transfer has two facts, which are kept apart on purpose.

*Outcome*: will the engine get what it asked for? It is decided once and never changes again.

*Memory*: can a peer still touch the pages? A writer that was told to stop may have bytes in flight, so a failed
transfer is not a finished one. Pages start HELD. Success makes them SAFE, because success means that every write has
completed. Any other end makes them DRAINING: every writer was told to stop, and must prove that it has. Once all proofs
have arrived, the pages are SAFE. If one does not arrive in time, they are QUARANTINED, and only the late proof makes
them SAFE, or an operator who takes the risk. Time alone never does.

Both ends of a transfer use the same two tables. The receiver's pages are destinations, and the proofs come from the
prefill ranks. The sender's pages are sources, and the proofs come from its own transport: they are SAFE as soon as its
writes have ended, while the outcome stays PENDING until the receiver reports that it has everything.

A receiver also tracks its request (`REQUEST`). An announced request has no pages, so its memory is SAFE; the memory
starts over as HELD when the engine supplies pages.

A receiver also tracks each prefill rank that must send bytes (`RANK`), by `engine_rank`. The transfer is complete when
every rank is COMPLETE and the digests match, if any were requested. It is quiet when every rank is COMPLETE or DRAINED
and no local thread reads or writes its pages any more.

A sender also tracks what it accepts from its engine (`FEED`): chunks until the last one, and nothing while it is
quiesced.

A rank tracks each peer (`PEER`): one incarnation of one rank at the other end, from the handshake to its loss. A decode
rank also tracks each prefill instance (`INSTANCE`), from the lookup of its ranks to the handshake with all of them.

Each table is total: pairs that change nothing are listed too, so nothing is decided by omission.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = [
    "FEED",
    "INSTANCE",
    "MEMORY",
    "OUTCOME",
    "PEER",
    "QUIET",
    "RANK",
    "REQUEST",
    "FeedSignal",
    "FeedState",
    "InstanceSignal",
    "InstanceState",
    "Memory",
    "Outcome",
    "PeerSignal",
    "PeerState",
    "RankSignal",
    "RankState",
    "RequestSignal",
    "RequestState",
    "Signal",
    "TransferState",
]


class Signal(enum.StrEnum):
    """What can happen to a transfer as a whole."""

    WRITTEN = "written"
    """Every expected write has completed here; the other side has not confirmed it yet."""
    COMPLETED = "completed"
    """Every expected write has completed, and the receiver knows it."""
    FAILED = "failed"
    """The transfer can no longer succeed."""
    ABORTED = "aborted"
    """The engine on this side aborted it."""
    QUIET = "quiet"
    """There is proof that nothing can touch the pages any more."""
    IN_DOUBT = "in_doubt"
    """The proof did not arrive in time, or cannot arrive."""
    RELEASED = "released"
    """An operator released the pages without a proof."""


class Outcome(enum.StrEnum):
    """Whether the engine gets what it asked for."""

    PENDING = "pending"
    """Not decided yet."""
    SUCCESS = "success"
    """Every byte has arrived, and the receiver knows it."""
    FAILED = "failed"
    """Something prevented it; the failure states what."""
    ABORTED = "aborted"
    """The engine on this side aborted it before it was decided."""


class Memory(enum.StrEnum):
    """Whether anything can still touch the pages."""

    HELD = "held"
    """The transfer needs the pages."""
    DRAINING = "draining"
    """The transfer has ended; every rank that could touch the pages was told to stop and must prove that it has."""
    QUARANTINED = "quarantined"
    """The proof did not arrive in time. The pages must not be used; a late proof still frees them."""
    SAFE = "safe"
    """Nothing can touch the pages any more."""


OUTCOME: Final[Mapping[tuple[Outcome, Signal], Outcome]] = MappingProxyType(
    {
        # Written is not delivered: its notice may still be lost.
        (Outcome.PENDING, Signal.WRITTEN): Outcome.PENDING,
        (Outcome.PENDING, Signal.COMPLETED): Outcome.SUCCESS,
        (Outcome.PENDING, Signal.FAILED): Outcome.FAILED,
        (Outcome.PENDING, Signal.ABORTED): Outcome.ABORTED,
        (Outcome.PENDING, Signal.QUIET): Outcome.PENDING,
        (Outcome.PENDING, Signal.IN_DOUBT): Outcome.FAILED,
        # Only a quarantined transfer can be released, and that is never pending.
        (Outcome.PENDING, Signal.RELEASED): Outcome.PENDING,
        # Decided once; later signals change nothing.
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
        # Quiet before the end changes nothing: more chunks may follow.
        (Memory.HELD, Signal.QUIET): Memory.HELD,
        (Memory.HELD, Signal.IN_DOUBT): Memory.QUARANTINED,
        (Memory.HELD, Signal.RELEASED): Memory.HELD,
        # Written after all: the last writes landed before the stop reached them.
        (Memory.DRAINING, Signal.WRITTEN): Memory.SAFE,
        (Memory.DRAINING, Signal.COMPLETED): Memory.SAFE,
        (Memory.DRAINING, Signal.FAILED): Memory.DRAINING,
        (Memory.DRAINING, Signal.ABORTED): Memory.DRAINING,
        (Memory.DRAINING, Signal.QUIET): Memory.SAFE,
        (Memory.DRAINING, Signal.IN_DOUBT): Memory.QUARANTINED,
        # The proof may still arrive; there is no need to take the risk yet.
        (Memory.DRAINING, Signal.RELEASED): Memory.DRAINING,
        (Memory.QUARANTINED, Signal.WRITTEN): Memory.SAFE,
        (Memory.QUARANTINED, Signal.COMPLETED): Memory.SAFE,
        (Memory.QUARANTINED, Signal.FAILED): Memory.QUARANTINED,
        (Memory.QUARANTINED, Signal.ABORTED): Memory.QUARANTINED,
        (Memory.QUARANTINED, Signal.QUIET): Memory.SAFE,
        (Memory.QUARANTINED, Signal.IN_DOUBT): Memory.QUARANTINED,
        (Memory.QUARANTINED, Signal.RELEASED): Memory.SAFE,
        **{(Memory.SAFE, signal): Memory.SAFE for signal in Signal},
    }
)


class FeedSignal(enum.StrEnum):
    """What can happen to the chunks that a sender takes from its engine."""

    LAST_CHUNK = "last_chunk"
    """The engine has offered the last chunk."""
    ROLLED_BACK = "rolled_back"
    """The engine wants its pages back; chunks that were not posted are dropped, including the last one."""
    KEPT = "kept"
    """The engine wants its pages back, and everything is already posted."""
    QUIET = "quiet"
    """No post reads the pages any more."""


class FeedState(enum.StrEnum):
    """What a sender accepts from its engine."""

    OPEN = "open"
    """Chunks."""
    FINISHED = "finished"
    """Nothing more; the last chunk has been offered."""
    QUIESCING = "quiescing"
    """Nothing until no post reads the pages; then chunks again."""
    SETTLING = "settling"
    """Nothing more; the engine waits until the pages are quiet."""


FEED: Final[Mapping[tuple[FeedState, FeedSignal], FeedState]] = MappingProxyType(
    {
        (FeedState.OPEN, FeedSignal.LAST_CHUNK): FeedState.FINISHED,
        (FeedState.OPEN, FeedSignal.ROLLED_BACK): FeedState.QUIESCING,
        # More chunks must come, whatever is posted.
        (FeedState.OPEN, FeedSignal.KEPT): FeedState.OPEN,
        (FeedState.OPEN, FeedSignal.QUIET): FeedState.OPEN,
        (FeedState.FINISHED, FeedSignal.LAST_CHUNK): FeedState.FINISHED,
        (FeedState.FINISHED, FeedSignal.ROLLED_BACK): FeedState.QUIESCING,
        (FeedState.FINISHED, FeedSignal.KEPT): FeedState.SETTLING,
        (FeedState.FINISHED, FeedSignal.QUIET): FeedState.FINISHED,
        # Repeated requests change nothing.
        **{(state, signal): state for state in (FeedState.QUIESCING, FeedState.SETTLING) for signal in FeedSignal},
        (FeedState.QUIESCING, FeedSignal.QUIET): FeedState.OPEN,
        (FeedState.SETTLING, FeedSignal.QUIET): FeedState.FINISHED,
    }
)


class RequestSignal(enum.StrEnum):
    """What can happen to a receiver's request."""

    PAGES = "pages"
    """The engine has supplied pages."""
    CONNECTED = "connected"
    """The prefill instance is connected, and is sent the request."""


class RequestState(enum.StrEnum):
    """State of a receiver's request."""

    ANNOUNCED = "announced"
    """The prefill instance is told that it will be granted pages; there are none yet."""
    WAITING = "waiting"
    """It has pages, and waits until the prefill instance is connected."""
    GRANTED = "granted"
    """Every rank of the prefill instance may write its pages."""


REQUEST: Final[Mapping[tuple[RequestState, RequestSignal], RequestState]] = MappingProxyType(
    {
        (RequestState.ANNOUNCED, RequestSignal.PAGES): RequestState.WAITING,
        # Without pages, only an announcement is sent.
        (RequestState.ANNOUNCED, RequestSignal.CONNECTED): RequestState.ANNOUNCED,
        (RequestState.WAITING, RequestSignal.PAGES): RequestState.WAITING,
        (RequestState.WAITING, RequestSignal.CONNECTED): RequestState.GRANTED,
        **{(RequestState.GRANTED, signal): RequestState.GRANTED for signal in RequestSignal},
    }
)


class RankSignal(enum.StrEnum):
    """What one prefill rank can report, or have happen to it, within one transfer."""

    NOTICED = "noticed"
    """A notice arrived; others are still missing."""
    COMPLETED = "completed"
    """The last missing notice arrived."""
    DRAINED = "drained"
    """It reported that nothing can be written any more."""
    LOST = "lost"
    """It is silent, and proves nothing for now."""
    FENCED = "fenced"
    """Its incarnation has ended, and there is proof that none of its writes can still land."""
    DOUBTED = "doubted"
    """The bytes are not those that it has sent, so its notices prove nothing: one may have overtaken its bytes."""


class RankState(enum.StrEnum):
    """Progress of one prefill rank in one transfer, as the decode rank sees it."""

    WRITING = "writing"
    """It was granted pages and has not yet accounted for everything expected from it."""
    COMPLETE = "complete"
    """It has accounted for every byte."""
    DRAINED = "drained"
    """It can no longer write, although not everything was written."""
    LOST = "lost"
    """It is silent, has left, or its notices are wrong; it has proved nothing."""


QUIET: Final = frozenset({RankState.COMPLETE, RankState.DRAINED})
"""States of a prefill rank that can write nothing more."""

RANK: Final[Mapping[tuple[RankState, RankSignal], RankState]] = MappingProxyType(
    {
        (RankState.WRITING, RankSignal.NOTICED): RankState.WRITING,
        (RankState.WRITING, RankSignal.COMPLETED): RankState.COMPLETE,
        (RankState.WRITING, RankSignal.DRAINED): RankState.DRAINED,
        (RankState.WRITING, RankSignal.LOST): RankState.LOST,
        (RankState.WRITING, RankSignal.FENCED): RankState.DRAINED,
        (RankState.WRITING, RankSignal.DOUBTED): RankState.WRITING,
        # A complete rank has nothing left to write; neither its drain nor its end changes anything.
        **{(RankState.COMPLETE, signal): RankState.COMPLETE for signal in RankSignal},
        (RankState.COMPLETE, RankSignal.DOUBTED): RankState.LOST,
        # A drained rank promised to write nothing more; a notice that was in flight does not undo the drain.
        **{(RankState.DRAINED, signal): RankState.DRAINED for signal in RankSignal},
        # A lost rank may only have been partitioned: late proofs still count.
        (RankState.LOST, RankSignal.NOTICED): RankState.LOST,
        (RankState.LOST, RankSignal.COMPLETED): RankState.COMPLETE,
        (RankState.LOST, RankSignal.DRAINED): RankState.DRAINED,
        (RankState.LOST, RankSignal.LOST): RankState.LOST,
        (RankState.LOST, RankSignal.FENCED): RankState.DRAINED,
        (RankState.LOST, RankSignal.DOUBTED): RankState.LOST,
    }
)


class PeerSignal(enum.StrEnum):
    """What can happen to a peer."""

    CONNECTED = "connected"
    """The handshake succeeded."""
    HEARD = "heard"
    """A message arrived."""
    DISCONNECTED = "disconnected"
    """The connection to it broke; it is being re-established."""
    EXPIRED = "expired"
    """No message arrived within the lease."""
    LEFT = "left"
    """It sent Goodbye, one side gave the other up, or a later incarnation of the same rank appeared."""


class PeerState(enum.StrEnum):
    """State of one incarnation of a peer."""

    CONNECTED = "connected"
    """The handshake is done, and the peer was heard from within its lease."""
    SUSPECT = "suspect"
    """Its connection broke: the network or the process may have failed. Nothing new is sent until it is heard from."""
    LOST = "lost"
    """Silent for longer than its lease: it may be dead, or only partitioned."""
    LEFT = "left"
    """Gone. If this incarnation is heard from again, it must start over with a handshake."""


PEER: Final[Mapping[tuple[PeerState, PeerSignal], PeerState]] = MappingProxyType(
    {
        (PeerState.CONNECTED, PeerSignal.CONNECTED): PeerState.CONNECTED,
        (PeerState.CONNECTED, PeerSignal.HEARD): PeerState.CONNECTED,
        (PeerState.CONNECTED, PeerSignal.DISCONNECTED): PeerState.SUSPECT,
        (PeerState.CONNECTED, PeerSignal.EXPIRED): PeerState.LOST,
        (PeerState.CONNECTED, PeerSignal.LEFT): PeerState.LEFT,
        (PeerState.SUSPECT, PeerSignal.CONNECTED): PeerState.CONNECTED,
        (PeerState.SUSPECT, PeerSignal.HEARD): PeerState.CONNECTED,
        (PeerState.SUSPECT, PeerSignal.DISCONNECTED): PeerState.SUSPECT,
        (PeerState.SUSPECT, PeerSignal.EXPIRED): PeerState.LOST,
        (PeerState.SUSPECT, PeerSignal.LEFT): PeerState.LEFT,
        (PeerState.LOST, PeerSignal.CONNECTED): PeerState.CONNECTED,
        # It was only partitioned. Open transfers have failed on both sides, by generation.
        (PeerState.LOST, PeerSignal.HEARD): PeerState.CONNECTED,
        (PeerState.LOST, PeerSignal.DISCONNECTED): PeerState.LOST,
        (PeerState.LOST, PeerSignal.EXPIRED): PeerState.LOST,
        (PeerState.LOST, PeerSignal.LEFT): PeerState.LEFT,
        **{(PeerState.LEFT, signal): PeerState.LEFT for signal in PeerSignal},
    }
)


class InstanceSignal(enum.StrEnum):
    """What can happen between a decode rank and a prefill instance."""

    FOUND = "found"
    """The directory returned all of its ranks, or different incarnations than before."""
    COMPILED = "compiled"
    """The routes from its ranks are known."""
    CONNECTED = "connected"
    """Every rank has answered the handshake."""
    REFUSED = "refused"
    """A rank refused, or the two sides are incompatible; the handshake is retried after a pause."""
    LOST = "lost"
    """One of its ranks was lost, left or restarted."""


class InstanceState(enum.StrEnum):
    """State of a decode rank's handshake with a prefill instance."""

    LOOKING_UP = "looking_up"
    """The directory is asked for its ranks."""
    COMPILING = "compiling"
    """Routes are compiled."""
    CONNECTING = "connecting"
    """Hellos await their answers."""
    CONNECTED = "connected"
    """Every rank accepts grants."""


_RESTART: Final = {
    (state, signal): InstanceState.LOOKING_UP
    for state in InstanceState
    for signal in (InstanceSignal.REFUSED, InstanceSignal.LOST)
}

INSTANCE: Final[Mapping[tuple[InstanceState, InstanceSignal], InstanceState]] = MappingProxyType(
    {
        **_RESTART,
        # The handshake with other incarnations is abandoned.
        **{(state, InstanceSignal.FOUND): InstanceState.COMPILING for state in InstanceState},
        # Routes of an abandoned attempt.
        (InstanceState.LOOKING_UP, InstanceSignal.COMPILED): InstanceState.LOOKING_UP,
        (InstanceState.COMPILING, InstanceSignal.COMPILED): InstanceState.CONNECTING,
        (InstanceState.CONNECTING, InstanceSignal.COMPILED): InstanceState.CONNECTING,
        (InstanceState.CONNECTED, InstanceSignal.COMPILED): InstanceState.CONNECTED,
        (InstanceState.LOOKING_UP, InstanceSignal.CONNECTED): InstanceState.LOOKING_UP,
        (InstanceState.COMPILING, InstanceSignal.CONNECTED): InstanceState.COMPILING,
        (InstanceState.CONNECTING, InstanceSignal.CONNECTED): InstanceState.CONNECTED,
        (InstanceState.CONNECTED, InstanceSignal.CONNECTED): InstanceState.CONNECTED,
    }
)


class TransferState:
    """The two facts of one transfer; only `apply` changes them."""

    __slots__ = ("is_pending", "is_safe", "memory", "outcome")

    def __init__(self, memory: Memory = Memory.HELD) -> None:
        self.outcome, self.memory = Outcome.PENDING, memory
        self.is_pending, self.is_safe = True, memory is Memory.SAFE

    def apply(self, signal: Signal) -> None:
        """Apply a signal to both tables."""
        self.outcome, self.memory = OUTCOME[self.outcome, signal], MEMORY[self.memory, signal]
        self.is_pending, self.is_safe = self.outcome is Outcome.PENDING, self.memory is Memory.SAFE

    def __repr__(self) -> str:
        return f"TransferState({self.outcome.value}, {self.memory.value})"
