"""What the shell is told to do, as imperatives. Effects are carried out in the order in which they are returned.

Order matters in three places, and the core keeps to it: memory is reported only after the outcome; a Drained is sent
only after the last post has settled; a Grant is sent only after its receiver is on record.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from kvflow.geometry.layers import ALL_LAYERS, LayerRange
from kvflow.geometry.tokens import TokenRange
from kvflow.state.events import Chunk, DeliveryId, GreetedRank, ReceiveOpened
from kvflow.state.tables import Memory, Outcome
from kvflow.wire.messages import Failure, Grant, Message, Notice, PeerId

__all__ = [
    "CountOddity",
    "DropChunks",
    "DropPlan",
    "Effect",
    "EnqueueChunk",
    "ForgetPeer",
    "GreetInstance",
    "Handed",
    "OfferSlots",
    "PostPlan",
    "ProbePeer",
    "ReportReceiver",
    "ReportSender",
    "ScatterStaged",
    "SendMessage",
    "VerifyDigests",
    "WrittenBy",
]


class SendMessage(msgspec.Struct, frozen=True):
    """Send a message to a peer."""

    peer: PeerId
    message: Message


class EnqueueChunk(msgspec.Struct, frozen=True):
    """Put a piece of a chunk on its way: plan it when its turn comes, then say PlanFinished.

    Attributes:
        ranges: For each component of the piece, its tokens, all of which this decode rank wants; none is empty.
        chunk: What it was cut from, with all of its pages; `ready`, `last` and `metadata` are those of the piece.
        layers: Those of the piece.
    """

    delivery: DeliveryId
    seq: int
    ranges: Mapping[str, TokenRange]
    chunk: Chunk
    grant: Grant
    layers: LayerRange = ALL_LAYERS


class PostPlan(msgspec.Struct, frozen=True):
    """Post the planned descriptors; when every byte is there, the notice may be delivered with them."""

    delivery: DeliveryId
    seq: int
    notice: Notice


class DropChunks(msgspec.Struct, frozen=True):
    """Forget every chunk of a delivery that still waits for its turn: the transfer has ended."""

    delivery: DeliveryId


class DropPlan(msgspec.Struct, frozen=True):
    """Forget planned descriptors instead of posting them: the transfer has ended."""

    delivery: DeliveryId
    seq: int


class GreetInstance(msgspec.Struct, frozen=True):
    """Look up every rank of a prefill instance and shake hands with it."""

    instance: str


class ProbePeer(msgspec.Struct, frozen=True):
    """Find out whether the process of a silent peer still exists; if it certainly does not, say PeerGone."""

    peer: PeerId


class ForgetPeer(msgspec.Struct, frozen=True):
    """Release what the transport holds for a life of a peer that is over."""

    peer: PeerId


class ReportSender(msgspec.Struct, frozen=True):
    """Tell the engine how a room that it sends stands."""

    room: int
    outcome: Outcome
    memory: Memory
    failure: Failure | None


class Handed(msgspec.Struct, frozen=True):
    """What a complete transfer brought.

    Attributes:
        metadata: From the prefill engine, by engine rank; ranks that sent none are left out.
        num_bytes: Bytes written by all ranks.
        num_notices: Notices counted.
    """

    metadata: dict[int, bytes] = msgspec.field(default_factory=dict)
    num_bytes: int = 0
    num_notices: int = 0


class WrittenBy(NamedTuple):
    """What one prefill rank says it has written: all of its notices, in order."""

    rank: GreetedRank
    notices: tuple[Notice, ...]


class VerifyDigests(msgspec.Struct, frozen=True):
    """Compare what has arrived with the digests of the notices, then say DigestsVerified; the pages are held till then.

    Attributes:
        opened: What was asked for, and where it is.
        written: By each rank that owed something.
    """

    opened: ReceiveOpened
    written: tuple[WrittenBy, ...]


class ScatterStaged(msgspec.Struct, frozen=True):
    """Copy what a notice brought from its staging slot into the pages, then say Scattered; pages are held till then.

    Attributes:
        opened: What was asked for, and where it is.
        rank: Who wrote it.
    """

    opened: ReceiveOpened
    rank: GreetedRank
    notice: Notice


class OfferSlots(msgspec.Struct, frozen=True):
    """Look at what waits for a staging slot of a decode rank: one is free again, or there is one less to wait for."""

    peer: PeerId


class ReportReceiver(msgspec.Struct, frozen=True):
    """Tell the engine how a room that it receives stands."""

    room: int
    generation: int
    outcome: Outcome
    memory: Memory
    failure: Failure | None
    handed: Handed | None


class CountOddity(msgspec.Struct, frozen=True):
    """Count, and log at a bounded rate, something that was ignored."""

    kind: str
    peer: PeerId | None
    room: int | None


Effect = (
    SendMessage
    | EnqueueChunk
    | PostPlan
    | DropChunks
    | DropPlan
    | GreetInstance
    | ProbePeer
    | ForgetPeer
    | ReportSender
    | VerifyDigests
    | ScatterStaged
    | OfferSlots
    | ReportReceiver
    | CountOddity
)
