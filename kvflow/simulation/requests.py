"""What the router hands out, and what became of it on each rank."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvflow.geometry.tokens import TokenRange
from kvflow.simulation.pool import Lease
from kvflow.state.tables import Memory, Outcome
from kvflow.wire.messages import Failure

if TYPE_CHECKING:
    from kvflow.simulation.host import Host

__all__ = ["Receiving", "Request", "Sending"]


@dataclass
class Request:
    """One try to move one room between two instances.

    Attributes:
        room: The same in every try that the router makes with it.
        content: Names the try within the run; prefill writes it into every cell.
        num_tokens: Of the prompt.
        start: Tokens that decode has already.
        wants_state: Decode also wants the state of the request, if the model has one.
        prefill: Name of the instance that computes.
        decode: Name of the instance that receives.
        num_decode_ranks: Ranks of it.
        digest: What arrives is compared with digests.
        priority: Class of the transfer.
    """

    room: int
    content: int
    num_tokens: int
    start: int
    wants_state: bool
    prefill: str
    decode: str
    num_decode_ranks: int
    digest: bool = False
    priority: int = 0

    def __str__(self) -> str:
        return f"room {self.room} try {self.content}"


@dataclass(eq=False)
class Sending:
    """A request on one prefill rank."""

    request: Request
    host: "Host"
    lease: Lease
    opened_at: float
    frozen_s: float
    position: int = 0
    is_finished: bool = False
    finished_at: float = 0.0
    outcome: Outcome = Outcome.PENDING
    memory: Memory = Memory.HELD
    failure: Failure | None = None
    decided_at: float | None = None


@dataclass(eq=False)
class Receiving:
    """A request on one decode rank."""

    request: Request
    host: "Host"
    lease: Lease
    opened_at: float
    frozen_s: float
    generation: int
    timeout_s: float
    ranges: dict[str, TokenRange] = field(default_factory=dict)
    outcome: Outcome = Outcome.PENDING
    memory: Memory = Memory.HELD
    failure: Failure | None = None
    decided_at: float | None = None
