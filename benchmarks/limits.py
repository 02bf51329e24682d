"""Cost of what peers may use up: each limit at a quarter, a half and the whole of it."""

import argparse
import asyncio
import gc
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Final, NamedTuple

import anyio
import anyio.lowlevel
import numpy as np
from numpy.typing import NDArray

import kvflow
from benchmarks.limits_of_peers import use_peers
from benchmarks.limits_of_tables import (
    MAX_RANKS,
    MAX_SLOTS_PER_PEER,
    use_quarantine,
    use_registry,
    use_slots,
    use_unfenced,
)
from benchmarks.options import names
from benchmarks.rows import Measured, Row, compare, print_rows
from kvflow.bounds import Bounds
from kvflow.geometry import Component, KVLayout, Region

__all__ = ["LIMITS", "add_arguments", "measure_limits", "prepare"]

SHARES: Final = (1 / 4, 1 / 2, 1)
LOOK_S: Final = 0.001
CELL_BYTES: Final = 8
ROOM_PAGES: Final = 16

PATIENT: Final = kvflow.Timeouts(lease_s=100.0, handshake_s=300.0, transfer_s=900.0, open_s=900.0, grant_s=900.0)

Bytes = NDArray[np.uint8]
Act = Callable[[], Awaitable[None]]
Use = Callable[[int], AbstractAsyncContextManager[Act]]
"""Prepares to use up `n` of a limit, and returns what is measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--limits", type=names, default="all", metavar="NAME,...", help=f"of {', '.join(LIMITS)}")
    parser.add_argument("--share", type=float, default=1.0, metavar="X", help="of each limit that counts as the whole")


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that measures and prints."""
    chosen = LIMITS if arguments.limits == ("all",) else {name: LIMITS[name] for name in arguments.limits}

    async def measure(on_row: Callable[[Row], None]) -> Sequence[Row]:
        return await measure_limits(chosen, arguments.share, on_row)

    return lambda: print_rows(measure, is_json=arguments.json)


async def measure_limits(limits: Mapping[str, "Limit"], share: float, on_row: Callable[[Row], None]) -> list[Row]:
    """Measure what using up each limit takes in this process, which runs both ends (only prefill for `peers`).

    "growth" is the CPU time in units of n log n, compared with a quarter of the limit: well above 1, it grows faster.
    "hold" is the CPU time of the longest callback of the event loop.
    """
    rows: list[Row] = []
    for name, limit in limits.items():
        first = 0.0
        for part in SHARES:
            n = max(round(limit.most * part * share), 2)
            cpu_s, hold_s = await _measure(limit.use, n)
            unit_s = cpu_s / (n * math.log(n))
            first = first or unit_s
            values = {"CPU": ("ms", cpu_s * 1e3), "growth": ("x", unit_s / first), "hold": ("ms", hold_s * 1e3)}
            for quantity, (unit, value) in values.items():
                case = f"{n} {limit.unit}"
                measured = Measured(bench="limits", group=name, case=case, quantity=quantity, unit=unit, better="lower")
                rows.append(compare(measured, [value]))
                on_row(rows[-1])
    return rows


async def _measure(use: Use, n: int) -> tuple[float, float]:
    """Return the CPU time, and the time of the longest callback of the event loop, in seconds."""
    async with use(n) as act:
        with longest_callback() as longest_s:
            began = time.process_time()
            await act()
            cpu_s = time.process_time() - began
        return cpu_s, max(longest_s)


@contextmanager
def longest_callback() -> Iterator[list[float]]:
    """Yield a list whose maximum is the CPU time of the longest callback of event loops inside the block.

    Python's cyclic garbage collector is off: with the objects of thousands of rooms it takes a tenth of a second, in
    whatever callback it starts.
    """
    longest_s = [0.0]
    run = asyncio.Handle._run  # event loops have no hook for this

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        longest_s[0] = max(longest_s[0], time.thread_time() - began)

    gc.disable()
    asyncio.Handle._run = timed  # type: ignore[method-assign, assignment]
    try:
        yield longest_s
    finally:
        gc.enable()
        asyncio.Handle._run = run  # type: ignore[method-assign]


def make_layout(memories: Sequence[Bytes]) -> KVLayout:
    """Return a layout with one layer in each memory, and one token in each page."""
    regions = [
        Region(
            tensor="k",
            layer=layer,
            address=memory.ctypes.data,
            slots=len(memory) // CELL_BYTES,
            slot_stride=CELL_BYTES,
            tokens_per_slot=1,
            token_stride=CELL_BYTES,
            heads=(0, 1),
            head_stride=CELL_BYTES,
            head_bytes=CELL_BYTES,
            dtype="uint8",
        )
        for layer, memory in enumerate(memories)
    ]
    return KVLayout((Component("kv", tuple(regions)),), "limits")


class Pair(NamedTuple):
    """A prefill and a decode rank, and the pages of prefill's pool, made before anything is measured."""

    prefill: kvflow.PrefillRank
    decode: kvflow.DecodeRank
    own: NDArray[np.int64]

    async def send(self, room: int, num_pages: int, metadata: bytes = b"", chunk: int = 0) -> None:
        """Send the first pages, in chunks of `chunk` pages."""
        async with self.prefill.send(room) as sender:
            for start in range(0, num_pages - chunk if chunk else 0, chunk or 1):
                await sender.chunk((start, start + chunk), {"kv": self.own[start : start + chunk]})
            start = num_pages - chunk if chunk else 0
            await sender.finish((start, num_pages), {"kv": self.own[start:num_pages]}, metadata=metadata)

    async def receive(self, room: int, pages: NDArray[np.integer]) -> None:
        """Receive a room into some pages."""
        tokens = (0, len(pages))
        async with self.decode.receive(room, prefill=self.prefill.endpoint, tokens=tokens, pages={"kv": pages}) as one:
            await one.done()

    async def hand_over(self, room: int, pages: NDArray[np.integer], metadata: bytes = b"", chunk: int = 0) -> None:
        """Send and receive a room."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.send, room, len(pages), metadata, chunk)
            tasks.start_soon(self.receive, room, pages)


@asynccontextmanager
async def make_pair(
    num_pages: int, num_layers: int = 1, limits: kvflow.Limits | None = None, *, is_connected: bool = True
) -> AsyncGenerator[Pair]:
    """Open both ranks with pools of this many pages over memory, and connect them."""
    limits = limits or kvflow.Limits()
    memories = [[np.zeros(num_pages * CELL_BYTES, np.uint8) for _ in range(num_layers)] for _ in range(2)]
    prefill = kvflow.PrefillConfig(instance="prefill", backend="memory", limits=limits, timeouts=PATIENT)
    decode = kvflow.DecodeConfig(instance="decode", backend="memory", limits=limits, timeouts=PATIENT)
    async with (
        kvflow.PrefillRank(prefill, make_layout(memories[0])) as sending,
        kvflow.DecodeRank(decode, make_layout(memories[1])) as receiving,
    ):
        pair = Pair(sending, receiving, np.arange(num_pages))
        if is_connected:
            await pair.hand_over(2**40, np.arange(1))
        yield pair


@asynccontextmanager
async def use_regions(n: int) -> AsyncGenerator[Act]:
    """Connect two ranks whose layers are separate allocations."""
    async with make_pair(2, n, is_connected=False) as pair:
        yield lambda: pair.hand_over(1, np.arange(1))


@asynccontextmanager
async def use_pages(n: int) -> AsyncGenerator[Act]:
    """Move one room of pages in random order."""
    pages = np.random.default_rng(1).permutation(n)
    async with make_pair(n) as pair:
        yield lambda: pair.hand_over(1, pages)


@asynccontextmanager
async def use_rooms(n: int) -> AsyncGenerator[Act]:
    """Open rooms on both sides at once."""

    async def act() -> None:
        async with anyio.create_task_group() as tasks:
            for room in range(n):
                pages = np.arange(room * ROOM_PAGES, (room + 1) * ROOM_PAGES)
                tasks.start_soon(pair.hand_over, room, pages)
                if not room % ROOM_PAGES:
                    await anyio.lowlevel.checkpoint()

    async with make_pair(n * ROOM_PAGES) as pair:
        yield act


@asynccontextmanager
async def use_waiting_grants(n: int) -> AsyncGenerator[Act]:
    """Let grants wait for rooms that prefill opens when all have arrived."""

    async def act() -> None:
        async with anyio.create_task_group() as tasks:
            for room in range(n):
                tasks.start_soon(pair.receive, room, np.arange(room, room + 1))
                if not room % ROOM_PAGES:
                    await anyio.lowlevel.checkpoint()
            while pair.prefill.statistics().waiting_grants < n:  # noqa: ASYNC110 - statistics are not told
                await anyio.sleep(LOOK_S)
            for room in range(n):
                tasks.start_soon(pair.send, room, 1)
                if not room % ROOM_PAGES:
                    await anyio.lowlevel.checkpoint()

    async with make_pair(n) as pair:
        yield act


@asynccontextmanager
async def use_metadata(n: int) -> AsyncGenerator[Act]:
    """Move one room with metadata of `n` bytes."""
    async with make_pair(1, limits=kvflow.Limits(metadata_bytes=n)) as pair:
        yield lambda: pair.hand_over(1, np.arange(1), bytes(n))


@asynccontextmanager
async def use_chunks(n: int) -> AsyncGenerator[Act]:
    """Move one room in `n` chunks."""
    async with make_pair(n) as pair:
        yield lambda: pair.hand_over(1, np.arange(n), b"", 1)


class Limit(NamedTuple):
    """A limit, its unit, and how it is used up."""

    most: int
    unit: str
    use: Use


DEFAULTS: Final = Bounds()

LIMITS: Final[Mapping[str, Limit]] = {
    "regions": Limit(4_096, "regions", use_regions),
    "pages of a room": Limit(6_291_456, "pages", use_pages),
    "transfers": Limit(DEFAULTS.transfers, "rooms", use_rooms),
    "pending_grants": Limit(DEFAULTS.pending_grants // 2, "grants", use_waiting_grants),
    "metadata_bytes": Limit(16 * 2**20, "bytes", use_metadata),
    "chunks": Limit(DEFAULTS.queued_chunks, "chunks", use_chunks),
    "peers": Limit(DEFAULTS.peers, "decode ranks", use_peers),
    "registry": Limit(MAX_RANKS, "ranks", use_registry),
    "quarantine": Limit(65_536, "rooms", use_quarantine),
    "unfenced": Limit(DEFAULTS.unfenced, "transfers", use_unfenced),
    "slots": Limit(MAX_SLOTS_PER_PEER, "slots", use_slots),
}
"""What a peer, or an engine for it, can use up."""
