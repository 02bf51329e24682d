"""What can happen. Each event is a fact that the shell tells the core, in the past tense."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from kvflow.geometry.cutting import Cutting
from kvflow.geometry.debts import Debt
from kvflow.geometry.pages import PageTable
from kvflow.geometry.routes import RoutePiece
from kvflow.geometry.tokens import TokenRange
from kvflow.state.quarantine import NO_MEMORY, Footprint
from kvflow.wire.messages import Failure, Message, Notice, PeerId, Staged, StagingWindow

__all__ = [
    "Chunk",
    "ChunkOffered",
    "ClosingStarted",
    "DeliveryId",
    "DigestsVerified",
    "DrainStarted",
    "Event",
    "GreetedRank",
    "InstanceGreeted",
    "InstanceUnreachable",
    "LayersReady",
    "MessageReceived",
    "NoticeDelivered",
    "PeerGone",
    "PeerGreeted",
    "PeerLeft",
    "PlanFailed",
    "PlanFinished",
    "PostDoubted",
    "PostSettled",
    "QuarantineReleased",
    "ReadyEvent",
    "ReceiveAborted",
    "ReceiveOpened",
    "Scattered",
    "SendAborted",
    "SendOpened",
    "TimePassed",
]


class DeliveryId(NamedTuple):
    """One prefill rank's part of one transfer to one decode rank."""

    room: int
    peer: PeerId
    generation: int


@runtime_checkable
class ReadyEvent(Protocol):
    """Tells when a device has finished writing pages; `torch.cuda.Event` is one."""

    def synchronize(self) -> None:
        """Block the calling thread until the device is done."""


class LayersReady(NamedTuple):
    """When some layers of a chunk are ready.

    Attributes:
        stop: Global layer below which every layer is ready; the last group of a chunk has all that remain.
        ready: What to wait for before they may be read, or None.
    """

    stop: int
    ready: ReadyEvent | None = None


class Chunk(msgspec.Struct, frozen=True):
    """Tokens that a prefill engine has ready to send. The core looks at the ranges only.

    Attributes:
        tokens: `[start, stop)`; the next chunk starts at `stop`.
        ranges: For each component that comes with the chunk, its tokens; those of a window may reach back.
        pages: For the same components, the source pages.
        ready: What to wait for before the pages may be read, or None.
        layers: Instead of `ready`: groups of layers that get ready one after another, in ascending order.
        last: No chunk follows.
        metadata: On the last chunk: from the prefill engine to the decode engine.
    """

    tokens: TokenRange
    ranges: Mapping[str, TokenRange] = msgspec.field(default_factory=dict)
    pages: Mapping[str, PageTable] = msgspec.field(default_factory=dict)
    ready: ReadyEvent | None = None
    layers: tuple[LayersReady, ...] = ()
    last: bool = False
    metadata: bytes = b""


# On a prefill rank -------------------------------------------------------------------------------------------------


class SendOpened(msgspec.Struct, frozen=True):
    """The engine started to send a room."""

    room: int


class ChunkOffered(msgspec.Struct, frozen=True):
    """The engine has computed a chunk.

    Attributes:
        footprint: What the chunk's pages take of the pools.
    """

    room: int
    chunk: Chunk
    footprint: Footprint = NO_MEMORY


class SendAborted(msgspec.Struct, frozen=True):
    """The engine gave a room up."""

    room: int
    failure: Failure


class PeerGreeted(msgspec.Struct, frozen=True):
    """A decode rank said hello and fits.

    Attributes:
        owed: Components of which this rank holds cells that the decode rank wants.
        cutting: How chunks for it are cut into pieces; they go whole if None.
        staging: Where it takes packed pieces; nowhere if None.
    """

    peer: PeerId
    lease_s: float
    owed: tuple[str, ...]
    cutting: Cutting | None = None
    staging: StagingWindow | None = None


class PlanFinished(msgspec.Struct, frozen=True):
    """The descriptors of a chunk are ready to post.

    Attributes:
        digests: By component, if the grant asks for them.
        staged: Where the bytes will be, if they are packed.
    """

    delivery: DeliveryId
    seq: int
    num_bytes: int
    digests: Mapping[str, int] = msgspec.field(default_factory=dict)
    staged: Staged | None = None


class PlanFailed(msgspec.Struct, frozen=True):
    """A chunk cannot be planned."""

    delivery: DeliveryId
    seq: int
    failure: Failure


class PostSettled(msgspec.Struct, frozen=True):
    """A posted write has ended, one way or the other: the transport will not touch the pages for it any more.

    Attributes:
        failure: None if every byte is in the peer's memory.
        lingers: Bytes that have left may still land there; only the end of this process, or of the peer's, stops them.
    """

    delivery: DeliveryId
    seq: int
    failure: Failure | None
    lingers: bool = False


class PostDoubted(msgspec.Struct, frozen=True):
    """The transport cannot tell whether a posted write has ended; if it ever can, a PostSettled follows."""

    delivery: DeliveryId
    seq: int
    failure: Failure


# On a decode rank --------------------------------------------------------------------------------------------------


class ReceiveOpened(msgspec.Struct, frozen=True):
    """The engine asked for a room.

    Attributes:
        generation: Issued by the shell, higher than any before.
        instance: Prefill instance that computes it.
        ranges: For each component that is wanted, its tokens.
        pages: For the same components, the destination pages as they go into the Grant.
        priority: Class of the transfer; 0 goes first.
        secret: 16 random bytes; the token of each grant is derived from it.
        footprint: What the pages take of the pools.
        digest: What arrives is to be compared with digests of what was sent.
    """

    room: int
    generation: int
    instance: str
    ranges: Mapping[str, TokenRange]
    pages: Mapping[str, bytes]
    num_decode_ranks: int
    timeout_s: float
    secret: bytes
    footprint: Footprint = NO_MEMORY
    digest: bool = False
    priority: int = 0


class ReceiveAborted(msgspec.Struct, frozen=True):
    """The engine gave a room up."""

    room: int
    failure: Failure


class GreetedRank(msgspec.Struct, frozen=True):
    """One prefill rank after the handshake.

    Attributes:
        debts: What it owes, by component.
        pieces: The same as cells. The core does not look at them.
        staging: Where it may write packed pieces.
    """

    peer: PeerId
    debts: Mapping[str, Debt]
    pieces: tuple[RoutePiece, ...] = ()
    staging: StagingWindow | None = None


class InstanceGreeted(msgspec.Struct, frozen=True):
    """Every rank of a prefill instance answered the handshake."""

    instance: str
    ranks: tuple[GreetedRank, ...]


class InstanceUnreachable(msgspec.Struct, frozen=True):
    """The handshake with a prefill instance failed."""

    instance: str
    failure: Failure


class NoticeDelivered(msgspec.Struct, frozen=True):
    """The transport delivered a notice in band; only the token of its grant says who sent it."""

    notice: Notice


class DigestsVerified(msgspec.Struct, frozen=True):
    """What arrived was compared with its digests, see `VerifyDigests`.

    Attributes:
        failure: None if all are equal, or if nobody wanted to know any more.
    """

    generation: int
    failure: Failure | None


class Scattered(msgspec.Struct, frozen=True):
    """What a notice brought is in the pages, see `ScatterStaged`; or it is not, and nothing touches them any more.

    Attributes:
        failure: None if it is there.
    """

    generation: int
    notice: Notice
    failure: Failure | None


# On both -----------------------------------------------------------------------------------------------------------


class MessageReceived(msgspec.Struct, frozen=True):
    """A greeted peer sent a message; any message also proves that it lives."""

    peer: PeerId
    message: Message


class PeerLeft(msgspec.Struct, frozen=True):
    """A life of a peer is over: the shell noticed it (no connection, or a later life said hello)."""

    peer: PeerId
    failure: Failure


class PeerGone(msgspec.Struct, frozen=True):
    """It is proved that the process of a peer's life has ended: somebody else answers where it did, or nobody can.

    Attributes:
        is_quiet: The transport has seen to it that nothing lands any more of what that process had written.
    """

    peer: PeerId
    is_quiet: bool = False


class QuarantineReleased(msgspec.Struct, frozen=True):
    """An operator takes pages back that nobody has proved quiet.

    Attributes:
        key: The room on a prefill rank, the generation on a decode rank.
    """

    key: int


class DrainStarted(msgspec.Struct, frozen=True):
    """This rank is about to close: nothing new starts, what is open may finish."""

    failure: Failure


class ClosingStarted(msgspec.Struct, frozen=True):
    """This rank is closing: nothing new starts, everything open fails."""

    failure: Failure


class TimePassed(msgspec.Struct, frozen=True):
    """The clock reached `next_deadline()`."""


Event = (
    SendOpened
    | ChunkOffered
    | SendAborted
    | PeerGreeted
    | PlanFinished
    | PlanFailed
    | PostSettled
    | PostDoubted
    | ReceiveOpened
    | ReceiveAborted
    | InstanceGreeted
    | InstanceUnreachable
    | NoticeDelivered
    | DigestsVerified
    | Scattered
    | MessageReceived
    | PeerLeft
    | PeerGone
    | QuarantineReleased
    | DrainStarted
    | ClosingStarted
    | TimePassed
)
