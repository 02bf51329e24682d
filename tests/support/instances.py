"""Whole instances of ranks on real pools in one event loop, and requests with a distinct value in every cell."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import anyio
import numpy as np
from numpy.typing import NDArray

import kvflow
from kvflow.backends.base import Backend
from kvflow.config import Limits, Timeouts
from kvflow.geometry import head_range
from kvflow.ports import Ports
from kvflow.statistics import RankStatistics
from tests.support.faulty_memory import FaultScript, FaultyMemoryBackend
from tests.support.pools import PagedShape, Pool
from tests.support.waiting import until

__all__ = [
    "BACKENDS",
    "PATIENT",
    "QUICK",
    "SOON_QUARANTINED",
    "Deployment",
    "Request",
    "anomalies_of",
    "decode_config",
    "deploy",
    "make_pool",
    "prefill_config",
]

Side = kvflow.PrefillRank | kvflow.DecodeRank
AnyRank = TypeVar("AnyRank", kvflow.PrefillRank, kvflow.DecodeRank)

BACKENDS = ("memory", "nixl", "mooncake")

NUM_HEADS = 6
NUM_LAYERS = 2
HEAD_BYTES = 8
PAGE_SIZE = 4
NUM_PAGES = 64

UNTOUCHED = 0xEE
"""Fill of the decode pools; no cell has this value in all bytes."""

QUICK = Timeouts(handshake_s=2.0, transfer_s=15.0, grant_s=5.0, drain_s=0.5, lease_s=2.0)
"""Short timeouts, for tests that wait for a handshake deadline."""

PATIENT = Timeouts(handshake_s=15.0, transfer_s=30.0, grant_s=20.0, drain_s=5.0, lease_s=2.0)
"""Long timeouts, for ranks that stay reachable on a busy machine."""

SOON_QUARANTINED = replace(PATIENT, drain_s=0.5)
"""For tests in which a proof does not come."""

DEFAULT_LIMITS = Limits()


@dataclass
class Deployment:
    """A registry, one prefill instance and one decode instance; each pool has a free list."""

    registry: kvflow.Registry
    prefill: list[kvflow.PrefillRank] = field(default_factory=list)
    decode: list[kvflow.DecodeRank] = field(default_factory=list)
    sources: list[Pool] = field(default_factory=list)
    targets: list[Pool] = field(default_factory=list)
    faults: list[FaultScript] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))
    free: dict[int, list[int]] = field(default_factory=dict)
    closers: dict[Side, AsyncExitStack] = field(default_factory=dict)

    async def open(self, rank: AnyRank, stack: AsyncExitStack) -> AnyRank:
        """Open a rank; the stack closes it, or `close` does so earlier."""
        self.closers[rank] = await stack.enter_async_context(AsyncExitStack())
        return await self.closers[rank].enter_async_context(rank)

    async def close(self, *ranks: Side) -> None:
        """Close some ranks, in this order."""
        for rank in ranks:
            await self.closers[rank].aclose()

    def request(self, room: int, num_tokens: int) -> "Request":
        """Return a request with scattered pages on every rank of both sides."""
        count = -(-num_tokens // PAGE_SIZE)
        tables = [[self._take(pool, count) for pool in side] for side in (self.sources, self.targets)]
        return Request(self, room, num_tokens, tables[0], tables[1])

    def give_back(self, request: "Request") -> None:
        """Free the pages of a request."""
        for pools, tables in ((self.sources, request.src_tables), (self.targets, request.dst_tables)):
            for pool, table in zip(pools, tables, strict=True):
                self.free[id(pool)] += table

    def statistics(self) -> list[RankStatistics]:
        return [*(rank.statistics() for rank in self.prefill), *(rank.statistics() for rank in self.decode)]

    async def settle(self) -> None:
        """Wait until no rank has anything open; the last messages of a transfer may still be in flight."""
        await until(lambda: all(is_settled(statistics) for statistics in self.statistics()))

    def _take(self, pool: Pool, count: int) -> list[int]:
        if id(pool) not in self.free:
            self.free[id(pool)] = [int(page) for page in self.rng.permutation(NUM_PAGES)]
        free = self.free[id(pool)]
        taken, free[:] = free[:count], free[count:]
        assert len(taken) == count
        return taken


def anomalies_of(statistics: RankStatistics) -> dict[str, int]:
    """Return a rank's anomalies without those that a busy machine causes."""
    return {kind: count for kind, count in statistics.anomalies.items() if kind != "event_loop_starved"}


def is_settled(statistics: RankStatistics) -> bool:
    return not (statistics.rooms or statistics.waiting_grants or statistics.queued_chunks or statistics.posted)


@dataclass
class Request:
    """One room, with a page table on each rank of both sides."""

    deployment: Deployment
    room: int
    num_tokens: int
    src_tables: list[list[int]]
    dst_tables: list[list[int]]
    senders: dict[int, kvflow.RoomSender] = field(default_factory=dict)

    def compute(self, start: int, stop: int) -> None:
        """Write the cells of some tokens to the pages of every prefill rank, as a model would."""
        for pool, table in zip(self.deployment.sources, self.src_tables, strict=True):
            for cell, value in self._cells(pool, table, (start, stop)):
                cell[:] = value

    async def send(
        self, rank: int = 0, *, chunk: int | None = None, metadata: bytes = b"first token", background: bool = False
    ) -> None:
        """Compute and send everything in chunks, as the engine of one prefill rank."""
        async with self.deployment.prefill[rank].send(self.room, background=background) as sender:
            self.senders[rank] = sender
            step = chunk or self.num_tokens
            for start in range(0, self.num_tokens, step):
                stop = min(start + step, self.num_tokens)
                self.compute(start, stop)
                pages = self.src_pages(rank, (start, stop))
                if stop == self.num_tokens:
                    await sender.finish((start, stop), pages, metadata=metadata)
                else:
                    await sender.chunk((start, stop), pages)

    def receiver(
        self,
        rank: int = 0,
        *,
        start: int = 0,
        timeout_s: float | None = None,
        priority: int = 0,
        digest: bool | None = None,
    ) -> kvflow.RoomReceiver:
        """Start to receive the tokens from `start`, as the engine of one decode rank."""
        tokens = (start, self.num_tokens)
        return self.deployment.decode[rank].receive(
            self.room,
            prefill="prefill",
            tokens=tokens,
            pages=self.dst_pages(rank, tokens),
            timeout_s=timeout_s,
            priority=priority,
            digest=digest,
        )

    async def receive(
        self, rank: int = 0, *, start: int = 0, priority: int = 0, digest: bool | None = None
    ) -> kvflow.Handover:
        async with self.receiver(rank, start=start, priority=priority, digest=digest) as receiver:
            return await receiver.done()

    async def hand_over(
        self, *, chunk: int | None = None, start: int = 0, priority: int = 0, background: bool = False
    ) -> list[kvflow.Handover]:
        """Send from every prefill rank, receive on every decode rank."""
        handovers: dict[int, kvflow.Handover] = {}

        async def receive(rank: int) -> None:
            handovers[rank] = await self.receive(rank, start=start, priority=priority)

        async def send(rank: int) -> None:
            await self.send(rank, chunk=chunk, metadata=f"from {rank}".encode(), background=background)

        async with anyio.create_task_group() as tasks:
            for rank in range(len(self.deployment.prefill)):
                tasks.start_soon(send, rank)
            for rank in range(len(self.deployment.decode)):
                tasks.start_soon(receive, rank)
        return [handovers[rank] for rank in sorted(handovers)]

    def assert_arrived(self, start: int = 0) -> None:
        """Check every wanted cell on every decode rank, without the help of a layout."""
        for pool, table in zip(self.deployment.targets, self.dst_tables, strict=True):
            for cell, value in self._cells(pool, table, (start, self.num_tokens)):
                np.testing.assert_array_equal(cell, value)

    def assert_untouched(self, stop: int) -> None:
        """Check that no cell of the first tokens was written."""
        for pool, table in zip(self.deployment.targets, self.dst_tables, strict=True):
            for cell, _ in self._cells(pool, table, (0, stop)):
                assert (cell == UNTOUCHED).all()

    def num_written(self) -> int:
        """Return the number of bytes of the first decode pool that differ from its fill."""
        return sum(int((buffer != UNTOUCHED).sum()) for buffer in self.deployment.targets[0].buffers)

    def src_pages(self, rank: int, tokens: tuple[int, int]) -> dict[str, list[int]]:
        return {"kv": _touched(self.src_tables[rank], tokens)}

    def dst_pages(self, rank: int, tokens: tuple[int, int]) -> dict[str, list[int]]:
        return {"kv": _touched(self.dst_tables[rank], tokens)}

    def _cells(
        self, pool: Pool, table: Sequence[int], tokens: tuple[int, int]
    ) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Return a view of each cell, and its expected value, which encodes its name."""
        cells = []
        for token in range(*tokens):
            page, offset = table[token // PAGE_SIZE], token % PAGE_SIZE
            for layer in range(NUM_LAYERS):
                for tensor in ("k", "v"):
                    for head in range(*pool.shape.heads):
                        name = (self.room, token, layer, "kv".index(tensor), head, 0x5A)
                        value = np.array([*self.room.to_bytes(2, "big"), token % 256, *name[2:]], np.uint8)
                        cells.append((pool.cell(tensor, layer, page, offset, head), np.resize(value, HEAD_BYTES)))
        return cells


def _touched(table: Sequence[int], tokens: tuple[int, int]) -> list[int]:
    start, stop = tokens
    return [] if start == stop else list(table[start // PAGE_SIZE : -(-stop // PAGE_SIZE)])


def make_pool(tp_size: int = 1, tp_rank: int = 0, *, fingerprint: str = "test-model", head_bytes: int = 8) -> Pool:
    shape = PagedShape(NUM_PAGES, PAGE_SIZE, head_range(NUM_HEADS, tp_size, tp_rank), head_bytes, NUM_LAYERS)
    return Pool(shape, UNTOUCHED, fingerprint=fingerprint)


def prefill_config(registry: str | None, rank: int = 0, num_ranks: int = 1, **changes: object) -> kvflow.PrefillConfig:
    fields: dict[str, object] = {"instance": "prefill", "backend": "memory", "timeouts": PATIENT}
    return kvflow.PrefillConfig(registry=registry, engine_rank=rank, num_ranks=num_ranks, **(fields | changes))  # type: ignore[arg-type]


def decode_config(registry: str | None, rank: int = 0, num_ranks: int = 1, **changes: object) -> kvflow.DecodeConfig:
    fields: dict[str, object] = {"instance": "decode", "backend": "memory", "timeouts": PATIENT}
    return kvflow.DecodeConfig(registry=registry, engine_rank=rank, num_ranks=num_ranks, **(fields | changes))  # type: ignore[arg-type]


@asynccontextmanager
async def deploy(
    backend: str = "memory",
    *,
    prefill_tp: int = 1,
    decode_tp: int = 1,
    timeouts: Timeouts = PATIENT,
    limits: Limits = DEFAULT_LIMITS,
    digest_every: int = 0,
    sending: Mapping[str, object] | None = None,
    receiving: Mapping[str, object] | None = None,
    registry_trust: kvflow.Trust | None = None,
    ports: tuple[Ports | None, Ports | None] = (None, None),
) -> AsyncIterator[Deployment]:
    """Open a registry and both instances.

    `sending` and `receiving` are further settings of prefill and decode, and `ports` those of each.
    """
    common: dict[str, object] = {"backend": backend, "timeouts": timeouts, "limits": limits}
    async with kvflow.Registry(trust=registry_trust) as registry, AsyncExitStack() as stack:
        deployment = Deployment(registry)
        for rank in range(prefill_tp):
            pool, faults = make_pool(prefill_tp, rank), FaultScript()
            transport: Backend | None = FaultyMemoryBackend(faults=faults) if backend == "memory" else None
            config = prefill_config(registry.endpoint, rank, prefill_tp, **(common | dict(sending or {})))
            sender = kvflow.PrefillRank(config, pool.layout, transport, ports=ports[0])
            deployment.prefill.append(await deployment.open(sender, stack))
            deployment.sources.append(pool)
            deployment.faults.append(faults)
        for rank in range(decode_tp):
            pool = make_pool(decode_tp, rank)
            settings = common | {"digest_every": digest_every} | dict(receiving or {})
            own = decode_config(registry.endpoint, rank, decode_tp, **settings)
            receiver = kvflow.DecodeRank(own, pool.layout, ports=ports[1])
            deployment.decode.append(await deployment.open(receiver, stack))
            deployment.targets.append(pool)
        yield deployment
