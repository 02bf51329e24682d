"""What scheduler and workers send each other with each step of vLLM, which pickles it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from kvflow.engines.vllm.dialect import Reference

__all__ = ["ChunkOrder", "GrantOrder", "GroupBlocks", "StepOrders", "TurnOrder", "WorkerReport"]


class GroupBlocks(NamedTuple):
    """Blocks of one group of caches.

    Attributes:
        start: First token that the blocks are wanted for.
        blocks: Blocks in token order.
    """

    start: int
    blocks: Sequence[int]


@dataclass(frozen=True)
class ChunkOrder:
    """Send some tokens of a request.

    Attributes:
        start: First token.
        stop: One past the last token.
        blocks: For each group of vLLM's caches, its blocks; None if nothing of it moves.
        is_last: No chunk follows.
        metadata: What comes with the last chunk: `digest_of` the prompt, which decode compares, and the first token.
    """

    start: int
    stop: int
    blocks: Sequence[GroupBlocks | None]
    is_last: bool
    metadata: bytes


@dataclass(frozen=True)
class GrantOrder:
    """Receive some tokens of an announced request, within the usual time or `timeout_s`; fields as in `ChunkOrder`."""

    start: int
    stop: int
    blocks: Sequence[GroupBlocks | None]
    timeout_s: float | None = None


class TurnOrder(NamedTuple):
    """Send all of a finished turn, in a room of its own."""

    room: str
    chunk: ChunkOrder


@dataclass
class StepOrders:
    """Orders to the workers for one step, by vLLM's request ids, carried out in this order.

    Attributes:
        opened: Requests to send, with their rooms.
        preempted: Requests whose pages are taken away.
        completed: Last chunks, without tokens, of requests whose first token had to be sampled.
        chunks: Tokens to send.
        announced: Requests to receive, with the reference to their prefill.
        declined: Announced requests that vLLM computes here after all.
        refused: What was computed elsewhere for requests that can only be computed here.
        granted: Tokens to receive.
        awaited: Ended requests whose blocks vLLM frees once it is told that they were sent.
        leased: Requests whose ticket leaves now.
        abandoned: Requests that ended without a ticket, and why.
        given_up: Requests that ended before they were received, and why.
        reclaimed: Ended requests and turns to give up, and whether an announcement by the other side does not count.
        turns: Finished turns to keep.
        is_empty: The step computes nothing.
        wants_ticket: Workers report their ticket again.
    """

    opened: dict[str, str] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    completed: dict[str, ChunkOrder] = field(default_factory=dict)
    chunks: dict[str, ChunkOrder] = field(default_factory=dict)
    announced: dict[str, Reference] = field(default_factory=dict)
    declined: list[str] = field(default_factory=list)
    refused: list[Reference] = field(default_factory=list)
    granted: dict[str, GrantOrder] = field(default_factory=dict)
    awaited: list[str] = field(default_factory=list)
    leased: list[str] = field(default_factory=list)
    abandoned: dict[str, str] = field(default_factory=dict)
    given_up: dict[str, str] = field(default_factory=dict)
    reclaimed: dict[str, bool] = field(default_factory=dict)
    turns: dict[str, TurnOrder] = field(default_factory=dict)
    is_empty: bool = False
    wants_ticket: bool = False

    def take_orders(self) -> "StepOrders":
        """Return the orders so far, and begin those of the next step."""
        taken = replace(self)
        vars(self).update(vars(StepOrders()))
        return taken


@dataclass
class WorkerReport:
    """Report of the workers to the scheduler.

    Attributes:
        held: Blocks of ended requests that are not safe yet, once for each worker.
        freed: Held blocks that are safe by now, once for each worker.
        asked: Requests for which decode has blocks.
        lost: Requests that can no longer be handed over.
        failed: Requests that were not received, with the reason, if vLLM computes them here then.
        returned: Announced requests that prefill has given back before decode had blocks.
        first_tokens: First tokens of requests that were received, packed, once for each worker.
        released: Turns whose blocks are not needed any more, once for each worker.
        tickets: One of the tickets of each worker that prefills, when it has opened its ranks, and when it is asked.
    """

    held: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    returned: list[str] = field(default_factory=list)
    first_tokens: list[tuple[str, bytes]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    tickets: list[Mapping[str, object]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(getattr(self, one.name) for one in fields(self))

    def aggregate(self, other: "WorkerReport") -> "WorkerReport":
        """Merge the report of another worker."""
        return WorkerReport(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))
