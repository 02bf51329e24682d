"""Starts the two sides, acts as the router between them, and assembles the result."""

import math
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

import msgspec
from anyio.abc import TaskGroup
from msgspec import structs

from kvflow.cli.demo.options import DemoOptions, SideName
from kvflow.cli.demo.threads import ThreadChild
from kvflow.cli.processes import Child, ChildProcess, ChildSettings, Report, open_tasks

__all__ = ["DemoResult", "ManagersResult", "OnReport", "run_demo"]

MODULE: Final = "kvflow.cli.demo.workers"
SIDES: Final[tuple[SideName, ...]] = ("prefill", "decode")

OnReport = Callable[[str, Report], None]

ROOM = 42
"""Any number, the same on both sides; a real router draws a new one for each request."""


class DemoResult(msgspec.Struct, kw_only=True):
    """Output of `kvflow demo --json`.

    Attributes:
        identical: The tokens equal those of the same model run in one process.
        prompt_tokens: Tokens whose cache was moved.
        tokens: Tokens that the decode side generated.
        bytes: Bytes written into decode pages.
        goodput_gbps: Those bytes in Gbit/s, over the time for which the slowest prefill rank had writes in flight.
        handover_ms: From "last chunk ready on prefill" to "decode may run".
        stages_ms: For each stage, the longest time that a rank spent in it.
        text: Text of the generated tokens.
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


class ManagersResult(msgspec.Struct, kw_only=True):
    """Output of `kvflow demo --engine transformers --json`.

    Attributes:
        identical: The tokens equal those of one manager.
        page_sizes: Tokens of a block, on prefill and on decode.
        prompt_tokens: Tokens whose cache was moved.
        tokens: Tokens that the decode manager generated, including the first one, from prefill.
        bytes: Bytes written into decode blocks.
        text: Text of the generated tokens.
        text_alone: Text that a single manager generates.
    """

    identical: bool
    backend: str
    model: str
    page_sizes: tuple[int, int]
    prompt_tokens: int
    tokens: int
    bytes: int
    text: str
    text_alone: str


async def run_demo(options: DemoOptions, on_report: OnReport) -> DemoResult | ManagersResult:
    """Run both sides to their end.

    Args:
        options: Options from the user.
        on_report: Called with every report of a side, as (side, report).

    Raises:
        ChildFailed: A process failed; it has printed the reason.
        KvflowError: A side in this process failed.
    """
    async with open_tasks() as tasks, AsyncExitStack() as stack:
        prefill, decode = [
            await stack.enter_async_context(_make_side(structs.replace(options, side=side), tasks, on_report))
            for side in SIDES
        ]
        return await (_route if options.engine == "none" else _route_managers)(options, prefill, decode)


def _make_side(options: DemoOptions, tasks: TaskGroup, on_report: OnReport) -> ChildProcess | ThreadChild:
    settings: ChildSettings = {"answer_s": math.inf, "on_report": partial(on_report, options.side)}
    if options.backend == "memory":
        from kvflow.cli.demo.workers import side_of  # noqa: PLC0415 - needs torch, which processes load themselves

        return ThreadChild(options.side, side_of(options), options, tasks, **settings)
    return ChildProcess(options.side, MODULE, options, tasks, shows_errors=True, **settings)


async def _route(options: DemoOptions, prefill: Child, decode: Child) -> DemoResult:
    """Connect the two sides, send both the request, and compare the results."""
    await decode.tell("meet", endpoint=(await prefill.expect("registry"))["endpoint"])
    ready = await prefill.expect("ready")
    await decode.expect("ready")
    await prefill.tell("serve", room=ROOM)
    await decode.tell("serve", room=ROOM)
    handover = await decode.expect("handover")
    answer = await decode.expect("answer")
    await prefill.tell("compare")
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


async def _route_managers(options: DemoOptions, prefill: Child, decode: Child) -> ManagersResult:
    """Pass a request to both sides, as a router does: decode receives the ticket from prefill."""
    await decode.expect("ready")
    ready = await prefill.expect("ready")
    await prefill.tell("serve")
    ticket = (await prefill.expect("ticket"))["ticket"]
    await decode.tell("serve", ticket=ticket)
    handover = await decode.expect("handover")
    answer = await decode.expect("answer")
    alone = await prefill.expect("reference")
    return ManagersResult(
        identical=answer["tokens"] == alone["tokens"],
        backend=options.backend,
        model=options.model,
        page_sizes=(options.page_size_of("prefill"), options.page_size_of("decode")),
        prompt_tokens=ready["prompt_tokens"],
        tokens=len(answer["tokens"]),
        bytes=handover["num_bytes"],
        text=answer["text"],
        text_alone=alone["text"],
    )
