"""Values that messages consist of, and their bounds."""

from typing import Annotated, Final, NamedTuple

import msgspec

from kvflow.config import MAX_INSTANCE_CHARACTERS, MAX_LEASE_S, NUM_PRIORITIES
from kvflow.errors import FailureReason, Stage
from kvflow.geometry.ranges import MAX_TOKENS
from kvflow.room import MAX_ROOM, MAX_ROOM_BYTES

__all__ = [
    "DEFAULT_MAX_PAGES",
    "MAX_CAPABILITY",
    "MAX_DOMAIN_BYTES",
    "MAX_ENDS",
    "MAX_RANKS_TOLD",
    "OLDEST_VERSION",
    "PAGES_INLINE",
    "PAGES_PER_PART",
    "PAGE_BYTES",
    "PARTS_PER_QUERY",
    "PROTOCOL_VERSION",
    "Capability",
    "Failure",
    "Message",
    "PeerId",
    "RankId",
]


PROTOCOL_VERSION = 3

OLDEST_VERSION = 3
"""The lowest protocol version that is still supported."""

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
"""A duration. No decision rests on a timestamp in a message, except in capabilities, because clocks differ."""

Clock = Annotated[float, msgspec.Meta(ge=-(2**53), le=2**53)]
"""A reading of the monotonic clock of one rank. It is compared with that of another only to explain a delay."""

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
    """Base of every message. Unless a message says otherwise, `peer` is its sender.

    `room` and `generation` name a transfer, as in Grant, and `engine_rank` is that of its prefill rank.
    """
