"""Starts the two sides, plays the router between them, and puts the result together."""

import sys

import anyio
import msgspec

from kvflow.cli.demo.options import DemoOptions
from kvflow.cli.demo.sides import OnReport, ProcessSide, Side, ThreadSide

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

__all__ = ["DemoResult", "run_demo"]

ROOM = 42
"""Any number that both sides are told; a real router draws a new one for each request."""


class DemoResult(msgspec.Struct, kw_only=True):
    """What `kvflow demo --json` prints.

    Attributes:
        identical: The tokens equal those of the same model run in one process.
        prompt_tokens: Tokens whose cache was moved.
        tokens: Tokens that the decode side generated.
        bytes: Bytes that were written into decode pages.
        goodput_gbps: Those bytes in Gbit/s, over the time for which the slowest prefill rank had writes under way.
        handover_ms: From "last chunk ready on prefill" to "decode may run".
        stages_ms: For each stage, the most time that one rank spent in it.
        text: What the generated tokens say.
    """

    identical: bool
    backend: str
    model: str
    prefill_tp: int
    decode_tp: int
    page_size: int
    prompt_tokens: int
    tokens: int
    bytes: int
    goodput_gbps: float
    handover_ms: float
    stages_ms: dict[str, float]
    text: str


async def run_demo(options: DemoOptions, on_report: OnReport) -> DemoResult:
    """Run both sides to their end.

    Args:
        options: What the user chose.
        on_report: Told everything that a side reports, as (side, report).

    Raises:
        SideFailed: A process failed; it has printed why.
        KvflowError: Of a side in this process.
    """
    side_class = ThreadSide if options.backend == "memory" else ProcessSide
    prefill, decode = (side_class(name, options, on_report) for name in ("prefill", "decode"))
    try:
        async with anyio.create_task_group() as tasks:
            for side in (prefill, decode):
                await side.start()
                tasks.start_soon(side.run)
            result = await _route(options, prefill, decode)
    except BaseExceptionGroup as group:
        raise _first_leaf(group) from group
    return result


def _first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What went wrong first; the rest is what it brought down."""
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first


async def _route(options: DemoOptions, prefill: Side, decode: Side) -> DemoResult:
    """Bring the two together, give both the request, and compare what comes out."""
    await decode.send(endpoint=(await prefill.expect("registry"))["endpoint"])
    ready = await prefill.expect("ready")
    await decode.expect("ready")
    await prefill.send(room=ROOM)
    await decode.send(room=ROOM)
    handover = await decode.expect("handover")
    answer = await decode.expect("answer")
    await prefill.send(leave=True)
    sent = await prefill.expect("stages")
    last_chunk = await prefill.expect("last_chunk_ready")
    reference = await prefill.expect("reference")
    seconds = {stage: max(sent["seconds"][stage], handover["stages"][stage]) for stage in sent["seconds"]}
    return DemoResult(
        identical=answer["tokens"] == reference["tokens"],
        backend=options.backend,
        model=options.model,
        prefill_tp=options.prefill_tp,
        decode_tp=options.decode_tp,
        page_size=options.page_size,
        prompt_tokens=ready["prompt_tokens"],
        tokens=len(answer["tokens"]),
        bytes=handover["num_bytes"],
        goodput_gbps=round(handover["num_bytes"] * 8 / 1e9 / sent["seconds"]["submit"], 6),
        handover_ms=round((handover["at_s"] - last_chunk["at_s"]) * 1e3, 3),
        stages_ms={stage: round(time_s * 1e3, 3) for stage, time_s in seconds.items()},
        text=answer["text"],
    )
