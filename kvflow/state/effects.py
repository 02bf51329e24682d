"""Effects: what a core asks the shell to do, named in the imperative. The shell carries them out in order.

The cores guarantee three orderings: they report memory only after the outcome, send Drained only after the last post
has ended, and send a Grant only after recording its receiver.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from kvflow.geometry.pages import PageTable
from kvflow.geometry.ranges import ALL_LAYERS, LayerRange, TokenRange
from kvflow.room import RoomId
from kvflow.state.events import (
    ConnectedRank,
    DeliveryId,
    InstanceAddress,
    InstanceRef,
    PeerRoute,
    ReadyEvent,
    ReceiveOpened,
)
from kvflow.state.tables import Memory, Outcome
from kvflow.wire.messages import Drained, Failure, Grant, Hello, Message, Notice, Offer, PeerId, RankRecord, Stamps

__all__ = [
    "AdmitChunk",
    "AwaitData",
    "CheckHello",
    "ClockOffset",
    "CompileRoutes",
    "Connect",
    "Cost",
    "CountAnomaly",
    "DecodeEffect",
    "Disconnect",
    "DisconnectTransport",
    "DropPlan",
    "LastPiece",
    "LogEvent",
    "LookUp",
    "NoteEnds",
    "PassOffer",
    "Piece",
    "PieceSlots",
    "PlanPiece",
    "PostPiece",
    "PostPlan",
    "PrefillEffect",
    "ProbeAddress",
    "ProbePeer",
    "ReceivedRoom",
    "Reply",
    "ReportGranted",
    "ReportOffer",
    "ReportQuiesced",
    "ReportReceiver",
    "ReportSender",
    "ScatterStaged",
    "SendMessage",
    "VerifyDigests",
    "WaitForFence",
    "WaitForLanding",
    "WatchNotices",
    "WithdrawOffer",
    "WrittenBy",
    "YieldTurn",
]


# On a prefill rank -------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Credit of its peer's window that a post uses in flight; before planning, descriptors are an upper bound."""

    num_bytes: int
    num_descriptors: int

    @property
    def packed(self) -> "Cost":
        """The cost of the same post if it is packed."""
        return self._replace(num_descriptors=1)


class PieceSlots(NamedTuple):
    """Staging slots of a packed piece: the local one to gather it in, and the remote one to write it to."""

    local: int
    remote: int


class Piece(msgspec.Struct, frozen=True):
    """A part of a chunk on its way to one decode rank: one write, one notice.

    Attributes:
        ranges: Tokens of the piece by component; no range is empty.
        pages: Source pages of the chunk by component.
        granted: All destination pages of the grant by component.
        notice: Notice to send when every byte has landed, without the fields that only planning determines.
        granted_at: When the grant arrived, in seconds of the clock of events.
        queued_at: When the piece was queued, by the same clock.
        slots: Staging slots to pack the piece through; None to write it directly.
        must_pack: Whether to pack the piece even if a direct write is faster.
    """

    delivery: DeliveryId
    seq: int
    ranges: Mapping[str, TokenRange]
    pages: Mapping[str, PageTable]
    grant: Grant
    granted: Mapping[str, PageTable]
    link: PeerRoute
    notice: Notice
    cost: Cost
    layers: LayerRange = ALL_LAYERS
    queued_at: float = 0.0
    granted_at: float = 0.0
    slots: PieceSlots | None = None
    must_pack: bool = False


class Reply(msgspec.Struct, frozen=True):
    """Send a message over a connection."""

    connection: bytes
    message: Message


class CheckHello(msgspec.Struct, frozen=True):
    """Compare a decode rank's Hello with this rank's layout, connect the transport to it, then report HelloChecked."""

    connection: bytes
    hello: Hello


class DisconnectTransport(msgspec.Struct, frozen=True):
    """Release what the transport holds for an incarnation of a decode rank that has left."""

    peer: PeerId


class AwaitData(msgspec.Struct, frozen=True):
    """Wait off the event loop until the device has computed a piece, then report DataReady.

    `wait` numbers the waits within the delivery: the piece's `seq` is reused after a quiesce.
    """

    delivery: DeliveryId
    wait: int
    ready: ReadyEvent


class PostPiece(msgspec.Struct, frozen=True):
    """Plan and post a piece now. If it has slots but is written directly, report PieceWentDirect."""

    piece: Piece


class PlanPiece(msgspec.Struct, frozen=True):
    """Plan a piece off the event loop, with digests if the grant asks for them, then report PlanFinished."""

    piece: Piece


class PostPlan(msgspec.Struct, frozen=True):
    """Post a plan that PlanFinished reported."""

    delivery: DeliveryId
    seq: int
    notice: Notice


class DropPlan(msgspec.Struct, frozen=True):
    """Drop a plan that PlanFinished reported, because the transfer has ended."""

    delivery: DeliveryId
    seq: int


class YieldTurn(msgspec.Struct, frozen=True):
    """Yield to the event loop, then report TurnContinued: more pieces can be posted."""


class AdmitChunk(msgspec.Struct, frozen=True):
    """Let a call go on that has waited for capacity (`ChunkWaits`). It offers its chunk, then `WaitEnded` follows."""

    room: RoomId
    call: int


class ReportGranted(msgspec.Struct, frozen=True):
    """Report to the engine that every decode rank has granted a room, and which tokens of each component they want."""

    room: RoomId
    wanted: dict[str, TokenRange]


class ReportQuiesced(msgspec.Struct, frozen=True):
    """Report that no post reads a room's pages any more; `resume_at` is None if all chunks are posted."""

    room: RoomId
    resume_at: int | None


class ReportSender(msgspec.Struct, frozen=True):
    """Report the outcome and memory state of a sent room to the engine."""

    room: RoomId
    outcome: Outcome
    memory: Memory
    failure: Failure | None


class PassOffer(msgspec.Struct, frozen=True):
    """Pass the offer of a decode rank to the engine, which decides."""

    peer: PeerId
    offer: Offer


class WithdrawOffer(msgspec.Struct, frozen=True):
    """Tell the engine that an offer cannot be accepted any more."""

    peer: PeerId
    number: int


# On a decode rank --------------------------------------------------------------------------------------------------


class SendMessage(msgspec.Struct, frozen=True):
    """Send a message to a prefill rank."""

    peer: PeerId
    message: Message


class LookUp(msgspec.Struct, frozen=True):
    """Ask the directory for the ranks of an instance; InstanceFound repeats this number, or a later one."""

    instance: InstanceRef
    number: int = 0


class CompileRoutes(msgspec.Struct, frozen=True):
    """Compile the route from each rank of an instance, then report RoutesCompiled."""

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
    """Check whether a prefill rank's port still accepts connections, then report ProbeFinished."""

    peer: PeerId
    endpoint: str


class ProbeAddress(msgspec.Struct, frozen=True):
    """Check whether every host of an address refuses connections, then report AddressProbed with the same number."""

    instance: InstanceAddress
    number: int


class WaitForFence(msgspec.Struct, frozen=True):
    """Wait until no write of a terminated process can still land, then report PeerFenced; or report FenceImpossible.

    `domain` is from its Welcome, and `number` is larger than that of every earlier wait.
    """

    peer: PeerId
    domain: bytes = b""
    number: int = 0


class WaitForLanding(msgspec.Struct, frozen=True):
    """Wait until nothing that a living process has in flight for a transfer can still land, then report Landed.

    Its message says where to look, and is repeated while this wait lasts. `number` is larger than that of every earlier
    wait.
    """

    peer: PeerId
    drained: Drained
    number: int


class NoteEnds(msgspec.Struct, frozen=True):
    """In waits for last bytes up to a number, leave out the sound connections that a living rank has listed since.

    Only waits up to `number` had begun when it was asked. Its `ends` replace those that it has listed before.
    """

    peer: PeerId
    number: int
    ends: tuple[bytes, ...]


class WatchNotices(msgspec.Struct, frozen=True):
    """Make the transport poll for notices at a high rate, or at a low one."""

    active: bool


DRIFT: Final = 2e-4
"""How much the clocks of two hosts drift apart in a second, at most, in seconds; quartz does 1e-4 at worst."""


class ClockOffset(NamedTuple):
    """By how much the clock of this rank is ahead of a peer's, in seconds: between `low` and `high`, as found at `at`.

    This rank has read its clock before and after the peer has read its own, so `high - low` is a round trip.
    """

    low: float
    high: float
    at: float

    def widened(self, now: float) -> "ClockOffset":
        """Return the bounds at a later time, as far as clocks drift apart."""
        drift_s = DRIFT * (now - self.at)
        return ClockOffset(self.low - drift_s, self.high + drift_s, now)


class LastPiece(msgspec.Struct, frozen=True):
    """The piece that completed a transfer, and when it went through the stages on this side, by the clock of events.

    Attributes:
        engine_rank: Engine rank of the prefill rank that has sent it.
        stamps: When it went through the stages on the other side, by the clock of that rank; None if it did not tell.
        asked_at: When the pages were granted.
        landed_at: When the transport found its notice.
        arrived_at: When the rank handled its notice.
        clock: The offset of that rank's clock, if it has answered a Ping.
    """

    engine_rank: int
    stamps: Stamps | None
    asked_at: float
    landed_at: float
    arrived_at: float
    clock: ClockOffset | None


class ReceivedRoom(msgspec.Struct, frozen=True):
    """The result of a complete transfer.

    Attributes:
        metadata: Metadata from the prefill engine by engine rank, without ranks that sent none.
        num_bytes: Bytes written by all ranks together.
        num_notices: Number of notices received.
        first_notice_at: When the first notice arrived, in seconds of the clock of events.
        last: The piece that completed it; None if nothing was to be sent.
    """

    metadata: dict[int, bytes] = msgspec.field(default_factory=dict)
    num_bytes: int = 0
    num_notices: int = 0
    first_notice_at: float = 0.0
    last: LastPiece | None = None


class WrittenBy(NamedTuple):
    """What one prefill rank reports to have written: all of its notices, in order."""

    rank: ConnectedRank
    notices: tuple[Notice, ...]


class VerifyDigests(msgspec.Struct, frozen=True):
    """Compare the received bytes with the digests of notices, then report DigestsVerified; hold pages until then."""

    opened: ReceiveOpened
    written: tuple[WrittenBy, ...]


class ScatterStaged(msgspec.Struct, frozen=True):
    """Copy a packed piece from its staging slot into the pages, then report Scattered; pages are held until then."""

    opened: ReceiveOpened
    rank: ConnectedRank
    notice: Notice


class ReportOffer(msgspec.Struct, frozen=True):
    """Report to the engine that its offer was accepted, or has failed."""

    number: int
    failure: Failure | None


class ReportReceiver(msgspec.Struct, frozen=True):
    """Report the outcome and memory state of a received room to the engine, and the result, once it has succeeded."""

    room: RoomId
    generation: int
    outcome: Outcome
    memory: Memory
    failure: Failure | None
    received: ReceivedRoom | None


# On both -----------------------------------------------------------------------------------------------------------


class CountAnomaly(msgspec.Struct, frozen=True):
    """Count an anomaly that the core ignored, and log it at a bounded rate, both under the name of its kind."""

    kind: str
    peer: PeerId | None
    room: RoomId | None = None
    detail: str = ""


class LogEvent(msgspec.Struct, frozen=True):
    """Log an event that an operator may act on."""

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
    | YieldTurn
    | AdmitChunk
    | ReportGranted
    | ReportQuiesced
    | ReportSender
    | PassOffer
    | WithdrawOffer
    | CountAnomaly
    | LogEvent
)

DecodeEffect = (
    SendMessage
    | LookUp
    | CompileRoutes
    | Connect
    | Disconnect
    | ProbeAddress
    | ProbePeer
    | WaitForFence
    | WaitForLanding
    | NoteEnds
    | WatchNotices
    | VerifyDigests
    | ScatterStaged
    | ReportReceiver
    | ReportOffer
    | CountAnomaly
    | LogEvent
)
