"""Messages about what was written, and how a transfer ends."""

from typing import Annotated

import msgspec

from kvflow.config import MAX_METADATA_BYTES
from kvflow.geometry.layout import MAX_COMPONENTS, Name
from kvflow.geometry.ranges import ALL_LAYERS, LayerRange
from kvflow.wire.messages.values import MAX_DOMAIN_BYTES, Clock, Count, Failure, Message, Number, Position, WireRoom

__all__ = ["Ack", "Cancel", "Drained", "Failed", "Notice", "SlotQuery", "SlotReleased", "Staged", "Stamps"]


class Staged(msgspec.Struct, frozen=True, array_like=True):
    """Where the bytes of a notice are, if they are packed in a staging slot and not yet in the pages.

    Attributes:
        slot: Index of the slot in the window that was given to the sender of the notice.
        head_major: Order of the cells, see `kvflow.geometry.pack`.
    """

    slot: Count
    head_major: bool


class Stamps(msgspec.Struct, frozen=True, array_like=True):
    """When a piece went through the stages of its prefill rank, by the clock of that rank.

    Attributes:
        granted_at: The rank had the Grant, whose room may not have been open yet.
        ready_at: The engine had offered the piece, its data was ready, and it was queued.
        taken_at: It got its turn.
        planned_at: It was planned and, if it is packed, gathered.
        posted_at: The transport was given the write.
        written_at: The transport reported the end of the write; None if the notice goes in band, with the bytes.
    """

    granted_at: Clock
    ready_at: Clock
    taken_at: Clock
    planned_at: Clock
    posted_at: Clock
    written_at: Clock | None = None


class Notice(Message, frozen=True, tag="notice"):
    """Prefill -> decode: the bytes of one chunk, or of one piece of a large chunk, are in the receiver's memory.

    Attributes:
        token: Repeated from the Grant.
        seq: Counts the notices of this rank in this generation, from 0.
        ranges: Written token positions `[start, stop)`, by component.
        last: True if no notice of this rank has a higher `seq`.
        metadata: Opaque bytes from the prefill engine to the decode engine; only on the last notice.
        digests: If the Grant requested them: by component in `ranges`, the digest of the written cells in logical
            order.
        layers: Written layers `[start, stop)`; up to the last layer if `stop` is None; all layers if None. The notices
            of a chunk have consecutive numbers and the same ranges, from layer 0 to the notice without a `stop`.
        staged: The staging slot that holds the bytes until the decode rank scatters them; None if they are in the
            pages.
        stamps: When the piece went through its stages; None from an older peer.
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
    digests: Annotated[dict[Name, Number], msgspec.Meta(max_length=MAX_COMPONENTS)] = msgspec.field(
        default_factory=dict
    )
    layers: tuple[Count, Count | None] | None = None
    staged: Staged | None = None
    stamps: Stamps | None = None

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
        drained: True if the sender can no longer write anything for this generation. If False, a Drained follows once
            that holds, which is never if the bytes of a failed write may still land at any time.
    """

    room: WireRoom
    generation: Number
    engine_rank: Count
    failure: Failure
    drained: bool
