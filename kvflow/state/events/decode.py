"""Events of a decode core, and what its engine asks for."""

from collections.abc import Mapping

import msgspec

from kvflow.geometry.expected import ExpectedBytes
from kvflow.geometry.ranges import TokenRange
from kvflow.geometry.routes import RegionSlice, Route
from kvflow.room import RoomId
from kvflow.state.events.shared import CloseStarted, DrainStarted, QuarantineReleased, TimePassed, TransportClosed
from kvflow.state.quarantine import NO_MEMORY, Footprint
from kvflow.wire.messages import (
    DEFAULT_MAX_PAGES,
    AnyMessage,
    Failure,
    Notice,
    Offer,
    PeerId,
    RankRecord,
    StagingWindow,
)

__all__ = [
    "AddressProbed",
    "ConnectFailed",
    "ConnectedRank",
    "ConnectionLost",
    "ConnectionObstructed",
    "ConnectionRefused",
    "DecodeEvent",
    "DigestsVerified",
    "FenceImpossible",
    "InstanceAddress",
    "InstanceDoubted",
    "InstanceFound",
    "InstanceRef",
    "Landed",
    "LookUpRefused",
    "MessageReceived",
    "NoticeDelivered",
    "OfferMade",
    "OfferWithdrawn",
    "PeerFenced",
    "ProbeFinished",
    "RankRoute",
    "ReceiveAborted",
    "ReceiveGranted",
    "ReceiveOpened",
    "RoomDeclined",
    "RoutesCompiled",
    "Scattered",
]


class InstanceAddress(msgspec.Struct, frozen=True):
    """A prefill instance that is looked up at an address instead of in the configured registry.

    The address, "tcp://host:port", is that of a rank of the instance, or of a registry. Without a name, it is whichever
    instance answers there.
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
        ranges: Tokens of each wanted component.
        pages: Destination pages of the same components, encoded as in the Grant.
        timeout_s: Time limit of the whole transfer, in seconds; for an announced room, the time until it has pages.
        priority: Priority class of the transfer; 0 is served first.
        secret: 16 random bytes, from which the token of each grant is derived.
        footprint: Memory that the pages occupy in the pools.
        issuer: Incarnation of the prefill rank that issued the room's ticket, if there is one; no other incarnation may
            serve the room.
        capability: Proof to the prefill rank that this instance may receive the room; empty if there is none.
        is_own_address: Whether the issuer itself listens at the address of `instance`.
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
    is_own_address: bool = False


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

    The failure is for the prefill ranks.
    """

    room: RoomId
    generation: int
    instance: InstanceRef
    failure: Failure
    issuer: PeerId | None = None
    capability: str = ""


class OfferMade(msgspec.Struct, frozen=True):
    """The engine offers a room to an instance."""

    to: InstanceRef
    offer: Offer


class OfferWithdrawn(msgspec.Struct, frozen=True):
    """The engine does not wait for the answer to an offer any more."""

    number: int


class InstanceFound(msgspec.Struct, frozen=True):
    """The directory has answered a lookup with this number, or a later one: its ranks by engine rank."""

    instance: InstanceRef
    records: tuple[RankRecord, ...]
    number: int = 0


class RankRoute(msgspec.Struct, frozen=True):
    """What this rank wants from one prefill rank: a route as given in the Hello, and its bytes by component."""

    route: Route
    expected: Mapping[str, ExpectedBytes]


class RoutesCompiled(msgspec.Struct, frozen=True):
    """Routes from every rank of an instance were compiled, by engine rank; none if the layouts are not compatible."""

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
    """Why there is no connection to a prefill rank, such as a resource that `is_short`; empty once there is one."""

    peer: PeerId
    detail: str
    is_short: bool = False


class ConnectionRefused(msgspec.Struct, frozen=True):
    """A prefill rank rejected this rank's key, or the reverse. The shell keeps retrying."""

    peer: PeerId
    detail: str


class LookUpRefused(msgspec.Struct, frozen=True):
    """The directory rejected this rank's key, or the reverse, or there is no connection. The shell keeps retrying.

    It concerns an instance that was, or could be, looked up there, or all names. If `is_short`, this process lacks the
    descriptors for a connection.
    """

    instance: InstanceRef | None
    detail: str
    is_short: bool = False


class InstanceDoubted(msgspec.Struct, frozen=True):
    """A directory does not list an instance any more, or lists another process. This is no proof: it may lie."""

    instance: str


class ConnectionLost(msgspec.Struct, frozen=True):
    """The connection to a prefill rank broke; the shell is reconnecting."""

    peer: PeerId


class MessageReceived(msgspec.Struct, frozen=True):
    """A prefill rank sent a message, which also proves that it is alive.

    Attributes:
        host: IP address of the host that it came from, of a Welcome or a Refuse; empty if unknown.
    """

    peer: PeerId
    message: AnyMessage
    host: str = ""


class NoticeDelivered(msgspec.Struct, frozen=True):
    """The transport delivered an in-band notice; only the token of its grant identifies the sender.

    It had found the notice `waited_s` before.
    """

    notice: Notice
    waited_s: float = 0.0


class ProbeFinished(msgspec.Struct, frozen=True):
    """A probe of a prefill rank's port has ended. If it `is_gone`, nothing listens there: the process has ended."""

    peer: PeerId
    is_gone: bool


class AddressProbed(msgspec.Struct, frozen=True):
    """A probe of the address of a ticket has ended: whether every host of it refuses connections.

    It began after the lookup with this number had been asked for. The address is only what a ticket says, so this
    proves nothing about pages.
    """

    instance: InstanceAddress
    number: int
    is_refused: bool


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
    """The received bytes were compared with their digests, if the outcome was not decided meanwhile.

    `failure` is None if all match, or if not all were compared.
    """

    generation: int
    failure: Failure | None


class Scattered(msgspec.Struct, frozen=True):
    """The scatter of a packed piece has ended, see `ScatterStaged`; without a failure, it is in the pages."""

    generation: int
    notice: Notice
    failure: Failure | None


DecodeEvent = (
    ReceiveOpened
    | ReceiveGranted
    | ReceiveAborted
    | RoomDeclined
    | OfferMade
    | OfferWithdrawn
    | InstanceFound
    | RoutesCompiled
    | ConnectFailed
    | ConnectionLost
    | ConnectionObstructed
    | ConnectionRefused
    | LookUpRefused
    | InstanceDoubted
    | MessageReceived
    | NoticeDelivered
    | ProbeFinished
    | AddressProbed
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
