"""Messages of the handshake, and those that show that a rank is alive."""

from typing import Annotated

import msgspec

from kvflow.config import MAX_SLOTS_PER_PEER
from kvflow.geometry.layout import KVLayout, Name
from kvflow.geometry.routes import Route
from kvflow.wire.messages.records import _check_endpoint
from kvflow.wire.messages.values import (
    DEFAULT_MAX_PAGES,
    MAX_DETAIL,
    MAX_DOMAIN_BYTES,
    MAX_ENDS,
    MAX_METADATA_OF_TRANSPORT,
    AgentName,
    Clock,
    Count,
    Failure,
    Lease,
    Message,
    Number,
    PeerId,
    Seconds,
)

__all__ = ["Goodbye", "Hello", "Ping", "Pong", "Refuse", "StagingWindow", "Welcome"]


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
        to: The incarnation that the sender expects to reach.
        attempt: Counts the sender's handshakes. The answer repeats it; a Hello with a lower attempt than the last one
            is ignored.
        versions: Lowest and highest supported protocol version.
        lease_s: How long the sender may be silent before it counts as dead.
        backend_metadata: What the receiver's transport needs in order to write to the sender's memory.
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
        attempt: Repeats the attempt of the Hello.
        version: Protocol version to use.
        domain: Where the transport's bytes in flight can be seen; see `kvflow.backends.base.Backend.domain`.
        endpoint: ZMQ address of the rank's control socket; empty if not given. The process has ended once this address
            refuses connections, or another incarnation answers there; if it has a name, on the host that has sent this.
            An address from a directory proves nothing, because a directory may lie.
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


class Ping(Message, frozen=True, tag="ping"):
    """Decode -> prefill: I am alive. Prefill -> decode, when another process claims to be that rank: are you alive?

    Attributes:
        asks_ends: From decode: if not 0, the Pong repeats this number and has `ends`. It grows with each wait for last
            bytes.
        sent_at: From decode: reading of its clock, which the Pong repeats.
    """

    peer: PeerId
    asks_ends: Number = 0
    sent_at: Clock | None = None


class Pong(Message, frozen=True, tag="pong"):
    """Either direction: answers a Ping.

    Attributes:
        asks_ends: As in the Ping that is answered.
        ends: From prefill, if asked: its sound data connections, see `kvflow.backends.base.Backend.ends_to`.
        sent_at: As in the Ping that is answered.
        answered_at: From prefill: reading of its clock, so that decode knows by how much the two differ.
    """

    peer: PeerId
    asks_ends: Number = 0
    ends: Annotated[tuple[Annotated[bytes, msgspec.Meta(max_length=18)], ...], msgspec.Meta(max_length=MAX_ENDS)] = ()
    sent_at: Clock | None = None
    answered_at: Clock | None = None


class Goodbye(Message, frozen=True, tag="goodbye"):
    """Either direction: this incarnation is leaving.

    Attributes:
        failure: The reason, if the shutdown is not orderly.
        fenced: From prefill: True if nothing that this incarnation has written can land any more.
    """

    peer: PeerId
    failure: Failure | None = None
    fenced: bool = False
