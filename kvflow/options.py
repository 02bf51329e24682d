"""Options of the calls that move a room, declared once for async, blocking and adapters."""

from typing import TypedDict

__all__ = ["ReceiveOptions", "SendOptions"]


class SendOptions(TypedDict, total=False):
    """Options of `PrefillRank.send`.

    Attributes:
        label: The engine's own ID for the request, for log lines; not sent to the other side.
        defer_lease: `Timeouts.grant_s` starts with `start_lease`, not with the last chunk. For engines that answer the
            router later than they compute: no decode rank can ask before it has the ticket.
        background: Chunks give way to those of other rooms: one piece at a time, and while others are sent as well, for
            at most a tenth of the time. For pages that nobody waits for, such as those that warm up another server.
        traceparent: W3C trace context of the engine's span for the request, see docs/tracing.md.
    """

    label: str | None
    defer_lease: bool
    background: bool
    traceparent: str | None


class ReceiveOptions(TypedDict, total=False):
    """Options of `DecodeRank.receive` and `DecodeRank.announce`.

    Attributes:
        num_ranks: Number of decode ranks that receive this room; by default all ranks of this instance.
        timeout_s: How long the whole transfer may take, by default `Timeouts.transfer_s`; of `announce`, how long it
            may stay without pages, the same by default.
        priority: Priority class on every prefill rank, 0 (first) to 7 (last); 0 by default. Among the chunks waiting
            for this rank, lower numbers go first; every 0.1 s that a chunk waits there
            raises it by one class.
        label: The engine's own ID for the request, for log lines; not sent to the other side.
        capability: A capability from the router, if prefill requires one (`kvflow.make_capability`); by default, the
            one in the ticket.
        traceparent: W3C trace context of the engine's span for the request, see docs/tracing.md.
    """

    num_ranks: int | None
    timeout_s: float | None
    priority: int
    label: str | None
    capability: str | None
    traceparent: str | None
