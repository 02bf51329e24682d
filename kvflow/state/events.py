"""Events: what the shell reports to a core, named in the past tense."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from kvflow.geometry.binding import BoundRoute
from kvflow.geometry.expected import ExpectedBytes
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import PageTable
from kvflow.geometry.ranges import TokenRange
from kvflow.geometry.routes import RegionSlice, Route
from kvflow.geometry.split import SplitPolicy
from kvflow.room import RoomId
from kvflow.state.quarantine import NO_MEMORY, Footprint
from kvflow.wire.messages import (
    DEFAULT_MAX_PAGES,
    AnyMessage,
    Failure,
    Hello,
    Notice,
    PeerId,
    RankRecord,
    Staged,
    StagingWindow,
)

__all__ = [
    "Chunk",
    "ChunkOffered",
    "CloseStarted",
    "ConnectFailed",
    "ConnectedRank",
    "ConnectionLost",
    "ConnectionRefused",
    "DataReady",
    "DecodeEvent",
    "DeliveryId",
    "DigestsVerified",
    "DrainStarted",
    "FenceImpossible",
    "HelloChecked",
    "InstanceAddress",
    "InstanceFound",
    "InstanceRef",
    "Landed",
    "LayersReady",
    "LeaseStarted",
    "LookUpRefused",
    "MessageArrived",
    "MessageReceived",
    "NoticeDelivered",
    "PeerFenced",
    "PeerRevoked",
    "PeerRoute",
    "PieceWentDirect",
    "PlanFailed",
    "PlanFinished",
    "PostEnded",
    "PostInDoubt",
    "PrefillEvent",
    "ProbeFinished",
    "QuarantineReleased",
    "QuiesceAsked",
    "RankRoute",
    "ReadyEvent",
    "ReceiveAborted",
    "ReceiveGranted",
    "ReceiveOpened",
    "ReclaimAsked",
    "ReplyLost",
    "RoomDeclined",
    "RoutesCompiled",
    "Scattered",
    "SendAborted",
    "SendOpened",
    "SendRefused",
    "TimePassed",
    "TransportClosed",
    "TurnContinued",
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
        pages: Source pages of the same components.
        ready: Event to wait for before the pages may be read, or None.
        layers: Used instead of `ready`: groups of layers that become ready one after another, in ascending order.
        last: Whether this is the last chunk.
        metadata: Sent with the last chunk, from the prefill engine to the decode engine.
    """

    tokens: TokenRange
    ranges: Mapping[str, TokenRange] = msgspec.field(default_factory=dict)
    pages: Mapping[str, PageTable] = msgspec.field(default_factory=dict)
    ready: ReadyEvent | None = None
    layers: tuple[LayersReady, ...] = ()
    last: bool = False
    metadata: bytes = b""


# On a prefill rank -------------------------------------------------------------------------------------------------


class PeerRoute(msgspec.Struct, frozen=True):
    """What a decode rank wants from this rank, and how to send it.

    Attributes:
        route: Route bound to the layouts of both sides.
        layout: Layout of the decode rank.
        slices: Route as given in the Hello.
        split_policy: How to split chunks into pieces.
        staging: Staging window of the decode rank for packed pieces, or None if it has none.
        prepared: Data that the shell has prepared for planning; opaque to the core.
    """

    route: BoundRoute
    layout: KVLayout
    slices: tuple[RegionSlice, ...]
    split_policy: SplitPolicy
    staging: StagingWindow | None = None
    prepared: Any = None

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components that this rank sends, in whole or in part."""
        return tuple(self.route.expected)


class SendOpened(msgspec.Struct, frozen=True):
    """The engine opened a room for sending.

    Attributes:
        has_lease: Its lease starts with the last chunk, not with `LeaseStarted`.
    """

    room: RoomId
    has_lease: bool = True


class SendRefused(msgspec.Struct, frozen=True):
    """This rank has refused the engine's request to open a room, which therefore will not be sent."""

    room: RoomId
    failure: Failure


class ChunkOffered(msgspec.Struct, frozen=True):
    """The engine has computed a chunk.

    Attributes:
        footprint: Memory that the chunk's pages occupy in the pools.
    """

    room: RoomId
    chunk: Chunk
    footprint: Footprint = NO_MEMORY


class QuiesceAsked(msgspec.Struct, frozen=True):
    """The engine asked for the source pages of a room back, and will continue the room later."""

    room: RoomId


class LeaseStarted(msgspec.Struct, frozen=True):
    """The ticket of a room has left, so from now on a decode rank could ask for it."""

    room: RoomId


class ReclaimAsked(msgspec.Struct, frozen=True):
    """The engine needs the pages of a room for another one, unless a decode rank needs them.

    Attributes:
        with_announced: An announcement does not count; decode has no pages for the room yet.
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
        connection: Opaque identifier of the connection.
        denied: Why the sender is not authorised: its key is not listed for the instance that it names, or it has no
            capability for the room. Empty if it is authorised.
        principal: For a Hello, the authenticated identity of the sender, independent of the names in the message; empty
            if the rank does not require keys.
        num_bytes: Size of the message.
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
    """The connection to a decode rank is gone, does not accept a message, or must be renewed because keys have changed.

    Attributes:
        connection: Opaque identifier of the connection.
    """

    connection: bytes


class HelloChecked(msgspec.Struct, frozen=True):
    """A Hello was compared with this rank's layout, and the transport was connected, see `CheckHello`.

    Attributes:
        link: Route to the decode rank; None if the Hello is not compatible.
        failure: Why the Hello is not compatible.
    """

    connection: bytes
    hello: Hello
    link: PeerRoute | None
    failure: str = ""


class DataReady(msgspec.Struct, frozen=True):
    """The device has computed the data of an `AwaitData`, or failed to.

    Attributes:
        wait: Number of the `AwaitData`.
        failure: None if the pages may be read.
    """

    delivery: DeliveryId
    wait: int
    failure: Failure | None = None


class PlanFinished(msgspec.Struct, frozen=True):
    """A plan was made off the event loop, see `PlanPiece`.

    Attributes:
        digests: Digests by component, if the grant asks for them.
        staged: Staging slot that the piece is written to, if it is packed.
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

    Attributes:
        failure: None if every byte has reached the peer's memory.
        lingers: Bytes in flight may still land in the peer's memory, until this process or the peer's ends.
    """

    delivery: DeliveryId
    seq: int
    failure: Failure | None
    lingers: bool = False


class PostInDoubt(msgspec.Struct, frozen=True):
    """The transport cannot tell whether a post has ended. A PostEnded follows if it ever can."""

    delivery: DeliveryId
    seq: int
    failure: Failure


class TurnContinued(msgspec.Struct, frozen=True):
    """The event loop has run other tasks, see `YieldTurn`."""


# On a decode rank --------------------------------------------------------------------------------------------------


class InstanceAddress(msgspec.Struct, frozen=True):
    """A prefill instance that is looked up at an address instead of in the configured registry.

    Attributes:
        address: "tcp://host:port" of a rank of the instance, or of a registry.
        name: Name of the instance; None for whichever instance answers at the address.
    """

    address: str
    name: str | None = None

    def __str__(self) -> str:
        return self.address if self.name is None else f"{self.name} at {self.address}"


InstanceRef = str | InstanceAddress
"""Reference to a prefill instance: its name in the registry, or the address to look it up at."""


class ReceiveOpened(msgspec.Struct, frozen=True):
    """The engine requested a room, or announced one.

    Attributes:
        generation: Issued by the shell, higher than all earlier ones.
        instance: Prefill instance that computes the room.
        ranges: Tokens of each wanted component.
        pages: Destination pages of the same components, encoded as in the Grant.
        timeout_s: Time limit of the whole transfer, in seconds; for an announced room, the time until it has pages.
        priority: Priority class of the transfer; 0 is served first.
        secret: 16 random bytes, from which the token of each grant is derived.
        footprint: Memory that the pages occupy in the pools.
        digest: Whether to compare the received bytes with digests of the sent ones.
        issuer: Incarnation of the prefill rank that issued the room's ticket, if there is one; no other incarnation may
            serve the room.
        is_announced: The room has no pages yet; `ReceiveGranted` supplies them.
        capability: Proof to the prefill rank that this instance may receive the room; empty if there is none.
    """

    room: RoomId
    generation: int
    instance: InstanceRef
    ranges: Mapping[str, TokenRange]
    pages: Mapping[str, bytes]
    num_decode_ranks: int
    timeout_s: float
    secret: bytes
    footprint: Footprint = NO_MEMORY
    digest: bool = False
    priority: int = 0
    issuer: PeerId | None = None
    is_announced: bool = False
    capability: str = ""


class ReceiveGranted(msgspec.Struct, frozen=True):
    """The engine supplied the pages of an announced room. The fields are those of `ReceiveOpened`."""

    room: RoomId
    generation: int
    ranges: Mapping[str, TokenRange]
    pages: Mapping[str, bytes]
    timeout_s: float
    footprint: Footprint = NO_MEMORY
    digest: bool = False


class ReceiveAborted(msgspec.Struct, frozen=True):
    """The engine aborted a room."""

    room: RoomId
    failure: Failure


class RoomDeclined(msgspec.Struct, frozen=True):
    """The engine will not receive a room, or this rank has refused its request. The fields are as in `ReceiveOpened`.

    Attributes:
        failure: Why, for the prefill ranks.
    """

    room: RoomId
    generation: int
    instance: InstanceRef
    failure: Failure
    issuer: PeerId | None = None
    capability: str = ""


class InstanceFound(msgspec.Struct, frozen=True):
    """The directory answered a lookup.

    Attributes:
        instance: Reference that was looked up.
        records: Records by engine rank, without ranks that are not registered.
        number: Number of the lookup; the answer is at least as recent as that lookup.
    """

    instance: InstanceRef
    records: tuple[RankRecord, ...]
    number: int = 0


class RankRoute(msgspec.Struct, frozen=True):
    """What this rank wants from one prefill rank.

    Attributes:
        route: Route as given in the Hello.
        expected: Bytes that the route yields, by component.
    """

    route: Route
    expected: Mapping[str, ExpectedBytes]


class RoutesCompiled(msgspec.Struct, frozen=True):
    """Routes from every rank of an instance were compiled, see `CompileRoutes`.

    Attributes:
        routes: Routes by engine rank; empty if the layouts are not compatible.
        failure: Why the layouts are not compatible.
    """

    instance: str
    attempt: int
    routes: tuple[RankRoute, ...]
    failure: str = ""


class ConnectedRank(msgspec.Struct, frozen=True):
    """One prefill rank after the handshake.

    Attributes:
        expected: Bytes that it must send, by component.
        slices: The same as region slices; not read by the core.
        staging: Where it may write packed pieces, or None.
        max_pages: Maximum number of pages of a grant to it.
    """

    peer: PeerId
    expected: Mapping[str, ExpectedBytes]
    slices: tuple[RegionSlice, ...] = ()
    staging: StagingWindow | None = None
    max_pages: int = DEFAULT_MAX_PAGES


class ConnectFailed(msgspec.Struct, frozen=True):
    """Connecting to a prefill rank failed: its address is unusable, or this process lacks descriptors (`is_short`)."""

    peer: PeerId
    detail: str
    is_short: bool = False


class ConnectionObstructed(msgspec.Struct, frozen=True):
    """The reason why there is no connection to a prefill rank is known; empty once there is one.

    Attributes:
        is_short: This process lacks a resource for it.
    """

    peer: PeerId
    detail: str
    is_short: bool = False


class ConnectionRefused(msgspec.Struct, frozen=True):
    """A prefill rank rejected this rank's key, or the reverse. The shell keeps retrying."""

    peer: PeerId
    detail: str


class LookUpRefused(msgspec.Struct, frozen=True):
    """The directory rejected this rank's key, or the reverse, or there is no connection. The shell keeps retrying.

    Attributes:
        instance: Reference that was, or could be, looked up there; None for all names.
        is_short: This process lacks the descriptors for a connection.
    """

    instance: InstanceRef | None
    detail: str
    is_short: bool = False


class ConnectionLost(msgspec.Struct, frozen=True):
    """The connection to a prefill rank broke; the shell is reconnecting."""

    peer: PeerId


class MessageReceived(msgspec.Struct, frozen=True):
    """A prefill rank sent a message, which also proves that it is alive."""

    peer: PeerId
    message: AnyMessage


class NoticeDelivered(msgspec.Struct, frozen=True):
    """The transport delivered an in-band notice; only the token of its grant identifies the sender."""

    notice: Notice


class ProbeFinished(msgspec.Struct, frozen=True):
    """A probe of a prefill rank's port has ended, see `ProbePeer`.

    Attributes:
        is_gone: Nothing listens on the port any more: the process has ended.
    """

    peer: PeerId
    is_gone: bool


class PeerFenced(msgspec.Struct, frozen=True):
    """The transport has ensured that no write of a terminated process can still land."""

    peer: PeerId


class Landed(msgspec.Struct, frozen=True):
    """Nothing that a prefill rank had in flight for a transfer can still land."""

    peer: PeerId
    room: RoomId
    generation: int


class FenceImpossible(msgspec.Struct, frozen=True):
    """The transport cannot tell when the writes of a terminated process have landed."""

    peer: PeerId


class DigestsVerified(msgspec.Struct, frozen=True):
    """The received bytes were compared with their digests, see `VerifyDigests`.

    Attributes:
        failure: None if all digests match, or if the check was no longer needed.
    """

    generation: int
    failure: Failure | None


class Scattered(msgspec.Struct, frozen=True):
    """The scatter of a packed piece into the pages has ended, successfully or not, see `ScatterStaged`.

    Attributes:
        failure: None if the piece is in the pages.
    """

    generation: int
    notice: Notice
    failure: Failure | None


# On both -----------------------------------------------------------------------------------------------------------


class QuarantineReleased(msgspec.Struct, frozen=True):
    """An operator released pages from quarantine without a proof.

    Attributes:
        key: Room on a prefill rank, generation on a decode rank.
    """

    key: RoomId


class DrainStarted(msgspec.Struct, frozen=True):
    """This rank is draining: nothing new starts, and open rooms may finish."""

    failure: Failure


class CloseStarted(msgspec.Struct, frozen=True):
    """This rank is closing: nothing new starts, and all open rooms fail."""

    failure: Failure


class TransportClosed(msgspec.Struct, frozen=True):
    """The transport is closed: it posts and delivers nothing more, and every post has ended."""


class TimePassed(msgspec.Struct, frozen=True):
    """The earliest of the core's `timers` is due."""


PrefillEvent = (
    SendOpened
    | SendRefused
    | ChunkOffered
    | QuiesceAsked
    | LeaseStarted
    | ReclaimAsked
    | SendAborted
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

DecodeEvent = (
    ReceiveOpened
    | ReceiveGranted
    | ReceiveAborted
    | RoomDeclined
    | InstanceFound
    | RoutesCompiled
    | ConnectFailed
    | ConnectionLost
    | ConnectionObstructed
    | ConnectionRefused
    | LookUpRefused
    | MessageReceived
    | NoticeDelivered
    | ProbeFinished
    | PeerFenced
    | Landed
    | FenceImpossible
    | DigestsVerified
    | Scattered
    | QuarantineReleased
    | DrainStarted
    | CloseStarted
    | TransportClosed
    | TimePassed
)
