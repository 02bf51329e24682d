"""The messages between ranks, as one tagged union. Pure: sockets are in `channel`, bytes in `codec`.

Version history:
    1: first version.
    2: a Notice may cover a range of layers (`layers`).
    3: standard names for messages and fields; Welcome and Refuse repeat the attempt that they answer; Decline and
       RegistrationConflict are new; Goodbye has `fenced`; Welcome has `domain` and `endpoint`; Hello names a shared
       transport agent. Versions 1 and 2 were never deployed and are no longer supported. Lookup and Records have
       numbers, and a Lookup may omit the instance name; a rank that serves as its instance's directory sends Refuse to
       ranks of other instances. Rooms may be strings. Announce is new. Announce, Grant and Decline may have a
       capability. Every text, number and collection has a bound; a lease is at most ten minutes. Page tables are
       packed (`kvflow.geometry.packed_pages`); long ones are asked for with PagesQuery and come as GrantedPages.
       Welcome tells the limits of prefill. A Ping may ask for the ends of data connections.

Rules for changes: the tag is the first field; a new field has a default; a field never changes its meaning; a message
that an old peer cannot ignore needs a new version.
"""

from typing import Annotated, Final, NamedTuple

import msgspec

from kvflow.addresses import check_endpoint
from kvflow.config import MAX_INSTANCE_CHARACTERS, MAX_LEASE_S, MAX_METADATA_BYTES, MAX_SLOTS_PER_PEER, NUM_PRIORITIES
from kvflow.errors import ConfigError, FailureReason, RemoteProtocolError, Stage
from kvflow.geometry.layout import MAX_COMPONENTS, KVLayout, Name
from kvflow.geometry.ranges import ALL_LAYERS, MAX_TOKENS, LayerRange
from kvflow.geometry.routes import Route
from kvflow.room import MAX_ROOM, MAX_ROOM_BYTES

__all__ = [
    "MAX_CAPABILITY",
    "MAX_DOMAIN_BYTES",
    "OLDEST_VERSION",
    "PROTOCOL_VERSION",
    "Ack",
    "Announce",
    "AnyMessage",
    "Cancel",
    "Capability",
    "Decline",
    "Drained",
    "Failed",
    "Failure",
    "Goodbye",
    "Grant",
    "GrantedPages",
    "Hello",
    "Lookup",
    "Message",
    "Notice",
    "PagesQuery",
    "PeerId",
    "Ping",
    "Pong",
    "RankAddress",
    "RankId",
    "RankRecord",
    "Records",
    "Refuse",
    "Register",
    "Registered",
    "RegistrationConflict",
    "SealedRecord",
    "SealedRecords",
    "SealedRegister",
    "SlotQuery",
    "SlotReleased",
    "Staged",
    "StagingWindow",
    "Unregister",
    "Welcome",
]

PROTOCOL_VERSION = 3

OLDEST_VERSION = 3
"""The lowest protocol version that is still supported."""

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
"""A duration. Messages contain no timestamps, except in capabilities, because clocks differ between hosts."""

Lease = Annotated[float, msgspec.Meta(gt=0, le=MAX_LEASE_S)]

LookupTime = Annotated[float, msgspec.Meta(gt=0, le=60)]

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]

Number = Annotated[int, msgspec.Meta(ge=0)]
"""MessagePack limits integers to less than 2**64."""

Position = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]

InstanceName = Annotated[str, msgspec.Meta(max_length=MAX_INSTANCE_CHARACTERS)]

MAX_RANKS_TOLD = 4_096
"""Maximum number of ranks in the answer to a Lookup."""

MAX_METADATA_OF_TRANSPORT = 2**20

MAX_DETAIL = 1_024
"""Maximum length of a failure detail, in characters. Both sender and receiver truncate longer ones."""

MAX_DOMAIN_BYTES = 256

MAX_CAPABILITY: Final = 4_096
"""Maximum length of a capability, in characters."""

MAX_ENDS: Final = 256
"""Maximum number of data connections that a Pong lists."""

PAGES_INLINE: Final = 8_192
"""Maximum number of pages in the page tables that a Grant itself carries."""

PAGES_PER_PART: Final = 65_536
"""Number of pages of a long page table that one GrantedPages carries; the last one carries the rest."""

PARTS_PER_QUERY: Final = 4
"""Maximum number of parts that one PagesQuery asks for, so that decode ranks take turns. A longer one is answered with
the first of them, so that no answer holds up the event loop."""

PAGE_BYTES: Final = 4
"""Size of a page index in a page table that is not packed."""

DEFAULT_MAX_PAGES: Final = 2**25

LookupNumber = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
"""Large enough for a new number with every room."""

AgentName = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]

Priority = Annotated[int, msgspec.Meta(ge=0, lt=NUM_PRIORITIES)]


Capability = Annotated[str, msgspec.Meta(max_length=MAX_CAPABILITY)]

WireRoom = (
    Annotated[int, msgspec.Meta(ge=0, le=MAX_ROOM)]
    | Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ROOM_BYTES)]
)
"""A room in a message. The length limit counts characters here, not bytes, which is still a bound."""


class RankId(NamedTuple):
    """A worker process of a serving instance. The id stays the same when the process restarts."""

    instance: InstanceName
    engine_rank: Count

    def __str__(self) -> str:
        return f"{self.instance}/{self.engine_rank}"


class PeerId(NamedTuple):
    """One incarnation of a rank: `incarnation` is random and new at each start."""

    rank: RankId
    incarnation: Number

    def __str__(self) -> str:
        return f"{self.rank}@{self.incarnation:016x}"


class Failure(msgspec.Struct, frozen=True):
    """Why a transfer failed, as sent to every rank that takes part in it.

    Attributes:
        reason: Machine-readable reason.
        stage: Stage that detected the failure.
        detected_by: The rank that detected it first, as "instance/engine_rank".
        detail: Human-readable explanation.
    """

    reason: FailureReason
    stage: Stage
    detected_by: Annotated[str, msgspec.Meta(max_length=2 * MAX_INSTANCE_CHARACTERS)]
    detail: str

    def __post_init__(self) -> None:
        if len(self.detail) > MAX_DETAIL:
            msgspec.structs.force_setattr(self, "detail", self.detail[:MAX_DETAIL])


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of every message."""


def _check_endpoint(endpoint: str) -> None:
    try:
        check_endpoint("endpoint", endpoint)
    except ConfigError as error:
        raise RemoteProtocolError("record has no usable endpoint", endpoint=endpoint) from error


class RankAddress(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a rank.

    Attributes:
        peer: The rank's current incarnation.
        num_ranks: Number of ranks in the instance, which is complete when all of them are registered.
        endpoint: ZMQ address of the rank's control socket.
        backend: Name of its transport.

    Raises:
        RemoteProtocolError: The engine rank is not below `num_ranks`, or the endpoint is not a TCP address.
    """

    peer: PeerId
    num_ranks: Annotated[int, msgspec.Meta(ge=1, lt=2**32)]
    endpoint: Annotated[str, msgspec.Meta(max_length=512)]
    backend: Name

    def __post_init__(self) -> None:
        engine_rank = self.peer.rank.engine_rank
        if not 0 <= engine_rank < self.num_ranks:
            raise RemoteProtocolError(
                "record has an engine rank outside its instance", engine_rank=engine_rank, num_ranks=self.num_ranks
            )
        _check_endpoint(self.endpoint)


class RankRecord(RankAddress, frozen=True, kw_only=True):
    """A rank's address and KV layout, as published in the directory."""

    layout: KVLayout


class SealedRecord(RankAddress, frozen=True, kw_only=True):
    """A record as a directory stores and forwards it. The directory does not decode the layout."""

    layout: msgspec.Raw

    def __post_init__(self) -> None:
        super().__post_init__()
        msgspec.structs.force_setattr(self, "layout", self.layout.copy())  # a slice would keep the whole message alive

    @property
    def num_bytes(self) -> int:
        """Approximate size in bytes."""
        return len(memoryview(self.layout)) + len(self.endpoint)


class Register(Message, frozen=True, tag="register"):
    """Rank -> registry: store this record, or renew its lease. It expires `lease_s` after the last Register."""

    record: RankRecord
    lease_s: Lease


class SealedRegister(Message, frozen=True, tag="register"):
    """A Register as a directory decodes it."""

    record: SealedRecord
    lease_s: Lease


class Registered(Message, frozen=True, tag="registered"):
    """Registry -> rank: your record is stored."""

    peer: PeerId


class RegistrationConflict(Message, frozen=True, tag="registration_conflict"):
    """Registry -> rank: another running process registers the same rank.

    Attributes:
        peer: The incarnation that this message is sent to.
        other: The other incarnation.
        other_endpoint: Control address of the other incarnation.
        refused: True if lookups return `other` instead of `peer`.
    """

    peer: PeerId
    other: PeerId
    other_endpoint: Annotated[str, msgspec.Meta(max_length=512)]
    refused: bool


class Unregister(Message, frozen=True, tag="unregister"):
    """Rank -> registry: remove this incarnation."""

    peer: PeerId


class Lookup(Message, frozen=True, tag="lookup"):
    """Rank -> registry, or prefill rank serving as its instance's directory: send an instance's records once complete.

    Attributes:
        instance: Name of the instance; None for the instance of the rank that answers. Such a rank returns its own
            instance whatever the name.
        timeout_s: How long the directory may wait until all ranks are registered.
        number: The answer repeats the highest number received, which shows that it is newer than that lookup.
    """

    instance: InstanceName | None
    timeout_s: LookupTime
    number: LookupNumber = 0


class Records(Message, frozen=True, tag="records"):
    """The answer to a Lookup.

    Attributes:
        instance: Name of the instance; None if a registry received a Lookup without a name.
        records: The instance's ranks by engine rank; incomplete if the lookup timed out.
        number: The highest number of the lookups that this answers.
    """

    instance: InstanceName | None
    records: Annotated[tuple[RankRecord, ...], msgspec.Meta(max_length=MAX_RANKS_TOLD)]
    number: LookupNumber = 0


class SealedRecords(Message, frozen=True, tag="records"):
    """Records as a directory sends them."""

    instance: InstanceName | None
    records: tuple[SealedRecord, ...]
    number: LookupNumber = 0


class StagingWindow(msgspec.Struct, frozen=True, array_like=True):
    """Memory of a decode rank, reserved for packed pieces from one incarnation of a prefill rank.

    Attributes:
        address: Address of the first slot; the slots are contiguous.
        slot_bytes: Size of a slot in bytes.
        num_slots: Number of slots.
    """

    address: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    slot_bytes: Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOTS_PER_PEER)]

    def slot_address(self, slot: int) -> int:
        """Return the address of a slot."""
        return self.address + slot * self.slot_bytes


class Hello(Message, frozen=True, tag="hello"):
    """Decode -> prefill: start a handshake.

    Attributes:
        peer: The sender.
        to: The incarnation that the sender expects to reach.
        attempt: Counts the sender's handshakes. The answer repeats it; a Hello with a lower attempt than the last one
            is ignored.
        versions: Lowest and highest supported protocol version.
        lease_s: How long the sender may be silent before it counts as dead.
        backend: Name of the sender's transport.
        backend_metadata: What the receiver's transport needs in order to write to the sender's memory.
        layout: The sender's KV layout.
        route: The cells that the receiver is to send.
        staging: Where the receiver may write packed pieces; None if it must not send any.
        agent: Name of the sender's transport agent, if it shares one with other ranks of its process; by default the
            name of the incarnation.
        handshake_s: How long the handshake may take.
    """

    peer: PeerId
    to: PeerId
    attempt: Count
    versions: tuple[Count, Count]
    lease_s: Lease
    backend: Name
    backend_metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_OF_TRANSPORT)]
    layout: KVLayout
    route: Route
    staging: StagingWindow | None = None
    agent: AgentName | None = None
    handshake_s: Seconds = 5.0


class Welcome(Message, frozen=True, tag="welcome"):
    """Prefill -> decode: accepts a Hello.

    Attributes:
        peer: The sender.
        attempt: Repeats the attempt of the Hello.
        version: Protocol version to use.
        domain: Where the transport's bytes in flight can be seen; see `kvflow.backends.base.Backend.domain`.
        endpoint: ZMQ address of the rank's control socket; empty if not given. The process has ended once this address
            refuses connections, or another incarnation answers there. An address from a directory proves nothing,
            because a directory may lie.
        max_pages: Maximum number of pages in all page tables of a Grant: `Limits.pending_grant_bytes` of the sender
            holds two of them.

    Raises:
        RemoteProtocolError: The endpoint is not a TCP address.
    """

    peer: PeerId
    attempt: Count
    version: Count
    domain: Annotated[bytes, msgspec.Meta(max_length=MAX_DOMAIN_BYTES)] = b""
    endpoint: Annotated[str, msgspec.Meta(max_length=512)] = ""
    max_pages: Number = DEFAULT_MAX_PAGES

    def __post_init__(self) -> None:
        if self.endpoint:
            _check_endpoint(self.endpoint)


class Refuse(Message, frozen=True, tag="refuse"):
    """Prefill -> decode: rejects a Hello, or requires a new handshake.

    A prefill rank or registry also sends it to reject a Register, Unregister or Lookup.

    Attributes:
        peer: The sender.
        to: The incarnation that is refused; None if unknown.
        detail: Human-readable reason.
        attempt: Repeats the attempt of the Hello that is rejected; None if a new handshake is needed.
    """

    peer: PeerId
    to: PeerId | None
    detail: str
    attempt: Count | None = None

    def __post_init__(self) -> None:
        if len(self.detail) > MAX_DETAIL:
            msgspec.structs.force_setattr(self, "detail", self.detail[:MAX_DETAIL])


class Announce(Message, frozen=True, tag="announce"):
    """Decode -> prefill: asks the receiver to keep a room's pages until the sender has pages to grant.

    A Grant or Decline of the same generation follows. Answered only if the room fails, by Failed.

    Attributes:
        room: The room that will be granted.
        generation: As in Grant.
        num_decode_ranks: Number of decode ranks that request this room.
        timeout_s: Time left until the decode rank gives up.
        capability: Permits the sender to receive the room, see `kvflow.gate.capability`; empty if it has none.
    """

    room: WireRoom
    generation: Number
    num_decode_ranks: Annotated[int, msgspec.Meta(ge=1, lt=2**32)]
    timeout_s: Seconds
    capability: Capability = ""


class Grant(Message, frozen=True, tag="grant"):
    """Decode -> prefill: permits writes to these pages.

    Attributes:
        room: The room to send.
        generation: Identifies this attempt to receive the room; the decode rank never reuses one.
        token: Random. Every Notice must repeat it, because in-band notices carry no other proof of their origin.
        ranges: Requested token positions `[start, stop)`, by component.
        pages: Pages that receive them, by component, as little-endian uint32. On the wire they are packed.
        num_pages: Number of pages by component, instead of `pages`, if they are more than `PAGES_INLINE`. The receiver
            asks for them with PagesQuery.
        num_decode_ranks: Number of decode ranks that request this room.
        timeout_s: Time left until the decode rank gives up.
        progress_s: After the first bytes have arrived, how long the decode rank waits for more before it gives up.
        priority: Priority class of the transfer; 0 is sent first.
        digest: True if notices must carry digests of the written bytes.
        capability: As in Announce.
    """

    room: WireRoom
    generation: Number
    token: Number
    ranges: Annotated[dict[Name, tuple[Position, Position]], msgspec.Meta(max_length=MAX_COMPONENTS)]
    pages: Annotated[dict[Name, bytes], msgspec.Meta(max_length=MAX_COMPONENTS)]
    num_decode_ranks: Annotated[int, msgspec.Meta(ge=1, lt=2**32)]
    timeout_s: Seconds
    progress_s: Seconds
    priority: Priority
    digest: bool
    capability: Capability = ""
    num_pages: Annotated[dict[Name, Count], msgspec.Meta(max_length=MAX_COMPONENTS)] = {}

    @property
    def parts(self) -> list[tuple[str, int, int]]:
        """The parts in which the pages of `num_pages` are sent: component, first page and the page after the last."""
        return [
            (name, first, min(first + PAGES_PER_PART, count))
            for name, count in self.num_pages.items()
            for first in range(0, count, PAGES_PER_PART)
        ]


class PagesQuery(Message, frozen=True, tag="pages_query"):
    """Prefill -> decode: asks for parts `[start, stop)` of the pages of a Grant (`Grant.parts`).

    A receiver of Grants asks when it has memory and time for them, so decode ranks cannot send more than it can take.
    """

    room: WireRoom
    generation: Number
    start: Count
    stop: Count


class GrantedPages(Message, frozen=True, tag="granted_pages"):
    """Decode -> prefill: one part of the pages of a Grant, see `Grant.parts`; answers a PagesQuery.

    Attributes:
        room: As in Grant.
        generation: As in Grant.
        part: Number of the part.
        pages: The pages as little-endian uint32. On the wire they are packed.
    """

    room: WireRoom
    generation: Number
    part: Count
    pages: bytes


class Decline(Message, frozen=True, tag="decline"):
    """Decode -> prefill: the sender will not receive this room and has granted no pages for it.

    The receiver need not keep its pages. Answered by Drained.

    Attributes:
        room: The room that is declined.
        generation: As in Grant.
        failure: Why the room is declined.
        capability: As in Announce.
        peer: The sender, if there was no handshake, for example because it is refused; else None.
        to: The incarnation that is meant to receive this, together with `peer`.
    """

    room: WireRoom
    generation: Number
    failure: Failure
    capability: Capability = ""
    peer: PeerId | None = None
    to: PeerId | None = None


class Staged(msgspec.Struct, frozen=True, array_like=True):
    """Where the bytes of a notice are, if they are packed in a staging slot and not yet in the pages.

    Attributes:
        slot: Index of the slot in the window that was given to the sender of the notice.
        head_major: Order of the cells, see `kvflow.geometry.pack`.
    """

    slot: Count
    head_major: bool


class Notice(Message, frozen=True, tag="notice"):
    """Prefill -> decode: the bytes of one chunk, or of one piece of a large chunk, are in the receiver's memory.

    Attributes:
        room: The room that was sent.
        generation: Repeated from the Grant.
        token: Repeated from the Grant.
        engine_rank: Engine rank of the sender.
        seq: Counts the notices of this rank in this generation, from 0.
        ranges: Written token positions `[start, stop)`, by component.
        num_bytes: Number of bytes written.
        last: True if no notice of this rank has a higher `seq`.
        metadata: Opaque bytes from the prefill engine to the decode engine; only on the last notice.
        digests: If the Grant requested them: by component in `ranges`, the digest of the written cells in logical
            order.
        layers: Written layers `[start, stop)`; up to the last layer if `stop` is None; all layers if None. The notices
            of a chunk have consecutive numbers and the same ranges, from layer 0 to the notice without a `stop`.
        staged: The staging slot that holds the bytes until the decode rank scatters them; None if they are in the
            pages.
    """

    room: WireRoom
    generation: Number
    token: Number
    engine_rank: Count
    seq: Count
    ranges: Annotated[dict[Name, tuple[Position, Position]], msgspec.Meta(max_length=MAX_COMPONENTS)]
    num_bytes: Number
    last: bool = False
    metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES)] = b""
    digests: Annotated[dict[Name, Number], msgspec.Meta(max_length=MAX_COMPONENTS)] = {}
    layers: tuple[Count, Count | None] | None = None
    staged: Staged | None = None

    @property
    def layer_range(self) -> LayerRange:
        """The layers that were written."""
        return self.layers or ALL_LAYERS


class SlotReleased(Message, frozen=True, tag="slot_released"):
    """Decode -> prefill: the sender has finished reading this notice's staging slot and will not read it again."""

    room: WireRoom
    generation: Number
    engine_rank: Count
    seq: Count


class SlotQuery(Message, frozen=True, tag="slot_query"):
    """Prefill -> decode: asks for SlotReleased again, in case it was lost. Not answered while the slot is in use."""

    room: WireRoom
    generation: Number
    engine_rank: Count
    seq: Count


class Ack(Message, frozen=True, tag="ack"):
    """Decode -> prefill: every byte of this generation has arrived. Only now do both sides report success."""

    room: WireRoom
    generation: Number


class Cancel(Message, frozen=True, tag="cancel"):
    """Decode -> prefill: stop sending, and send Drained once nothing can be written for this generation any more.

    Attributes:
        room: The room of the transfer.
        generation: Its generation.
        failure: Why it ended.
        has_landed: What was in flight has landed, or cannot any more.
    """

    room: WireRoom
    generation: Number
    failure: Failure
    has_landed: bool = False


class Drained(Message, frozen=True, tag="drained"):
    """Prefill -> decode: the sender can no longer write anything for this generation.

    Attributes:
        room: The room of the transfer.
        generation: Its generation.
        engine_rank: Engine rank of the sender.
        failure: Why the transfer ended, if the sender knows; repeats a Failed that may have been lost.
        in_flight: If not empty, the sender writes nothing more, but bytes of failed writes may still land, and this is
            where they can be seen (`kvflow.backends.base.Backend.domain`). The receiver answers with Cancel when none
            can land any more.
    """

    room: WireRoom
    generation: Number
    engine_rank: Count
    failure: Failure | None = None
    in_flight: Annotated[bytes, msgspec.Meta(max_length=MAX_DOMAIN_BYTES)] = b""


class Failed(Message, frozen=True, tag="failed"):
    """Prefill -> decode: this transfer will not succeed.

    Attributes:
        room: The room of the transfer.
        generation: Its generation.
        engine_rank: Engine rank of the sender.
        failure: Why the transfer failed.
        drained: True if the sender can no longer write anything for this generation. If False, a Drained follows once
            that holds, which is never if the bytes of a failed write may still land at any time.
    """

    room: WireRoom
    generation: Number
    engine_rank: Count
    failure: Failure
    drained: bool


class Ping(Message, frozen=True, tag="ping"):
    """Decode -> prefill: I am alive. Prefill -> decode, when another process claims to be that rank: are you alive?

    Attributes:
        peer: The sender.
        asks_ends: From decode: if not 0, the Pong repeats this number and has `ends`. It grows with each wait for last
            bytes.
    """

    peer: PeerId
    asks_ends: Number = 0


class Pong(Message, frozen=True, tag="pong"):
    """Either direction: answers a Ping.

    Attributes:
        peer: The sender.
        asks_ends: As in the Ping that is answered.
        ends: From prefill, if asked: its sound data connections, see `kvflow.backends.base.Backend.ends_to`.
    """

    peer: PeerId
    asks_ends: Number = 0
    ends: Annotated[tuple[Annotated[bytes, msgspec.Meta(max_length=18)], ...], msgspec.Meta(max_length=MAX_ENDS)] = ()


class Goodbye(Message, frozen=True, tag="goodbye"):
    """Either direction: this incarnation is leaving.

    Attributes:
        peer: The sender.
        failure: The reason, if the shutdown is not orderly.
        fenced: From prefill: True if nothing that this incarnation has written can land any more.
    """

    peer: PeerId
    failure: Failure | None = None
    fenced: bool = False


AnyMessage = (
    Register
    | Registered
    | RegistrationConflict
    | Unregister
    | Lookup
    | Records
    | Hello
    | Welcome
    | Refuse
    | Announce
    | Grant
    | GrantedPages
    | PagesQuery
    | Decline
    | Notice
    | SlotReleased
    | SlotQuery
    | Ack
    | Cancel
    | Drained
    | Failed
    | Ping
    | Pong
    | Goodbye
)
