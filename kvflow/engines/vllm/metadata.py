"""What scheduler and workers tell each other with each step of vLLM, which pickles it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvflow.engines.vllm.dialect import Reference

__all__ = ["ChunkOrder", "GrantOrder", "GroupBlocks", "StepOrders", "WorkerAddress", "WorkerReport"]


class GroupBlocks(NamedTuple):
    """Blocks of one group of caches.

    Attributes:
        start: First token that they are wanted for.
        blocks: In token order.
    """

    start: int
    blocks: Sequence[int]


@dataclass(frozen=True)
class ChunkOrder:
    """Send some tokens of a request.

    Attributes:
        start: First token.
        stop: One past the last one.
        blocks: Of each group of vLLM's caches; None if nothing of it moves.
        is_last: No chunk follows.
        prompt: `digest_of` the prompt, which decode compares.
    """

    start: int
    stop: int
    blocks: Sequence[GroupBlocks | None]
    is_last: bool
    prompt: str


@dataclass(frozen=True)
class GrantOrder:
    """Receive some tokens of a request that was announced: `ChunkOrder` without an end."""

    start: int
    stop: int
    blocks: Sequence[GroupBlocks | None]


@dataclass
class StepOrders:
    """What the workers are to do, by vLLM's ids of requests, in this order.

    Attributes:
        opened: Requests to send, with their rooms.
        preempted: Requests whose pages are taken away.
        chunks: Tokens to send.
        announced: Requests to receive, and from where.
        declined: Such requests that vLLM computes here after all.
        granted: Tokens to receive.
        awaited: Requests that are over, whose blocks vLLM gives back once it is told that they were sent.
        is_empty: The step computes nothing.
    """

    opened: dict[str, str] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    chunks: dict[str, ChunkOrder] = field(default_factory=dict)
    announced: dict[str, Reference] = field(default_factory=dict)
    declined: list[str] = field(default_factory=list)
    granted: dict[str, GrantOrder] = field(default_factory=dict)
    awaited: list[str] = field(default_factory=list)
    is_empty: bool = False


@dataclass
class WorkerReport:
    """What workers have to say.

    Attributes:
        held: Blocks that somebody may still touch, although their request is over: once for each worker.
        freed: Such blocks that are quiet by now, in the same way.
    """

    held: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)

    def aggregate(self, other: "WorkerReport") -> "WorkerReport":
        """Add what another worker has to say."""
        return WorkerReport(self.held + other.held, self.freed + other.freed)


@dataclass(frozen=True)
class WorkerAddress:
    """Where a prefill worker is.

    Attributes:
        ticket: One of its tickets.
    """

    ticket: Mapping[str, object]
