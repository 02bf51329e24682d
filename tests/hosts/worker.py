"""A worker on a host: `python -m tests.hosts.worker '{"role": "decode", ...}'`.

It plays the engine: it serves requests as they come, allocates their pages from a pool that can run full, checks
everything that arrives, and keeps pages until kvflow reports them safe. If the instance has several ranks, all are in
this process, and each has some of the heads of the same pages. It reads `lines.Command` from its standard
input until that is closed, and writes `lines.Report` to its standard output.
"""

import asyncio
import contextlib
import functools
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import anyio
import msgspec
import numpy as np
from numpy.typing import NDArray

import kvflow
from kvflow.geometry import Component, KVLayout, Region
from tests.hosts import lines
from tests.hosts.pool import NUM_REGIONS, NUM_TOKENS, PAGE_BYTES, PAGES_PER_LANE, TOKEN_BYTES, TOKENS_PER_PAGE, LanePool

__all__ = ["PREFILL", "Settings"]

PREFILL: Final = "prefill"

NUM_HEADS: Final = 2
HEAD_BYTES: Final = TOKEN_BYTES // NUM_HEADS

WATCH_S: Final = 0.02
"""Interval between checks of pages that are not safe yet."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Role and options of a worker.

    Attributes:
        role: "registry", "prefill" or "decode".
        instance: Instance name of a prefill rank.
        decode: That of a decode rank.
        instances: Prefill instances, which take turns to serve rooms.
        bind: Address on which a registry or a prefill rank listens.
        advertise: Address that it advertises instead of the bound one.
        registry: Address of the registry (ranks).
        backend: Transport (ranks).
        backend_options: Options of the transport.
        keys: Directory with the keys of the process; without one, it has none.
        num_ranks: Ranks of the instance, at most `NUM_HEADS`; only the first has the address `bind`.
        page_tokens: Tokens of the pages that kvflow is told of, at most those of a page of the pool.
        num_lanes: Number of rooms that the pool has pages for.
        compute_s: How long prefill computes the second half of a room.
        use_s: How long decode uses the pages of a complete room.
        patience_s: How long a room waits for pages of decode before its client gives up.
        log_level: Level of kvflow's log.
        is_prepared: Load everything, but open the rank only after any line on standard input.
    """

    role: str
    instance: str = PREFILL
    decode: str = "decode"
    instances: tuple[str, ...] = (PREFILL,)
    bind: str = ""
    advertise: str | None = None
    registry: str = ""
    backend: str = "nixl"
    backend_options: dict[str, Any] = {}
    keys: str = ""
    num_ranks: int = 1
    page_tokens: int = TOKENS_PER_PAGE
    num_lanes: int = 64
    compute_s: float = 0.2
    use_s: float = 0.2
    patience_s: float = 10.0
    log_level: int = logging.INFO
    is_prepared: bool = False

    @property
    def trust(self) -> kvflow.Trust:
        """Keys of the process."""
        return kvflow.load_trust(self.keys) if self.keys else kvflow.Trust.none()

    def server_of(self, room: int) -> str:
        """Return the prefill instance that serves a room."""
        return self.instances[room % len(self.instances)]


AnyRank = TypeVar("AnyRank", kvflow.PrefillRank, kvflow.DecodeRank)
Transfer = kvflow.RoomSender | kvflow.RoomReceiver


@dataclass(eq=False)
class Held:
    """Pages of a room that has ended and that kvflow has not reported safe.

    Attributes:
        transfers: Those of the room, one for each rank.
        sample: Words of the pages at the last check.
        memory: State that kvflow reported at the last check.
    """

    room: int
    transfers: Sequence[Transfer]
    lane: int
    failed_at: float
    sample: NDArray[np.uint64]
    memory: kvflow.Memory


class Worker(Generic[AnyRank]):
    """Common base of both workers.

    Args:
        settings: Role and options.
        ranks: Open ranks over `pool`.
        pool: KV pool of the ranks.
    """

    def __init__(self, settings: Settings, ranks: Sequence[AnyRank], pool: LanePool) -> None:
        self._settings = settings
        self._ranks: Sequence[AnyRank] = ranks
        self._pool = pool
        self._put_free, self._take_free = anyio.create_memory_object_stream[int](pool.num_lanes)
        for lane in range(pool.num_lanes):
            self._put_free.send_nowait(lane)
        self._last_room = dict.fromkeys(range(pool.num_lanes), -1)
        self._held: dict[int, Held] = {}
        self._ended: Counter[str] = Counter()

    async def run(self) -> None:
        """Execute commands until `lines.Close`, or the end of standard input."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch)
            tasks.start_soon(self._count)
            async for command in commands():
                match command:
                    case lines.Room(room):
                        tasks.start_soon(self._serve, room)
                    case lines.Drain(timeout_s):
                        tasks.start_soon(self._drain, timeout_s)
                    case lines.Close():
                        break
            tasks.cancel_scope.cancel()

    @property
    def num_quarantined_pages(self) -> int:
        """Pages that the ranks report in quarantine."""
        return PAGES_PER_LANE * sum(len(rank.quarantined()) for rank in self._ranks)

    async def _serve(self, room: int) -> None:
        raise NotImplementedError

    async def _drain(self, timeout_s: float) -> None:
        for rank in self._ranks:  # at once, so that a room is refused by all or by none
            rank.start_drain()
        are_settled = [await rank.drain(timeout_s) for rank in self._ranks]
        tell(lines.Drained(now(), all(are_settled), self.num_quarantined_pages))

    def _pages_of(self, lane: int) -> list[int]:
        """Return the pages of a lane as kvflow counts them: each page of the pool may be several."""
        split = TOKENS_PER_PAGE // self._settings.page_tokens
        return [page * split + part for page in self._pool.pages(lane) for part in range(split)]

    async def _take_lane(self, room: int) -> int:
        """Wait for free pages, and report them if they were written while they were free."""
        lane = await self._take_free.receive()
        if not self._pool.is_clear(lane):
            tell(lines.Trespassed(now(), self._last_room[lane]))
        self._last_room[lane] = room
        return lane

    def _end(self, room: int, reason: str) -> None:
        self._ended[reason] += 1
        tell(lines.Ended(now(), room, reason))

    def _hold(self, room: int, transfers: Sequence[Transfer], lane: int) -> None:
        """Keep pages until kvflow reports them safe, and watch them for writes."""
        self._held[lane] = Held(room, transfers, lane, now(), self._pool.sample(lane), memory_of(transfers))

    def _free(self, lane: int) -> None:
        self._held.pop(lane, None)
        self._pool.clear(lane)
        self._put_free.send_nowait(lane)

    async def _watch(self) -> None:
        while True:
            await anyio.sleep(WATCH_S)
            for held in list(self._held.values()):
                self._look_at(held)

    def _look_at(self, held: Held) -> None:
        sample = self._pool.sample(held.lane)
        if not np.array_equal(sample, held.sample):
            held.sample = sample
            tell(lines.Landed(now(), held.room, held.failed_at, held.memory.value))
        held.memory = memory_of(held.transfers)
        if held.memory is kvflow.Memory.SAFE:
            self._free(held.lane)

    async def _count(self) -> None:
        while True:
            await anyio.sleep(1.0)
            ended, self._ended = self._ended, Counter()
            successes = ended.pop(lines.SUCCESS, 0)
            lanes = self._take_free.statistics()
            held, free = PAGES_PER_LANE * len(self._held), PAGES_PER_LANE * lanes.current_buffer_used
            waiting, quarantined = lanes.tasks_waiting_receive, self.num_quarantined_pages
            tell(lines.Second(now(), successes, dict(ended), held, quarantined, waiting, free))


class PrefillWorker(Worker[kvflow.PrefillRank]):
    """A worker that opens a room once it has pages, sends the first half at once and the rest when it is computed."""

    async def _serve(self, room: int) -> None:
        if self._settings.server_of(room) != self._settings.instance:
            return
        lane = await self._take_lane(room)
        self._pool.fill(lane, room)
        pages, half = self._pages_of(lane), NUM_TOKENS // 2
        senders = [rank.send(room) for rank in self._ranks]
        reason = lines.SUCCESS
        try:
            async with contextlib.AsyncExitStack() as stack:
                for sender in senders:
                    await stack.enter_async_context(sender)
                for sender in senders:
                    await sender.chunk((0, half), {"kv": pages[: len(pages) // 2]})
                await anyio.sleep(self._settings.compute_s)
                for sender in senders:
                    await sender.finish((half, NUM_TOKENS), {"kv": pages[len(pages) // 2 :]}, metadata=b"%d" % room)
        except kvflow.KvflowError as error:
            reason = reason_of(error)
        self._end(room, reason)
        self._hold(room, senders, lane)
        self._look_at(self._held[lane])


class DecodeWorker(Worker[kvflow.DecodeRank]):
    """A worker that receives rooms, checks every page, and uses the pages for a while before it frees them."""

    async def _serve(self, room: int) -> None:
        lane = None
        with anyio.move_on_after(self._settings.patience_s):
            lane = await self._take_lane(room)
        if lane is None:
            self._end(room, "no_pages")
            await self._decline(room)
            return
        pages, prefill, began = {"kv": self._pages_of(lane)}, self._settings.server_of(room), now()
        receivers = [rank.receive(room, prefill=prefill, tokens=(0, NUM_TOKENS), pages=pages) for rank in self._ranks]
        is_complete = None
        try:
            async with contextlib.AsyncExitStack() as stack:
                for receiver in receivers:
                    await stack.enter_async_context(receiver)
                is_complete = await self._receive(receivers, room, lane, began)
        except kvflow.KvflowError as error:
            if is_complete is None:  # the receive was refused; otherwise another rank has failed, too
                self._end(room, reason_of(error))
                self._hold(room, receivers, lane)
        if is_complete:
            await self._use(room, lane)

    async def _decline(self, room: int) -> None:
        """Receive an empty range of an abandoned room, which lets prefill free its pages."""
        nothing, prefill = (NUM_TOKENS, NUM_TOKENS), self._settings.server_of(room)
        for rank in self._ranks:
            with contextlib.suppress(kvflow.KvflowError):  # prefill may have failed it, too
                async with rank.receive(room, prefill=prefill, tokens=nothing, pages={"kv": []}):
                    pass

    async def _receive(self, receivers: Sequence[kvflow.RoomReceiver], room: int, lane: int, began: float) -> bool:
        try:
            handovers = [await receiver.done() for receiver in receivers]
        except kvflow.TransferFailed as error:
            self._end(room, reason_of(error))
            self._hold(room, receivers, lane)
            return False
        took_s, breakdown = now() - began, handovers[0].breakdown
        metadata = {handover.metadata for handover in handovers}
        is_right = self._pool.holds(lane, room) and metadata == {b"%d" % room}
        reason = lines.SUCCESS if is_right else lines.WRONG_PAGES
        self._ended[reason] += 1
        parts, error_s = ({}, 0.0) if breakdown is None else (breakdown.parts, breakdown.clock_error_s)
        tell(lines.Ended(now(), room, reason, took_s, parts, error_s))
        return True

    async def _use(self, room: int, lane: int) -> None:
        was_right = self._pool.holds(lane, room)
        await anyio.sleep(self._settings.use_s)
        if was_right and not self._pool.holds(lane, room):
            tell(lines.Trespassed(now(), room))
        self._free(lane)


def reason_of(error: kvflow.KvflowError) -> str:
    """Return why a room ended, in one word."""
    return error.reason.value if isinstance(error, kvflow.TransferFailed) else type(error).__name__


def memory_of(transfers: Sequence[Transfer]) -> kvflow.Memory:
    """Return the state of the pages of a room: safe only if they are safe for every rank."""
    states = [transfer.memory for transfer in transfers]
    return next((state for state in states if state is not kvflow.Memory.SAFE), kvflow.Memory.SAFE)


def layout_of(pool: LanePool, page_tokens: int = TOKENS_PER_PAGE, rank: int = 0, num_ranks: int = 1) -> KVLayout:
    """Describe the memory of a rank to kvflow: K and V of each layer, the heads of the rank, which lie interleaved."""
    first, end = kvflow.head_range(NUM_HEADS, num_ranks, rank)
    base, region_bytes = int(pool.memory.ctypes.data), pool.num_pages * PAGE_BYTES
    page_bytes = page_tokens * TOKEN_BYTES
    regions = tuple(
        Region(
            tensor="kv"[number % 2],
            layer=number // 2,
            address=base + number * region_bytes + first * HEAD_BYTES,
            slots=region_bytes // page_bytes,
            slot_stride=page_bytes,
            tokens_per_slot=page_tokens,
            token_stride=TOKEN_BYTES,
            heads=(first, end),
            head_stride=HEAD_BYTES,
            head_bytes=HEAD_BYTES,
            dtype="bfloat16",
        )
        for number in range(NUM_REGIONS)
    )
    return KVLayout((Component("kv", regions),), "two-hosts")


async def commands() -> AsyncIterator[lines.Command]:
    """Read commands until the harness closes the stream."""
    reader = asyncio.StreamReader()
    protocol = functools.partial(asyncio.StreamReaderProtocol, reader)
    await asyncio.get_running_loop().connect_read_pipe(protocol, sys.stdin)
    decoder = msgspec.json.Decoder(lines.Command)
    while line := await reader.readline():
        yield decoder.decode(line)


def tell(report: lines.Report) -> None:
    """Write one report. The harness reads all the time, so this does not block for long."""
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


def now() -> float:
    """Return the time for reports, on the monotonic clock."""
    return time.monotonic()


async def run_registry(settings: Settings) -> None:
    async with kvflow.Registry(settings.bind, settings.advertise, trust=settings.trust):
        tell(lines.Opened(now(), kvflow.__file__))
        async for command in commands():
            if isinstance(command, lines.Close):
                return


async def warm_up(settings: Settings) -> None:
    """Open and close an unused rank to load all modules and libraries."""
    pool = LanePool(1)
    config = kvflow.PrefillConfig(
        instance="warm-up",
        registry=settings.registry,
        backend=settings.backend,
        backend_options=settings.backend_options,
        trust=kvflow.Trust.none(),
    )
    async with kvflow.PrefillRank(config, layout_of(pool)):
        pass


def common_of(settings: Settings, number: int) -> dict[str, Any]:
    """Return what the configuration of a rank has on both sides."""
    return {
        "engine_rank": number,
        "num_ranks": settings.num_ranks,
        "registry": settings.registry,
        "backend": settings.backend,
        "backend_options": settings.backend_options,
        "trust": settings.trust,
    }


async def run_prefill(settings: Settings) -> None:
    pool, num_ranks = LanePool(settings.num_lanes), settings.num_ranks
    async with contextlib.AsyncExitStack() as stack:
        ranks = []
        for number in range(num_ranks):
            bind = settings.bind if number == 0 else f"{settings.bind.rpartition(':')[0]}:0"
            config = kvflow.PrefillConfig(
                instance=settings.instance, bind=bind, advertise=settings.advertise, **common_of(settings, number)
            )
            layout = layout_of(pool, settings.page_tokens, number, num_ranks)
            ranks.append(await stack.enter_async_context(kvflow.PrefillRank(config, layout)))
        tell(lines.Opened(now(), kvflow.__file__))
        worker = PrefillWorker(settings, ranks, pool)
        await worker.run()
    tell(lines.Closed(now(), worker.num_quarantined_pages))


async def run_decode(settings: Settings) -> None:
    pool, num_ranks = LanePool(settings.num_lanes), settings.num_ranks
    async with contextlib.AsyncExitStack() as stack:
        ranks = []
        for number in range(num_ranks):
            config = kvflow.DecodeConfig(instance=settings.decode, **common_of(settings, number))
            layout = layout_of(pool, settings.page_tokens, number, num_ranks)
            ranks.append(await stack.enter_async_context(kvflow.DecodeRank(config, layout)))
        tell(lines.Opened(now(), kvflow.__file__))
        worker = DecodeWorker(settings, ranks, pool)
        await worker.run()
    tell(lines.Closed(now(), worker.num_quarantined_pages))


def main(argument: str) -> None:
    settings = msgspec.json.decode(argument, type=Settings)
    kvflow.configure_logging("json", settings.log_level)
    run = {"registry": run_registry, "prefill": run_prefill, "decode": run_decode}[settings.role]
    if settings.is_prepared:
        anyio.run(warm_up, settings)
        tell(lines.Prepared(now()))
        while os.read(sys.stdin.fileno(), 1) not in {b"\n", b""}:  # bytewise: `commands` reads the rest
            pass
    with contextlib.suppress(BrokenPipeError):  # the harness has gone
        anyio.run(run, settings)


if __name__ == "__main__":
    main(sys.argv[1])
