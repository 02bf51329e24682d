"""Spans of transfers for OpenTelemetry; needs `kvflow[otel]`."""

from typing import Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from kvflow import __version__
from kvflow.observe.trace import TransferLine
from kvflow.state.tables import Outcome
from kvflow.transfer import Transfer

__all__ = ["TransferTracer"]

HEADER: Final = "traceparent"

KINDS: Final = {"send": SpanKind.PRODUCER, "receive": SpanKind.CONSUMER}

PROPAGATOR: Final = TraceContextTextMapPropagator()


class TransferTracer:
    """Makes a span `kv_transfer` of each transfer of the ranks that it is given to, see docs/tracing.md.

    The span is a child of the context that the engine passes (`traceparent`), else of the one that is current where the
    transfer is entered, else, on decode, of the one in the ticket. On decode it is linked to the one in the ticket.

    Args:
        tracer_provider: Of the application; the global one by default. Without one, nothing is recorded.
    """

    def __init__(self, tracer_provider: trace.TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("kvflow", __version__, tracer_provider)

    def begin_span(self, transfer: Transfer) -> None:
        """Begin the span of a transfer. The rank calls this, and the other methods."""
        own, told, _ = transfer.trace_context
        ticket = _parsed(told)
        parent = _parsed(own) if own else otel_context.get_current()
        if not _is_valid(parent):
            parent = ticket
        linked = trace.get_current_span(ticket).get_span_context()
        line = transfer._log_line()
        transfer.span = self._tracer.start_span(
            "kv_transfer",
            context=parent,
            kind=KINDS[line.role],
            links=[Link(linked)] if linked.is_valid else (),
            attributes=_attributes(kvflow_role=line.role, kvflow_room=str(line.room), kvflow_label=line.label),
        )

    def end_span(self, transfer: Transfer) -> None:
        """End the span of a transfer."""
        span, transfer.span = transfer.span, None
        if not isinstance(span, Span):
            return
        if span.is_recording():
            _describe(span, transfer._log_line())
        span.end()

    def traceparent_of(self, transfer: Transfer | None) -> str:
        """Return the context of the span of a transfer, or the current one if it has none; empty if there is none."""
        span = None if transfer is None else transfer.span
        carrier: dict[str, str] = {}
        PROPAGATOR.inject(carrier, trace.set_span_in_context(span) if isinstance(span, Span) else None)
        return carrier.get(HEADER, "")


def _describe(span: Span, line: TransferLine) -> None:
    failure, breakdown = line.failure, line.breakdown
    span.set_attributes(
        _attributes(
            kvflow_outcome="refused" if line.outcome is Outcome.PENDING else line.outcome.value,
            kvflow_prefill=line.prefill,
            kvflow_bytes=line.num_bytes,
            kvflow_pages=line.num_pages,
        )
    )
    if failure is not None:
        values = {"reason": failure.reason.value, "stage": failure.stage.value, "detected_by": failure.detected_by}
        span.set_attributes(_attributes(**{f"kvflow_{name}": value for name, value in values.items()}))
    if line.outcome is not Outcome.SUCCESS:
        span.set_status(Status(StatusCode.ERROR, None if failure is None else failure.detail))
    if breakdown is not None:
        for part, part_s in breakdown.parts.items():
            if part != "engine_noticed":  # not yet
                span.set_attribute(f"kvflow.part.{part}", part_s)
        span.set_attributes({"kvflow.clock_error": breakdown.clock_error_s, "kvflow.slowest": breakdown.slowest})


def _attributes(**values: AttributeValue | None) -> dict[str, AttributeValue]:
    """Return the attributes that have a value; `kvflow_role` becomes "kvflow.role"."""
    return {name.replace("kvflow_", "kvflow.", 1): value for name, value in values.items() if value is not None}


def _parsed(traceparent: str) -> Context:
    return PROPAGATOR.extract({HEADER: traceparent} if traceparent else {}, Context())


def _is_valid(context: Context) -> bool:
    return trace.get_current_span(context).get_span_context().is_valid
