"""Events of a prefill core, and what its engine offers."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from kvflow.geometry.binding import BoundRoute
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import PageTable
from kvflow.geometry.ranges import TokenRange
from kvflow.geometry.routes import RegionSlice
from kvflow.geometry.split import SplitPolicy
from kvflow.room import RoomId
from kvflow.state.events.shared import CloseStarted, DrainStarted, QuarantineReleased, TimePassed, TransportClosed
from kvflow.state.quarantine import NO_MEMORY, Footprint
from kvflow.wire.messages import AnyMessage, Failure, Hello, PeerId, Staged, StagingWindow, Stamps

__all__ = [
    "Chunk",
    "ChunkOffered",
    "ChunkWaits",
    "DataReady",
    "DeliveryId",
    "HelloChecked",
    "LayersReady",
    "LeaseStarted",
    "MessageArrived",
    "OfferDecided",
    "PeerRevoked",
    "PeerRoute",
    "PieceWentDirect",
    "PlanFailed",
    "PlanFinished",
    "PostEnded",
    "PostInDoubt",
    "PrefillEvent",
    "QuiesceAsked",
    "ReadyEvent",
    "ReclaimAsked",
    "ReplyLost",
    "SendAborted",
    "SendOpened",
    "SendRefused",
    "TurnContinued",
    "WaitEnded",
]


class DeliveryId(NamedTuple):
    """One prefill rank's part of one transfer to one decode rank."""

    room: RoomId
    peer: PeerId
    generation: int


@runtime_checkable
class ReadyEvent(Protocol):
    """An event that fires when a device has finished writing pages, such as `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Block the calling thread until the device has finished."""


class LayersReady(NamedTuple):
    """A group of layers of a chunk, and the event that signals that they are ready.

    Attributes:
        stop: Global layer below which every layer is ready. The last group of a chunk covers all remaining layers.
        ready: Event to wait for before the layers may be read, or None.
    """

    stop: int
    ready: ReadyEvent | None = None


class Chunk(msgspec.Struct, frozen=True):
    """Tokens that a prefill engine has ready to send.

    Attributes:
        tokens: `[start, stop)`; the next chunk starts at `stop`.
        ranges: Tokens of each component in the chunk; those of a window component may start before `tokens`.
        ready: Event to wait for before the pages may be read, or None.
        layers: Used instead of `ready`: groups of layers that become ready one after another, in ascending order.
        metadata: Sent with the last chunk, from the prefill engine to the decode engine.
    """

    tokens: TokenRange
    ranges: Mapping[str, TokenRange] = msgspec.field(default_factory=dict)
    pages: Mapping[str, PageTable] = msgspec.field(default_factory=dict)
    ready: ReadyEvent | None = None
    layers: tuple[LayersReady, ...] = ()
    last: bool = False
    metadata: bytes = b""


class PeerRoute(msgspec.Struct, frozen=True):
    """What a decode rank wants from this rank, and how to send it.

    Attributes:
        route: Route bound to the layouts of both sides.
        slices: Route as given in the Hello.
        staging: Staging window of the decode rank for packed pieces, or None if it has none.
        prepared: Data that the shell has prepared for planning; opaque to the core.
        is_background: Pieces give way to those of other rooms.
    """

    route: BoundRoute
    layout: KVLayout
    slices: tuple[RegionSlice, ...]
    split_policy: SplitPolicy
    staging: StagingWindow | None = None
    prepared: Any = None
    is_background: bool = False

    def send_in_background(self, piece_bytes: int) -> "PeerRoute":
        """Return the same for a room in the background, whose pieces are split along the tokens at this size."""
        policy = self.split_policy.limit_pieces(piece_bytes)
        return msgspec.structs.replace(self, split_policy=policy, is_background=True)

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components that this rank sends, in whole or in part."""
        return tuple(self.route.expected)


class SendOpened(msgspec.Struct, frozen=True):
    """The engine opened a room for sending.

    Attributes:
        has_lease: Its lease starts with the last chunk, not with `LeaseStarted`.
        is_background: Its pieces give way to those of other rooms.
    """

    room: RoomId
    has_lease: bool = True
    is_background: bool = False


class SendRefused(msgspec.Struct, frozen=True):
    """This rank has refused the engine's request to open a room, which therefore will not be sent."""

    room: RoomId
    failure: Failure


class ChunkOffered(msgspec.Struct, frozen=True):
    """The engine has computed a chunk, whose pages occupy `footprint` in the pools."""

    room: RoomId
    chunk: Chunk
    footprint: Footprint = NO_MEMORY


class ChunkWaits(msgspec.Struct, frozen=True):
    """The engine wants to offer a chunk, and there is no capacity for it now.

    Attributes:
        call: Number of the call of `chunk()` that waits, unique in this rank.
    """

    room: RoomId
    call: int


class WaitEnded(msgspec.Struct, frozen=True):
    """A call no longer waits: it was admitted and has offered its chunk, or has failed or was cancelled."""

    call: int


class QuiesceAsked(msgspec.Struct, frozen=True):
    """The engine asked for the source pages of a room back, and will continue the room later."""

    room: RoomId


class LeaseStarted(msgspec.Struct, frozen=True):
    """The ticket of a room has left, so from now on a decode rank could ask for it."""

    room: RoomId


class ReclaimAsked(msgspec.Struct, frozen=True):
    """The engine needs the pages of a room for another one, unless a decode rank needs them.

    If `with_announced`, an announcement does not count; decode has no pages for the room yet.
    """

    room: RoomId
    with_announced: bool
    failure: Failure


class SendAborted(msgspec.Struct, frozen=True):
    """The engine aborted a room."""

    room: RoomId
    failure: Failure


class MessageArrived(msgspec.Struct, frozen=True):
    """A message arrived over a connection to this rank.

    Attributes:
        denied: Why the sender is not authorised: its key is not listed for the instance that it names, or it has no
            capability for the room. Empty if it is authorised.
        principal: For a Hello, the authenticated identity of the sender, independent of the names in the message; empty
            if the rank does not require keys.
        was_new: True for a Grant that was new when it arrived, and whose pages have arrived since; and for the message
            that ends one before they have.
    """

    connection: bytes
    message: AnyMessage
    denied: str = ""
    principal: str = ""
    num_bytes: int = 0
    was_new: bool = False


class PeerRevoked(msgspec.Struct, frozen=True):
    """The key of a decode rank is no longer listed for its instance."""

    peer: PeerId


class ReplyLost(msgspec.Struct, frozen=True):
    """The connection to a decode rank is gone, does not accept a message, or must be renewed as keys have changed."""

    connection: bytes


class HelloChecked(msgspec.Struct, frozen=True):
    """A Hello was compared with this rank's layout, and the transport connected; no `link` if it is not compatible."""

    connection: bytes
    hello: Hello
    link: PeerRoute | None
    failure: str = ""


class DataReady(msgspec.Struct, frozen=True):
    """The device has computed the data of an `AwaitData`, or failed to; without a failure, the pages may be read."""

    delivery: DeliveryId
    wait: int
    failure: Failure | None = None


class PlanFinished(msgspec.Struct, frozen=True):
    """A plan was made off the event loop, see `PlanPiece`, with digests by component, if the grant asks for them.

    A packed piece is written to the slot `staged`.
    """

    delivery: DeliveryId
    seq: int
    digests: Mapping[str, int] = msgspec.field(default_factory=dict)
    staged: Staged | None = None


class PieceWentDirect(msgspec.Struct, frozen=True):
    """A piece with staging slots was written directly to its pages because that is faster, see `PostPiece`."""

    delivery: DeliveryId
    seq: int


class PlanFailed(msgspec.Struct, frozen=True):
    """Planning a piece failed; nothing was posted for it."""

    delivery: DeliveryId
    seq: int
    failure: Failure


class PostEnded(msgspec.Struct, frozen=True):
    """A post has ended, successfully or not: the transport no longer accesses its pages.

    Without a failure, every byte has reached the peer's memory. If it `lingers`, bytes in flight may still land there,
    until this process or the peer's ends. `stamps` are those of its notice.
    """

    delivery: DeliveryId
    seq: int
    failure: Failure | None
    lingers: bool = False
    stamps: Stamps | None = None


class PostInDoubt(msgspec.Struct, frozen=True):
    """The transport cannot tell whether a post has ended. A PostEnded follows if it ever can."""

    delivery: DeliveryId
    seq: int
    failure: Failure


class OfferDecided(msgspec.Struct, frozen=True):
    """The engine has accepted the offer of a decode rank, or declines it with a failure."""

    peer: PeerId
    number: int
    failure: Failure | None


class TurnContinued(msgspec.Struct, frozen=True):
    """The event loop has run other tasks, see `YieldTurn`."""


PrefillEvent = (
    SendOpened
    | SendRefused
    | ChunkOffered
    | ChunkWaits
    | WaitEnded
    | QuiesceAsked
    | LeaseStarted
    | ReclaimAsked
    | SendAborted
    | OfferDecided
    | MessageArrived
    | PeerRevoked
    | ReplyLost
    | HelloChecked
    | DataReady
    | PlanFinished
    | PieceWentDirect
    | PlanFailed
    | PostEnded
    | PostInDoubt
    | TurnContinued
    | QuarantineReleased
    | DrainStarted
    | CloseStarted
    | TransportClosed
    | TimePassed
)
