"""Requests from the router, and their transfers on each rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from kvflow.addresses import Endpoint
from kvflow.geometry.ranges import TokenRange
from kvflow.receiver import RoomReceiver
from kvflow.room import RoomId
from kvflow.sender import RoomSender
from kvflow.state.tables import Memory, Outcome
from kvflow.wire.messages import Failure, RankId
from simulation.memory import Lease, Pool

if TYPE_CHECKING:
    from simulation.loop import Process

__all__ = ["Receiving", "Request", "Sending"]


AnyTransfer = TypeVar("AnyTransfer", RoomSender, RoomReceiver)


@dataclass(frozen=True)
class Request:
    """One try to move one room between two instances.

    Attributes:
        room: Room; several tries may share it.
        content: Identifies the try within the run; prefill writes it into every cell.
        num_tokens: Tokens of the prompt.
        start: Tokens that decode has already.
        wants_state: Decode also wants the state of the request, if the model has one.
        prefill: Name of the instance that computes.
        decode: Name of the instance that receives.
        num_decode_ranks: Ranks of the decode instance.
        digest: Verify received bytes with digests.
        priority: Priority of the transfer.
        reference: What the decode engine gets to locate the prefill instance, if not its name.
    """

    room: RoomId
    content: int
    num_tokens: int
    start: int
    wants_state: bool
    prefill: str
    decode: str
    num_decode_ranks: int
    digest: bool = False
    priority: int = 0
    reference: str | Endpoint | Mapping[str, object] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"room {self.room} try {self.content}"

    @property
    def is_background(self) -> bool:
        """Whether prefill sends it in the background, as every eighth try."""
        return self.content % 8 == 0

    @property
    def metadata(self) -> bytes:
        """What the prefill engine hands over with the room, the same for every try."""
        return f"metadata of room {self.room}".encode()


@dataclass(eq=False)
class _OnRank(Generic[AnyTransfer]):
    """A request on one rank.

    Attributes:
        rank: The rank.
        lease: Its pages, which are given back once memory is safe.
        transfer: kvflow's transfer.
        stopped_s: How long the process had been stopped when a bound began.
    """

    request: Request
    process: "Process"
    rank: RankId
    pool: Pool
    lease: Lease
    transfer: AnyTransfer
    opened_at: float
    stopped_s: float = 0.0

    @property
    def outcome(self) -> Outcome:
        """Outcome that kvflow reports."""
        return self.transfer.outcome

    @property
    def memory(self) -> Memory:
        """Memory state that kvflow reports."""
        return self.transfer.memory

    @property
    def failure(self) -> Failure | None:
        """Failure that kvflow reports."""
        return self.transfer.failure

    def __str__(self) -> str:
        return f"{self.request} on {self.rank}"


@dataclass(eq=False)
class Sending(_OnRank[RoomSender]):
    """A request on one prefill rank."""

    position: int = 0


@dataclass(eq=False)
class Receiving(_OnRank[RoomReceiver]):
    """A request on one decode rank. While it is only announced, its lease has no pages.

    Attributes:
        timeout_s: Timeout of the transfer or, while it is only announced, of the wait for pages.
        ranges: For each wanted component, its tokens.
        is_announced: The engine has no pages for it yet.
        announced_at: When it was announced; None if it had pages from the start.
        has_succeeded: It has succeeded, and its contents were checked.
        is_told: The engine no longer waits for the outcome.
        seen_decided_s: How long the process had been stopped when the outcome was first seen decided, but not told.
    """

    timeout_s: float = 0.0
    ranges: dict[str, TokenRange] = field(default_factory=dict)
    is_announced: bool = False
    announced_at: float | None = None
    has_succeeded: bool = False
    is_told: bool = False
    seen_decided_s: float | None = None

    @property
    def began_at(self) -> float:
        """When prefill first learnt of it."""
        return self.opened_at if self.announced_at is None else self.announced_at
