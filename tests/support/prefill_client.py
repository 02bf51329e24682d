"""Driver of `prefill_process` for tests, and helpers for a decode rank that receives from it."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio

import kvflow
from benchmarks.processes import ChildProcess
from kvflow.cli.tasks import open_tasks
from kvflow.decode import Prefill
from tests.support.prefill_process import PAGES, TOKENS, PrefillOptions

__all__ = ["give_ticket", "hand_over", "prefill_process", "receive"]


@asynccontextmanager
async def prefill_process(
    registry: str | None, port: int, *, host: str = "127.0.0.1", **settings: Any
) -> AsyncIterator[ChildProcess]:
    """Start a process with some settings of its rank, and end it with the block."""
    options = PrefillOptions(registry, f"tcp://{host}:{port}", settings)
    async with (
        open_tasks() as tasks,
        ChildProcess("prefill", "tests.support.prefill_process", options, tasks) as prefill,
    ):
        await prefill.expect("ready")
        yield prefill


async def receive(
    rank: kvflow.DecodeRank, room: int, prefill: Prefill = "prefill", pages: Mapping[str, Sequence[int]] = PAGES
) -> kvflow.Handover:
    async with rank.receive(room, prefill=prefill, tokens=TOKENS, pages=pages) as receiver:
        return await receiver.done()


async def give_ticket(prefill: ChildProcess, room: int) -> dict[str, Any]:
    """Return a ticket from the prefill process, as a router would receive it."""
    await prefill.tell("ticket", room=room)
    ticket: dict[str, Any] = (await prefill.expect("ticket", room))["ticket"]
    return ticket


async def hand_over(rank: kvflow.DecodeRank, prefill: ChildProcess, room: int, reference: Prefill = "prefill") -> None:
    """Send a room in two parts, and receive it."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive, rank, room, reference)
        await prefill.tell("send", room=room)
        await prefill.expect("half", room)
        await prefill.tell("finish")
    await prefill.expect("over", room)
