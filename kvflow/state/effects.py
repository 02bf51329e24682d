"""What the shell is told to do, as imperatives. Effects are carried out in the order in which they are returned.

Order matters in three places, and the cores keep to it: memory is reported only after the outcome; a Drained is sent
only after the last post has ended; a Grant is sent only after its receiver is on record.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from kvflow.geometry.pages import PageTable
from kvflow.geometry.ranges import ALL_LAYERS, LayerRange, TokenRange
from kvflow.room import RoomId
from kvflow.state.events import ConnectedRank, DeliveryId, InstanceRef, PeerRoute, ReadyEvent, ReceiveOpened
from kvflow.state.tables import Memory, Outcome
from kvflow.wire.messages import Failure, Grant, Hello, Message, Notice, PeerId, RankRecord

__all__ = [
    "AdmitChunks",
    "AwaitData",
    "AwaitFence",
    "CheckHello",
    "CompileRoutes",
    "Connect",
    "ContinueSoon",
    "Cost",
    "CountAnomaly",
    "DecodeEffect",
    "Disconnect",
    "DisconnectTransport",
    "DropPlan",
    "LogEvent",
    "LookUp",
    "Piece",
    "PieceSlots",
    "PlanPiece",
    "PostPiece",
    "PostPlan",
    "PrefillEffect",
    "ProbePeer",
    "ReceivedRoom",
    "Reply",
    "ReportGranted",
    "ReportQuiesced",
    "ReportReceiver",
    "ReportSender",
    "ScatterStaged",
    "SendMessage",
    "VerifyDigests",
    "WatchNotices",
    "WrittenBy",
]


# On a prefill rank -------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """What a post takes of its peer's window while it is under way; known before it is planned.

    Attributes:
        num_bytes: What it moves.
        num_descriptors: Most descriptors that it can have.
    """

    num_bytes: int
    num_descriptors: int

    @property
    def packed(self) -> "Cost":
        """What the same post takes if it is packed."""
        return self._replace(num_descriptors=1)


class PieceSlots(NamedTuple):
    """Staging slots of a packed piece: where it is gathered, and where it is written to."""

    local: int
    remote: int


class Piece(msgspec.Struct, frozen=True):
    """A part of a chunk on its way to one decode rank: one write, one notice.

    Attributes:
        ranges: For each component, the tokens of the piece; none is empty.
        pages: Source pages of the chunk, for each component.
        grant: Whose pages to write, and how urgently.
        link: The route to the decode rank.
        notice: What is to be said when every byte is there, but for what only planning can tell.
        cost: What it takes of the peer's window.
        layers: Of the model, that go with it.
        queued_at: Since when it waits for its turn, in seconds of the clock of events.
        slots: To pack it through; it goes directly if None.
        must_pack: Pack it even if going directly is quicker.
    """

    delivery: DeliveryId
    seq: int
    ranges: Mapping[str, TokenRange]
    pages: Mapping[str, PageTable]
    grant: Grant
    link: PeerRoute
    notice: Notice
    cost: Cost
    layers: LayerRange = ALL_LAYERS
    queued_at: float = 0.0
    slots: PieceSlots | None = None
    must_pack: bool = False


class Reply(msgspec.Struct, frozen=True):
    """Send a message over a connection."""

    connection: bytes
    message: Message


class CheckHello(msgspec.Struct, frozen=True):
    """Compare what a decode rank wants with this rank's layout, connect the transport to it, then say HelloChecked."""

    connection: bytes
    hello: Hello


class DisconnectTransport(msgspec.Struct, frozen=True):
    """Release what the transport holds for an incarnation of a decode rank that is over."""

    peer: PeerId


class AwaitData(msgspec.Struct, frozen=True):
    """Wait until the device has computed a piece, beside the event loop, then say DataReady.

    Attributes:
        wait: Counts the waits of the delivery: a piece that was quiesced gives its own number to another one.
    """

    delivery: DeliveryId
    wait: int
    ready: ReadyEvent


class PostPiece(msgspec.Struct, frozen=True):
    """Plan a piece now and post it. If it had slots and went directly all the same, say PieceWentDirect."""

    piece: Piece


class PlanPiece(msgspec.Struct, frozen=True):
    """Plan a piece beside the event loop, with its digests if they are wanted, then say PlanFinished."""

    piece: Piece


class PostPlan(msgspec.Struct, frozen=True):
    """Post what PlanFinished spoke of."""

    delivery: DeliveryId
    seq: int
    notice: Notice


class DropPlan(msgspec.Struct, frozen=True):
    """Forget what PlanFinished spoke of: the transfer has ended."""

    delivery: DeliveryId
    seq: int


class ContinueSoon(msgspec.Struct, frozen=True):
    """Let the event loop have its turn, then say TurnContinued: more pieces can be posted."""


class AdmitChunks(msgspec.Struct, frozen=True):
    """Offer chunks that wait for capacity, as far as `has_capacity` says that their rooms have some."""


class ReportGranted(msgspec.Struct, frozen=True):
    """Tell the engine that every decode rank has granted a room, and which tokens of each component they want."""

    room: RoomId
    wanted: dict[str, TokenRange]


class ReportQuiesced(msgspec.Struct, frozen=True):
    """Tell the engine that nothing which was posted reads the source pages of a room any more.

    Attributes:
        resume_at: Where chunks go on; None if everything is posted, the last chunk too.
    """

    room: RoomId
    resume_at: int | None


class ReportSender(msgspec.Struct, frozen=True):
    """Tell the engine how a room that it sends stands."""

    room: RoomId
    outcome: Outcome
    memory: Memory
    failure: Failure | None


# On a decode rank --------------------------------------------------------------------------------------------------


class SendMessage(msgspec.Struct, frozen=True):
    """Send a message to a prefill rank."""

    peer: PeerId
    message: Message


class LookUp(msgspec.Struct, frozen=True):
    """Ask the directory for the ranks of an instance; it says InstanceFound when it knows something.

    Attributes:
        number: The answer repeats it, or a higher one that was asked with meanwhile.
    """

    instance: InstanceRef
    number: int = 0


class CompileRoutes(msgspec.Struct, frozen=True):
    """Work out what each rank of an instance is to send, then say RoutesCompiled."""

    instance: str
    attempt: int
    records: tuple[RankRecord, ...]


class Connect(msgspec.Struct, frozen=True):
    """Open a connection to a prefill rank."""

    peer: PeerId
    endpoint: str


class Disconnect(msgspec.Struct, frozen=True):
    """Close the connection to a prefill rank."""

    peer: PeerId


class ProbePeer(msgspec.Struct, frozen=True):
    """Find out whether somebody still listens at a prefill rank's port, then say ProbeFinished."""

    peer: PeerId
    endpoint: str


class AwaitFence(msgspec.Struct, frozen=True):
    """Wait until nothing lands any more of what an ended process had written; say PeerFenced if that can be known.

    Attributes:
        domain: What the process has said of where that can be seen.
    """

    peer: PeerId
    domain: bytes = b""


class WatchNotices(msgspec.Struct, frozen=True):
    """Let the transport poll sharply for notices, or hardly at all."""

    active: bool


class ReceivedRoom(msgspec.Struct, frozen=True):
    """What a complete transfer brought.

    Attributes:
        metadata: From the prefill engine, by engine rank; ranks that sent none are left out.
        num_bytes: Bytes written by all ranks.
        num_notices: Notices counted.
        first_notice_at: When the first notice came, in seconds of the clock of events.
    """

    metadata: dict[int, bytes] = msgspec.field(default_factory=dict)
    num_bytes: int = 0
    num_notices: int = 0
    first_notice_at: float = 0.0


class WrittenBy(NamedTuple):
    """What one prefill rank says it has written: all of its notices, in order."""

    rank: ConnectedRank
    notices: tuple[Notice, ...]


class VerifyDigests(msgspec.Struct, frozen=True):
    """Compare what has arrived with the digests of the notices, then say DigestsVerified; the pages are held till then.

    Attributes:
        opened: What was asked for, and where it is.
        written: By each rank that something was expected of.
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
    rank: ConnectedRank
    notice: Notice


class ReportReceiver(msgspec.Struct, frozen=True):
    """Tell the engine how a room that it receives stands.

    Attributes:
        received: What it brought, once it is a success.
    """

    room: RoomId
    generation: int
    outcome: Outcome
    memory: Memory
    failure: Failure | None
    received: ReceivedRoom | None


# On both -----------------------------------------------------------------------------------------------------------


class CountAnomaly(msgspec.Struct, frozen=True):
    """Count, and log at a bounded rate, something that was ignored.

    Attributes:
        kind: Is counted, and the name of the log event.
        peer: Who did it, if that is known.
        room: That it is about, if it is about one.
        detail: For a person; empty if there is nothing to say.
    """

    kind: str
    peer: PeerId | None
    room: RoomId | None = None
    detail: str = ""


class LogEvent(msgspec.Struct, frozen=True):
    """Log something that an operator acts on.

    Attributes:
        name: Of the log event.
        is_warning: It is not as it should be.
    """

    name: str
    values: Mapping[str, str]
    is_warning: bool = False


PrefillEffect = (
    Reply
    | CheckHello
    | DisconnectTransport
    | AwaitData
    | PostPiece
    | PlanPiece
    | PostPlan
    | DropPlan
    | ContinueSoon
    | AdmitChunks
    | ReportGranted
    | ReportQuiesced
    | ReportSender
    | CountAnomaly
    | LogEvent
)

DecodeEffect = (
    SendMessage
    | LookUp
    | CompileRoutes
    | Connect
    | Disconnect
    | ProbePeer
    | AwaitFence
    | WatchNotices
    | VerifyDigests
    | ScatterStaged
    | ReportReceiver
    | CountAnomaly
    | LogEvent
)
