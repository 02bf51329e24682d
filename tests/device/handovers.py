"""Handovers between two ranks of one process, on pools in any memory."""

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import anyio
import pytest

import kvflow
from benchmarks.pair.loads import SHAPES, Load, PairOptions, Table, Tables, tables_of
from benchmarks.pool_memory import PoolMemory
from benchmarks.pools import PagePool
from kvflow.backends.mooncake.library import installed_builds, memory_kinds
from tests.device.devices import Device

__all__ = ["BACKENDS", "SHAPE", "TOKENS", "Send", "hand_over", "has_mooncake", "new_tables", "skip_unless_usable"]

BACKENDS: Final = ("nixl", "mooncake")

SHAPE: Final = SHAPES["tiny"]
NUM_PAGES: Final = 64
TOKENS: Final = 512

OPTIONS: Final = {"nixl": {}, "mooncake": {"host": "127.0.0.1"}}

NONE: Final[Mapping[str, Any]] = MappingProxyType({})

Send = Callable[[kvflow.RoomSender, Tables], Awaitable[None]]


def skip_unless_usable(backend: str, device: Device) -> None:
    """Skip a test of Mooncake if it is not installed, or its build knows host memory only."""
    if backend == "mooncake" and not has_mooncake(device):
        pytest.skip("no build of Mooncake for devices")


def has_mooncake(device: Device) -> bool:
    """Return whether Mooncake is installed, in a build that can register the memory of a device."""
    return "VRAM" in memory_kinds() or (device.is_fake and bool(installed_builds()))


def new_tables(table: Table) -> Tables:
    """Return pages of both sides for `TOKENS`."""
    load = Load(way="kvflow", tokens=TOKENS, table=table)
    return tables_of(load, PairOptions(shape="tiny", num_pages=NUM_PAGES))[0]


async def send_at_once(sender: kvflow.RoomSender, tables: Tables) -> None:
    """Send everything in one chunk."""
    await sender.finish((0, TOKENS), {"kv": tables.src})


async def hand_over(
    backend: str,
    allocate: tuple[Callable[[int], PoolMemory], Callable[[int], PoolMemory]],
    tables: Tables,
    *,
    send: Send = send_at_once,
    prepare: Callable[[PagePool], None] = PagePool.fill,
    settings: Mapping[str, Any] = NONE,
    sending: Mapping[str, Any] = NONE,
) -> tuple[PagePool, kvflow.RankStatistics]:
    """Hand over one request.

    Args:
        backend: Transport.
        allocate: Allocates the pool of prefill, and that of decode.
        tables: Pages of both sides.
        send: Sends the request.
        prepare: Fills the pool of prefill, before the ranks open.
        settings: Settings of both ranks.
        sending: Settings of prefill.

    Returns:
        The pool of decode, and statistics of prefill.
    """
    source, target = (PagePool(SHAPE, NUM_PAGES, "device", memory) for memory in allocate)
    prepare(source)
    common: dict[str, Any] = {"backend": backend, "backend_options": OPTIONS[backend], **settings}
    with anyio.fail_after(30):
        async with (
            kvflow.PrefillRank(kvflow.PrefillConfig(instance="prefill", **common, **sending), source.layout) as prefill,
            kvflow.DecodeRank(kvflow.DecodeConfig(instance="decode", **common), target.layout) as decode,
            anyio.create_task_group() as tasks,
        ):
            ticket = prefill.ticket(room=1)

            async def send_request() -> None:
                async with prefill.send(room=1) as sender:
                    await send(sender, tables)

            tasks.start_soon(send_request)
            pages = {"kv": tables.dst}
            async with decode.receive(prefill=ticket, tokens=(0, TOKENS), pages=pages) as receiver:
                await receiver.done()
            statistics = prefill.statistics()
    return target, statistics
