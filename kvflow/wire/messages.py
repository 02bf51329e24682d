"""What ranks say to each other, as one tagged union. Pure: sockets are in `channel`, bytes in `codec`.

Version history:
    1: first version.
    2: a Notice may be of some layers only (`layers`).
    3: standard names for messages and fields; Welcome and Refuse repeat the attempt that they answer; Decline and
       RegistrationConflict are new; Goodbye says whether it is a fence; Welcome names a domain and an endpoint, and
       Hello an agent of the transport that ranks share. Versions 1 and 2 were never deployed and are not spoken any
       more. Lookup and Records have numbers, and a Lookup may leave the name of the instance to whoever answers; a
       rank that answers for its instance refuses to register others by Refuse. Rooms may be strings. Announce is new.
       Announce, Grant and Decline may have a capability. Every text, number and collection has a bound; a lease is ten
       minutes at most.

Rules for change: the tag stands first; a new field has a default; a field never changes its meaning; a message that an
old peer cannot ignore needs a new version.
"""

from typing import Annotated, NamedTuple

import msgspec

from kvflow.capability import MAX_CAPABILITY
from kvflow.config import (
    MAX_INSTANCE_CHARACTERS,
    MAX_LEASE_S,
    MAX_METADATA_BYTES,
    MAX_SLOTS_PER_PEER,
    NUM_PRIORITIES,
    check_endpoint,
)
from kvflow.errors import ConfigError, FailureReason, RemoteProtocolError, Stage
from kvflow.geometry.layout import MAX_COMPONENTS, KVLayout, Name
from kvflow.geometry.ranges import ALL_LAYERS, MAX_TOKENS, LayerRange
from kvflow.geometry.routes import Route
from kvflow.room import MAX_ROOM, MAX_ROOM_BYTES

__all__ = [
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
    "Hello",
    "Lookup",
    "Message",
    "Notice",
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
"""The lowest version that is still spoken."""

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
"""A duration. Clocks differ between hosts, so no point in time ever travels."""

Lease = Annotated[float, msgspec.Meta(gt=0, le=MAX_LEASE_S)]

LookupTime = Annotated[float, msgspec.Meta(gt=0, le=60)]

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]

Number = Annotated[int, msgspec.Meta(ge=0)]
"""MessagePack itself ends at 2**64."""

Position = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]

InstanceName = Annotated[str, msgspec.Meta(max_length=MAX_INSTANCE_CHARACTERS)]

MAX_RANKS_TOLD = 4_096
"""Ranks of one instance that an answer to a Lookup names at most."""

MAX_METADATA_OF_TRANSPORT = 2**20

MAX_DETAIL = 1_024
"""Characters of a reason that are kept; the rest is cut, on both sides."""

MAX_DOMAIN_BYTES = 256

LookupNumber = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
"""There may be one for each room."""

AgentName = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]

Priority = Annotated[int, msgspec.Meta(ge=0, lt=NUM_PRIORITIES)]


Capability = Annotated[str, msgspec.Meta(max_length=MAX_CAPABILITY)]

WireRoom = (
    Annotated[int, msgspec.Meta(ge=0, le=MAX_ROOM)]
    | Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ROOM_BYTES)]
)
"""A room in a message. Its length counts characters there, which bounds it as well."""


class RankId(NamedTuple):
    """A worker process of a serving instance; stays the same when the process restarts."""

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
    """Why a transfer failed, in a form that travels to every party of it.

    Attributes:
        reason: For a program.
        stage: Where it was detected.
        rank: The rank that detected it first, as "instance/engine_rank".
        detail: For a person.
    """

    reason: FailureReason
    stage: Stage
    rank: Annotated[str, msgspec.Meta(max_length=2 * MAX_INSTANCE_CHARACTERS)]
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
        num_ranks: Ranks of the whole instance; the instance is complete when all of them are registered.
        endpoint: ZMQ address of the rank's control socket.
        backend: Name of its transport.

    Raises:
        RemoteProtocolError: The rank is not one of the instance's, or the endpoint is no TCP address.
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
    """How to reach a rank and what it holds; published in the directory."""

    layout: KVLayout


class SealedRecord(RankAddress, frozen=True, kw_only=True):
    """A record as a directory keeps it and passes it on: whoever asks for it reads the layout, and nobody before."""

    layout: msgspec.Raw

    def __post_init__(self) -> None:
        super().__post_init__()
        msgspec.structs.force_setattr(self, "layout", self.layout.copy())  # else it keeps all of its message

    @property
    def num_bytes(self) -> int:
        """About how much it is."""
        return len(memoryview(self.layout)) + len(self.endpoint)


class Register(Message, frozen=True, tag="register"):
    """Rank -> registry: I am here; forget me unless I repeat this within `lease_s`."""

    record: RankRecord
    lease_s: Lease


class SealedRegister(Message, frozen=True, tag="register"):
    """A Register as a directory reads it."""

    record: SealedRecord
    lease_s: Lease


class Registered(Message, frozen=True, tag="registered"):
    """Registry -> rank: noted."""

    peer: PeerId


class RegistrationConflict(Message, frozen=True, tag="registration_conflict"):
    """Registry -> rank: another living process registers the same rank.

    Attributes:
        peer: The incarnation that this is sent to.
        other: The other one.
        other_endpoint: Where the other one listens.
        refused: Decode ranks are not sent to `peer`, but to `other`.
    """

    peer: PeerId
    other: PeerId
    other_endpoint: Annotated[str, msgspec.Meta(max_length=512)]
    refused: bool


class Unregister(Message, frozen=True, tag="unregister"):
    """Rank -> registry: I am leaving."""

    peer: PeerId


class Lookup(Message, frozen=True, tag="lookup"):
    """Rank -> registry, or prefill rank that answers for its instance: tell me about an instance when it is complete.

    Attributes:
        instance: Its name; None for that of the rank that answers, which says nothing of others in any case.
        timeout_s: How long to wait until all of its ranks are registered.
        number: The answer repeats the highest that was asked with, so that it shows which question it is later than.
    """

    instance: InstanceName | None
    timeout_s: LookupTime
    number: LookupNumber = 0


class Records(Message, frozen=True, tag="records"):
    """The answer to a Lookup: the ranks of an instance, by engine rank; incomplete if the time ran out.

    Attributes:
        instance: Its name; None if a registry was asked for no name.
        number: Of the Lookup.
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
    """Memory of a decode rank into which one incarnation of a prefill rank, and nobody else, may write packed pieces.

    Attributes:
        address: Of the first slot; the others follow without gaps.
        slot_bytes: Size of a slot.
        num_slots: How many there are.
    """

    address: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    slot_bytes: Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOTS_PER_PEER)]

    def slot_address(self, slot: int) -> int:
        """Address of a slot."""
        return self.address + slot * self.slot_bytes


class Hello(Message, frozen=True, tag="hello"):
    """Decode -> prefill, first: who I am, what I hold, what I want from you.

    Attributes:
        to: The incarnation that is meant.
        attempt: Counts the handshakes of the sender; an answer repeats it, and an older hello than the last is ignored.
        versions: Lowest and highest protocol version spoken.
        lease_s: Silence after which the sender must be taken for dead.
        backend_metadata: What the prefill rank's transport needs to write here.
        route: What the sender wants from the rank that reads this.
        staging: Where the rank that reads this may write packed pieces; nowhere if None.
        agent: Name of the sender's agent in the transport, if it shares one with other ranks of its process; else it is
            that of the incarnation.
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


class Welcome(Message, frozen=True, tag="welcome"):
    """Prefill -> decode: the answer to a Hello that fits.

    Attributes:
        domain: Where what the rank's transport leaves behind can be seen; see `kvflow.backends.base.Backend.domain`.
        endpoint: ZMQ address of the rank's control socket: its process has ended when nobody listens there, or somebody
            else. Where the reader has found it proves nothing, as a directory may lie. Empty if it is not said.

    Raises:
        RemoteProtocolError: The endpoint is no TCP address.
    """

    peer: PeerId
    attempt: Count
    version: Count
    domain: Annotated[bytes, msgspec.Meta(max_length=MAX_DOMAIN_BYTES)] = b""
    endpoint: Annotated[str, msgspec.Meta(max_length=512)] = ""

    def __post_init__(self) -> None:
        if self.endpoint:
            _check_endpoint(self.endpoint)


class Refuse(Message, frozen=True, tag="refuse"):
    """Prefill -> decode: the answer to a Hello that does not fit, or to a message without one; or the end of a peer.

    A prefill rank that answers for its instance also sends it to a rank that does not belong there but registers.

    Attributes:
        to: The incarnation that is refused; None if the sender of the message is not known.
        attempt: Of the Hello that this answers; None if it answers none: a new handshake is needed.
    """

    peer: PeerId
    to: PeerId | None
    detail: str
    attempt: Count | None = None

    def __post_init__(self) -> None:
        if len(self.detail) > MAX_DETAIL:
            msgspec.structs.force_setattr(self, "detail", self.detail[:MAX_DETAIL])


class Announce(Message, frozen=True, tag="announce"):
    """Decode -> prefill: I will grant pages for this room as soon as I have some; keep yours until then.

    A Grant of the same generation follows, or a Decline. Not answered while it is true.

    Attributes:
        generation: As in Grant.
        num_decode_ranks: How many decode ranks ask for this room.
        timeout_s: Time left until the decode rank gives up.
        capability: Says that the sender may have the room, see `kvflow.capability`; empty if it has none.
    """

    room: WireRoom
    generation: Number
    num_decode_ranks: Annotated[int, msgspec.Meta(ge=1, lt=2**32)]
    timeout_s: Seconds
    capability: Capability = ""


class Grant(Message, frozen=True, tag="grant"):
    """Decode -> prefill: you may write these pages.

    Attributes:
        generation: Issued by the decode rank, never reused by it.
        token: Random; every Notice must repeat it, because in-band notices carry no other proof of their origin.
        ranges: For each component that is wanted, token positions `[start, stop)`.
        pages: For the same components, the pages that hold them: little-endian uint32.
        num_decode_ranks: How many decode ranks ask for this room.
        timeout_s: Time left until the decode rank gives up.
        progress_s: How long nothing may arrive, once something has, before it gives up.
        priority: Class of the transfer; 0 goes first.
        digest: Digests of what is written are wanted with the notices.
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


class Decline(Message, frozen=True, tag="decline"):
    """Decode -> prefill: I will not take this room, and have granted nothing for it; do not hold its pages for me.

    Answered by Drained.

    Attributes:
        capability: As in Announce.
    """

    room: WireRoom
    generation: Number
    failure: Failure
    capability: Capability = ""


class Staged(msgspec.Struct, frozen=True, array_like=True):
    """Where the bytes of a notice are, if they are packed and not in the pages yet.

    Attributes:
        slot: Of the sender's window.
        head_major: Order of the cells, see `kvflow.geometry.pack`.
    """

    slot: Count
    head_major: bool


class Notice(Message, frozen=True, tag="notice"):
    """Prefill -> decode: the bytes of one chunk, or of one piece of a large one, are in your memory.

    Attributes:
        seq: Counts the notices of this rank in this generation, from 0.
        ranges: For each component of which something was written, token positions.
        num_bytes: Bytes that were written.
        last: No notice of this rank has a higher `seq`.
        metadata: Only on the last: opaque, from the prefill engine to the decode engine.
        digests: If the grant asked for them: for each component in `ranges`, the digest of the cells that were
            written, in logical order.
        layers: Layers that were written, `[start, stop)`, all from `start` on without a `stop`; all layers if None. The
            notices of a chunk follow each other, with the same ranges, from layer 0 to the one without a `stop`.
        staged: The bytes are in a staging slot, from where the decode rank scatters them into its pages.
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
        """Layers that were written."""
        return self.layers or ALL_LAYERS


class SlotReleased(Message, frozen=True, tag="slot_released"):
    """Decode -> prefill: the staging slot of this notice is not read any more, and never will be for it."""

    room: WireRoom
    generation: Number
    engine_rank: Count
    seq: Count


class SlotQuery(Message, frozen=True, tag="slot_query"):
    """Prefill -> decode: repeat SlotReleased for this notice, if it is true; it may have been lost."""

    room: WireRoom
    generation: Number
    engine_rank: Count
    seq: Count


class Ack(Message, frozen=True, tag="ack"):
    """Decode -> prefill: every byte of this generation has arrived; only now do both sides call it a success."""

    room: WireRoom
    generation: Number


class Cancel(Message, frozen=True, tag="cancel"):
    """Decode -> prefill: stop, and say Drained when nothing of this generation can be written any more."""

    room: WireRoom
    generation: Number
    failure: Failure


class Drained(Message, frozen=True, tag="drained"):
    """Prefill -> decode: nothing of this generation can be written by this rank any more.

    Attributes:
        failure: Why the transfer has ended, as far as this rank knows; a Failed that said so may have been lost.
    """

    room: WireRoom
    generation: Number
    engine_rank: Count
    failure: Failure | None = None


class Failed(Message, frozen=True, tag="failed"):
    """Prefill -> decode: this transfer will not succeed; a Drained follows unless `drained` says it already.

    It follows when it is true, which is never if bytes of a failed write may land at any time.
    """

    room: WireRoom
    generation: Number
    engine_rank: Count
    failure: Failure
    drained: bool


class Ping(Message, frozen=True, tag="ping"):
    """Decode -> prefill: I am alive. Prefill -> decode, when another process claims to be that rank: are you alive?"""

    peer: PeerId


class Pong(Message, frozen=True, tag="pong"):
    """Either: the answer to a Ping."""

    peer: PeerId


class Goodbye(Message, frozen=True, tag="goodbye"):
    """Either: this incarnation is leaving.

    Attributes:
        failure: Why, if it is not an orderly end.
        fenced: From prefill: nothing that this incarnation has written can land any more.
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
