"""Spans of transfers, made with the real SDK: whose children they are, what they tell, and how they are exported."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Final

import anyio
import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id
from typing_extensions import override

import kvflow
import kvflow.blocking
from kvflow.errors import ConfigError, LocalProtocolError, TransferFailed
from kvflow.otel import TransferTracer
from tests.support.instances import QUICK, decode_config, make_pool, prefill_config
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

TOKENS: Final = (0, 8)
PAGES: Final = {"kv": [3, 9]}
OF_ENGINE: Final = f"00-{7:032x}-{8:016x}-01"
OF_ROUTER: Final = f"00-{5:032x}-{6:016x}-01"


@contextmanager
def provided(*exporters: SpanExporter) -> Iterator[TracerProvider]:
    provider = TracerProvider(resource=Resource.create({"service.name": "engine"}))
    for exporter in exporters:
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    try:
        yield provider
    finally:
        provider.shutdown()


@asynccontextmanager
async def pair(provider: TracerProvider | None) -> AsyncIterator[tuple[kvflow.PrefillRank, kvflow.DecodeRank]]:
    tracer = None if provider is None else TransferTracer(provider)
    sending, receiving = prefill_config(None), decode_config(None, timeouts=QUICK)
    async with (
        kvflow.PrefillRank(sending, make_pool().layout, tracer=tracer) as prefill,
        kvflow.DecodeRank(receiving, make_pool().layout, tracer=tracer) as decode,
    ):
        yield prefill, decode


async def send(rank: kvflow.PrefillRank, room: int, opened: anyio.Event, **options: str) -> None:
    async with rank.send(room, **options) as sender:  # type: ignore[arg-type] # texts
        opened.set()
        await sender.finish(TOKENS, PAGES, metadata=b"token")
        await sender.delivered()


def named(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """Return the only span of each role."""
    spans = [span for span in exporter.get_finished_spans() if span.name == "kv_transfer"]
    found = {str((span.attributes or {})["kvflow.role"]): span for span in spans}
    assert len(found) == len(spans)
    return found


def ids(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def parent_of(span: ReadableSpan) -> tuple[int, int]:
    assert span.parent is not None
    return span.parent.trace_id, span.parent.span_id


async def test_each_side_has_a_span_under_the_context_of_its_engine_and_decode_links_to_prefill() -> None:
    exporter = InMemorySpanExporter()
    with provided(exporter) as provider:
        async with pair(provider) as (prefill, decode), anyio.create_task_group() as tasks:
            tracer, opened = provider.get_tracer("engine"), anyio.Event()
            with tracer.start_as_current_span("prefill a prompt") as computing:
                tasks.start_soon(send, prefill, 1, opened)  # tasks have the context in which they were started
            await opened.wait()
            ticket = json.loads(json.dumps(prefill.ticket(1)))
            with tracer.start_as_current_span("decode") as decoding:
                async with decode.receive(prefill=ticket, tokens=TOKENS, pages=PAGES, label="cmpl-1") as receiver:
                    handover = await receiver.done()
        spans = named(exporter)
        sent, received = spans["send"], spans["receive"]
        assert parent_of(sent) == (computing.get_span_context().trace_id, computing.get_span_context().span_id)
        assert parent_of(received) == (decoding.get_span_context().trace_id, decoding.get_span_context().span_id)
        assert [(link.context.trace_id, link.context.span_id) for link in received.links] == [ids(sent)]
        assert (sent.kind, received.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
        told = received.attributes or {}
        assert told["kvflow.room"] == "1"
        assert told["kvflow.label"] == "cmpl-1"
        assert told["kvflow.outcome"] == "success"
        assert told["kvflow.bytes"] == handover.num_bytes
        assert handover.breakdown is not None
        assert told["kvflow.part.wire"] == handover.breakdown.wire_s
        assert told["kvflow.clock_error"] == handover.breakdown.clock_error_s
        assert not [name for name in told if name.startswith("gen_ai")]
        assert received.end_time is not None
        assert received.start_time is not None
        assert 0 < (received.end_time - received.start_time) / 1e9 <= handover.breakdown.total_s * 1.01 + 0.05


@pytest.mark.parametrize("passed", [None, OF_ENGINE])
async def test_context_of_the_ticket_is_the_parent_where_the_engine_has_none(passed: str | None) -> None:
    exporter = InMemorySpanExporter()
    with provided(exporter) as provider:
        async with pair(provider) as (prefill, decode), anyio.create_task_group() as tasks:
            tasks.start_soon(send, prefill, 1, anyio.Event())
            ticket = prefill.ticket(1, traceparent=OF_ROUTER)
            async with decode.receive(prefill=ticket, tokens=TOKENS, pages=PAGES, traceparent=passed) as receiver:
                assert receiver.traceparent == (passed or OF_ROUTER)
                await receiver.done()
        received = named(exporter)["receive"]
        assert parent_of(received) == ((7, 8) if passed else (5, 6))
        assert [(link.context.trace_id, link.context.span_id) for link in received.links] == [(5, 6)]
        assert named(exporter)["send"].parent is None


async def test_spans_of_failures_say_why() -> None:
    exporter = InMemorySpanExporter()
    with provided(exporter) as provider:
        async with pair(provider) as (prefill, _):
            async with prefill.send(1, traceparent=OF_ENGINE) as sender:
                with pytest.raises(LocalProtocolError):
                    async with prefill.send(1):
                        pass
                sender.abort()
            refused, aborted = exporter.get_finished_spans()
            for span, outcome in ((refused, "refused"), (aborted, "aborted")):
                assert span.status.status_code is StatusCode.ERROR
                assert (span.attributes or {})["kvflow.outcome"] == outcome
            assert (aborted.attributes or {})["kvflow.reason"] == "aborted"
            assert parent_of(aborted) == (7, 8)


async def test_open_spans_end_with_their_rank() -> None:
    exporter = InMemorySpanExporter()
    with provided(exporter) as provider:
        async with pair(provider) as (prefill, decode):
            receiver = decode.receive(1, prefill=prefill.endpoint, tokens=TOKENS, pages=PAGES)
            receiver._open_room()
        assert (named(exporter)["receive"].attributes or {})["kvflow.outcome"] == "aborted"


def test_blocking_ranks_pass_contexts_on() -> None:
    exporter = InMemorySpanExporter()
    with provided(exporter) as provider:
        tracer = TransferTracer(provider)
        sending, receiving = prefill_config(None), decode_config(None, timeouts=QUICK)
        with (
            kvflow.blocking.PrefillRank(sending, make_pool().layout, tracer=tracer) as prefill,
            kvflow.blocking.DecodeRank(receiving, make_pool().layout, tracer=tracer) as decode,
        ):
            sender = prefill.send(1, traceparent=OF_ENGINE)
            sender.finish(TOKENS, PAGES)
            ticket = prefill.ticket(1, traceparent=OF_ROUTER)
            receiver = decode.receive(prefill=ticket, tokens=TOKENS, pages=PAGES)
            while not (sender.is_settled and receiver.is_settled):
                prefill.wait_any(0.01)
                decode.wait_any(0.01)
            breakdown = receiver.result().breakdown
            assert breakdown is not None
            assert breakdown.engine_noticed_s > 0
        assert parent_of(named(exporter)["send"]) == (7, 8)
        assert parent_of(named(exporter)["receive"]) == (5, 6)


@pytest.mark.parametrize("context", ["", "00-0-0-0", OF_ENGINE + "-more", f"00-{0:032x}-{8:016x}-01"])
async def test_malformed_contexts_are_refused_from_the_engine_and_counted_in_tickets(context: str) -> None:
    async with pair(None) as (prefill, decode), anyio.create_task_group() as tasks:
        for call in (prefill.ticket, prefill.send):
            with pytest.raises(ConfigError, match="traceparent"):
                call(1, traceparent=context)
        with pytest.raises(ConfigError, match="traceparent"):
            decode.receive(1, prefill=prefill.endpoint, tokens=TOKENS, pages=PAGES, traceparent=context)
        tasks.start_soon(send, prefill, 1, anyio.Event())
        ticket = prefill.ticket(1) | {"traceparent": context}
        async with decode.receive(prefill=ticket, tokens=TOKENS, pages=PAGES) as receiver:
            assert receiver.traceparent == ""
            await receiver.done()
        assert decode.statistics().anomalies.get("traceparent_malformed", 0) == (1 if context else 0)


async def test_without_a_tracer_the_ticket_has_no_context() -> None:
    async with pair(None) as (prefill, _):
        assert "traceparent" not in prefill.ticket(1)
    with provided() as provider:
        async with pair(provider) as (prefill, _):
            assert "traceparent" not in prefill.ticket(1)
            with provider.get_tracer("engine").start_as_current_span("answers the router") as span:
                context = span.get_span_context()
                expected = f"00-{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}-"
                assert str(prefill.ticket(1)["traceparent"]).startswith(expected)


class Sink(BaseHTTPRequestHandler):
    """Collects what is exported to it."""

    received: Final[list[ExportTraceServiceRequest]] = []

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    @override
    def log_message(self, format: str, *args: object) -> None:
        pass


async def test_spans_leave_over_otlp() -> None:
    with HTTPServer(("127.0.0.1", 0), Sink) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            exporter = OTLPSpanExporter(endpoint=f"http://127.0.0.1:{server.server_port}/v1/traces", compression=None)
            with provided(exporter) as provider:
                async with pair(provider) as (prefill, decode), anyio.create_task_group() as tasks:
                    tasks.start_soon(send, prefill, 1, anyio.Event())
                    async with decode.receive(
                        prefill=prefill.ticket(1, traceparent=OF_ROUTER), tokens=TOKENS, pages=PAGES
                    ) as receiver:
                        await receiver.done()
        finally:
            server.shutdown()
            thread.join()
    spans = [
        span
        for request in Sink.received
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
        if scope.scope.name == "kvflow"
    ]
    assert sorted(span.name for span in spans) == ["kv_transfer"] * 2
    (received,) = [span for span in spans if span.links]
    assert received.trace_id == (5).to_bytes(16, "big")
    assert received.parent_span_id == (6).to_bytes(8, "big")
    assert {"kvflow.slowest", "kvflow.part.queue"} <= {attribute.key for attribute in received.attributes}


async def test_broken_rank_ends_its_spans() -> None:
    exporter = InMemorySpanExporter()
    with provided(exporter) as provider:
        async with pair(provider) as (prefill, _):
            sender = prefill.send(1)
            sender._open_room()
            prefill._give_up(RuntimeError("of this test"))
            await until(lambda: bool(exporter.get_finished_spans()))
            with pytest.raises(TransferFailed):
                await sender.delivered()
        assert (named(exporter)["send"].attributes or {})["kvflow.reason"] == "broken"
    assert trace.get_current_span() is trace.INVALID_SPAN
