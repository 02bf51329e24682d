"""What can happen. Each event is a fact that the shell tells a core, in the past tense."""

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
from kvflow.wire.messages import AnyMessage, Failure, Hello, Notice, PeerId, RankRecord, Staged, StagingWindow

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
    "InstanceAt",
    "InstanceFound",
    "InstanceRef",
    "LayersReady",
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
    "ReplyLost",
    "RoutesCompiled",
    "Scattered",
    "SendAborted",
    "SendOpened",
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


class PeerRoute(msgspec.Struct, frozen=True):
    """What a decode rank wants from this rank, and how it is sent there.

    Attributes:
        route: Bound to the layouts of both sides.
        layout: The decode rank's.
        slices: The route as its Hello says it.
        split_policy: How chunks are split into pieces.
        staging: Where the decode rank takes packed pieces; nowhere if None.
        prepared: What the shell has prepared for planning. The core does not look at it.
    """

    route: BoundRoute
    layout: KVLayout
    slices: tuple[RegionSlice, ...]
    split_policy: SplitPolicy
    staging: StagingWindow | None = None
    prepared: Any = None

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components of which this rank holds something that is wanted."""
        return tuple(self.route.expected)


class SendOpened(msgspec.Struct, frozen=True):
    """The engine started to send a room."""

    room: RoomId


class ChunkOffered(msgspec.Struct, frozen=True):
    """The engine has computed a chunk.

    Attributes:
        footprint: What the chunk's pages take of the pools.
    """

    room: RoomId
    chunk: Chunk
    footprint: Footprint = NO_MEMORY


class QuiesceAsked(msgspec.Struct, frozen=True):
    """The engine wants the source pages of a room back, and will go on with the room later."""

    room: RoomId


class SendAborted(msgspec.Struct, frozen=True):
    """The engine gave a room up."""

    room: RoomId
    failure: Failure


class MessageArrived(msgspec.Struct, frozen=True):
    """A message came over a connection to this rank.

    Attributes:
        connection: Opaque name of the connection.
        denied: Why its sender must not have what it asks for: its key is not that of the instance it speaks for, or it
            has no capability for the room. Empty if it may.
        principal: With a Hello: who may be at the other end, whatever names are said there; empty where nobody is asked
            for a key.
        num_bytes: Of a Hello.
    """

    connection: bytes
    message: AnyMessage
    denied: str = ""
    principal: str = ""
    num_bytes: int = 0


class PeerRevoked(msgspec.Struct, frozen=True):
    """The key of a decode rank is not listed any more for its instance."""

    peer: PeerId


class ReplyLost(msgspec.Struct, frozen=True):
    """A message to a decode rank could not be sent: its connection is gone, or takes nothing.

    Attributes:
        connection: Opaque name of the connection.
    """

    connection: bytes


class HelloChecked(msgspec.Struct, frozen=True):
    """A hello was compared with this rank's layout, and the transport was connected, see `CheckHello`.

    Attributes:
        link: None if the two do not fit.
        failure: Why not.
    """

    connection: bytes
    hello: Hello
    link: PeerRoute | None
    failure: str = ""


class DataReady(msgspec.Struct, frozen=True):
    """The device has computed what `AwaitData` named, or failed to.

    Attributes:
        wait: Its number.
        failure: None if the pages may be read.
    """

    delivery: DeliveryId
    wait: int
    failure: Failure | None = None


class PlanFinished(msgspec.Struct, frozen=True):
    """A plan that was made beside the event loop is there, see `PlanPiece`.

    Attributes:
        digests: By component, if the grant asks for them.
        staged: Where the bytes will be, if they are packed.
    """

    delivery: DeliveryId
    seq: int
    digests: Mapping[str, int] = msgspec.field(default_factory=dict)
    staged: Staged | None = None


class PieceWentDirect(msgspec.Struct, frozen=True):
    """A piece that had staging slots was posted to its pages directly, because that is quicker, see `PostPiece`."""

    delivery: DeliveryId
    seq: int


class PlanFailed(msgspec.Struct, frozen=True):
    """A piece cannot be planned; nothing was posted for it."""

    delivery: DeliveryId
    seq: int
    failure: Failure


class PostEnded(msgspec.Struct, frozen=True):
    """A posted write has ended, one way or the other: the transport will not touch the pages for it any more.

    Attributes:
        failure: None if every byte is in the peer's memory.
        lingers: Bytes that have left may still land there; only the end of this process, or of the peer's, stops them.
    """

    delivery: DeliveryId
    seq: int
    failure: Failure | None
    lingers: bool = False


class PostInDoubt(msgspec.Struct, frozen=True):
    """The transport cannot tell whether a posted write has ended; if it ever can, a PostEnded follows."""

    delivery: DeliveryId
    seq: int
    failure: Failure


class TurnContinued(msgspec.Struct, frozen=True):
    """The event loop has had its turn, see `ContinueSoon`."""


# On a decode rank --------------------------------------------------------------------------------------------------


class InstanceAt(msgspec.Struct, frozen=True):
    """A prefill instance that is looked up at an address instead of in the registry of the settings.

    Attributes:
        address: "tcp://host:port" of the rank that answers for it, or of a registry.
        name: Of the instance; None if whichever answers there is meant.
    """

    address: str
    name: str | None = None

    def __str__(self) -> str:
        return self.address if self.name is None else f"{self.name} at {self.address}"


InstanceRef = str | InstanceAt
"""How a prefill instance is referred to: by its name in the registry, or by where it is looked up."""


class ReceiveOpened(msgspec.Struct, frozen=True):
    """The engine asked for a room, or announced that it will.

    Attributes:
        generation: Issued by the shell, higher than any before.
        instance: Prefill instance that computes it.
        ranges: For each component that is wanted, its tokens.
        pages: For the same components, the destination pages as they go into the Grant.
        timeout_s: How long the whole transfer may take, in seconds; until it has pages, if it is only announced.
        priority: Class of the transfer; 0 goes first.
        secret: 16 random bytes; the token of each grant is derived from it.
        footprint: What the pages take of the pools.
        digest: What arrives is to be compared with digests of what was sent.
        issuer: The incarnation of a prefill rank that gave the ticket of this room; no other one is meant.
        is_announced: There are no pages yet; `ReceiveGranted` brings them.
        capability: Says to prefill that this instance may have the room; empty if there is none.
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
    """The engine gave pages to a room that it had announced. The fields are those of `ReceiveOpened`."""

    room: RoomId
    generation: int
    ranges: Mapping[str, TokenRange]
    pages: Mapping[str, bytes]
    timeout_s: float
    footprint: Footprint = NO_MEMORY
    digest: bool = False


class ReceiveAborted(msgspec.Struct, frozen=True):
    """The engine gave a room up."""

    room: RoomId
    failure: Failure


class InstanceFound(msgspec.Struct, frozen=True):
    """The directory answered a lookup.

    Attributes:
        instance: What was asked for.
        records: By engine rank; not all of them if some are not registered.
        number: Of the lookup; the answer is not older than that.
    """

    instance: InstanceRef
    records: tuple[RankRecord, ...]
    number: int = 0


class RankRoute(msgspec.Struct, frozen=True):
    """What this rank wants from one prefill rank.

    Attributes:
        route: As the Hello says it.
        expected: The bytes that follow from it, by component.
    """

    route: Route
    expected: Mapping[str, ExpectedBytes]


class RoutesCompiled(msgspec.Struct, frozen=True):
    """Routes from every rank of an instance were compiled, see `CompileRoutes`.

    Attributes:
        routes: By engine rank; empty if the two do not fit.
        failure: Why not.
    """

    instance: str
    attempt: int
    routes: tuple[RankRoute, ...]
    failure: str = ""


class ConnectedRank(msgspec.Struct, frozen=True):
    """One prefill rank after the handshake.

    Attributes:
        expected: What it is to send, by component.
        slices: The same as cells. The core does not look at them.
        staging: Where it may write packed pieces; nowhere if None.
    """

    peer: PeerId
    expected: Mapping[str, ExpectedBytes]
    slices: tuple[RegionSlice, ...] = ()
    staging: StagingWindow | None = None


class ConnectFailed(msgspec.Struct, frozen=True):
    """No connection to a prefill rank could be made: its address is unusable, or this process has no sockets left."""

    peer: PeerId
    detail: str


class ConnectionRefused(msgspec.Struct, frozen=True):
    """A prefill rank and this one will not have each other for their keys; it is tried again."""

    peer: PeerId
    detail: str


class LookUpRefused(msgspec.Struct, frozen=True):
    """The directory and this rank will not have each other for their keys; it is tried again.

    Attributes:
        instance: What was asked for, or could be; None for all names.
    """

    instance: InstanceRef | None
    detail: str


class ConnectionLost(msgspec.Struct, frozen=True):
    """The connection to a prefill rank broke; it is being made anew."""

    peer: PeerId


class MessageReceived(msgspec.Struct, frozen=True):
    """A prefill rank sent a message; any message also proves that it lives."""

    peer: PeerId
    message: AnyMessage


class NoticeDelivered(msgspec.Struct, frozen=True):
    """The transport delivered a notice in band; only the token of its grant says who sent it."""

    notice: Notice


class ProbeFinished(msgspec.Struct, frozen=True):
    """A probe of a prefill rank's port has ended, see `ProbePeer`.

    Attributes:
        is_gone: Nobody listens there any more: the process has ended.
    """

    peer: PeerId
    is_gone: bool


class PeerFenced(msgspec.Struct, frozen=True):
    """The transport has seen to it that nothing lands any more of what an ended process had written."""

    peer: PeerId


class FenceImpossible(msgspec.Struct, frozen=True):
    """The transport cannot tell when what an ended process had written has landed."""

    peer: PeerId


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


class QuarantineReleased(msgspec.Struct, frozen=True):
    """An operator takes back pages that are not proved quiet.

    Attributes:
        key: The room on a prefill rank, the generation on a decode rank.
    """

    key: RoomId


class DrainStarted(msgspec.Struct, frozen=True):
    """This rank is about to close: nothing new starts, what is open may finish."""

    failure: Failure


class CloseStarted(msgspec.Struct, frozen=True):
    """This rank is closing: nothing new starts, everything open fails."""

    failure: Failure


class TransportClosed(msgspec.Struct, frozen=True):
    """The transport is closed: nothing is posted or delivered any more, and every post has had its end."""


class TimePassed(msgspec.Struct, frozen=True):
    """The clock reached `next_deadline()`."""


PrefillEvent = (
    SendOpened
    | ChunkOffered
    | QuiesceAsked
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
    | InstanceFound
    | RoutesCompiled
    | ConnectFailed
    | ConnectionLost
    | ConnectionRefused
    | LookUpRefused
    | MessageReceived
    | NoticeDelivered
    | ProbeFinished
    | PeerFenced
    | FenceImpossible
    | DigestsVerified
    | Scattered
    | QuarantineReleased
    | DrainStarted
    | CloseStarted
    | TransportClosed
    | TimePassed
)
