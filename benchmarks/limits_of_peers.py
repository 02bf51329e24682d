"""A prefill rank with as many decode ranks as it may have: stand-ins in processes of their own."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Final
from unittest import mock

import anyio
import numpy as np

import kvflow
from benchmarks.limits_worker import PATIENCE_S, StandInOptions, name_of
from benchmarks.processes import ChildProcess
from kvflow.backends.memory import ENDPOINTS, MemoryBackend
from kvflow.backends.metadata import PeerMetadata, RegisteredMemory
from kvflow.cli.tasks import open_tasks
from kvflow.gate import rates
from kvflow.geometry import KVLayout
from kvflow.stages.context import agent_name

__all__ = ["use_peers"]

PAGE_BYTES: Final = 8
PINGS: Final = 2
LOOK_S: Final = 0.25
PEERS_OF_ONE_PROCESS: Final = 2_048
"""Each takes a few descriptors of its process."""

Act = Callable[[], Awaitable[None]]


class ControlNotices(MemoryBackend):
    """The memory transport, but its notices go over the control channel, where stand-ins can hear them."""

    capabilities = replace(MemoryBackend.capabilities, in_band_notices=False)


class _Deployment:
    """A prefill rank, and the processes with its decode ranks."""

    def __init__(self, rank: kvflow.PrefillRank, num_peers: int) -> None:
        self._rank = rank
        self._num_peers = num_peers
        self._children: list[ChildProcess] = []

    async def start(self, stack: AsyncExitStack, layout: KVLayout, metadata: PeerMetadata) -> None:
        """Start the processes."""
        tasks = await stack.enter_async_context(open_tasks())
        for first in range(0, self._num_peers, PEERS_OF_ONE_PROCESS):
            options = StandInOptions(
                endpoint=self._rank.endpoint,
                prefill=self._rank.me,
                layout=layout,
                metadata=metadata,
                numbers=(first, min(first + PEERS_OF_ONE_PROCESS, self._num_peers)),
            )
            child = ChildProcess("stand-ins", "benchmarks.limits_worker", options, tasks, answer_s=PATIENCE_S)
            self._children.append(await stack.enter_async_context(child))
        for child in self._children:
            await child.expect("ready")

    async def act(self) -> None:
        """Connect all, and let each receive a room, ping and leave."""
        async with anyio.create_task_group() as sending:
            for room in range(self._num_peers):
                sending.start_soon(self._send, room)
                await anyio.lowlevel.checkpoint()
            await self._order("receive")
        for _ in range(PINGS):
            await self._order("ping")
        await self._order("say goodbye")
        while self._rank.statistics().peers:  # noqa: ASYNC110 - statistics are not told
            await anyio.sleep(LOOK_S)

    async def _send(self, room: int) -> None:
        async with self._rank.send(room) as sender:
            await sender.finish((0, 1), {"kv": range(1)})

    async def _order(self, do: str) -> None:
        for child in self._children:
            await child.tell(do)
        for child in self._children:
            await child.expect("done")


@asynccontextmanager
async def use_peers(n: int) -> AsyncGenerator[Act]:
    """Connect stand-ins for decode ranks to one prefill rank."""
    pool = np.zeros((1, 1, 1, PAGE_BYTES), np.uint8)
    layout = kvflow.layout_from_tensors({"k": [pool]}, axes="page token head dim", heads=(0, 1), fingerprint="limits")
    timeouts = kvflow.Timeouts(grant_s=PATIENCE_S, transfer_s=PATIENCE_S, progress_s=PATIENCE_S)
    limits = kvflow.Limits(peers=2 * n)  # without keys, all of them are one principal, which has half
    config = kvflow.PrefillConfig(instance="prefill", backend="memory", limits=limits, timeouts=timeouts)
    target = MemoryBackend()
    await target.open("target", lambda _events: None, lambda _error: None)
    await target.register(layout)
    names = [agent_name(name_of(number)) for number in range(n)]
    ENDPOINTS.update(dict.fromkeys(names, target))
    async with kvflow.PrefillRank(config, layout, ControlNotices()) as rank, AsyncExitStack() as stack:
        budget = rates.Budget(n, n)  # at 256 a second, heartbeats would cost more than Hellos
        stack.enter_context(mock.patch.object(rates, "HELLOS", budget))
        deployment = _Deployment(rank, n)
        await deployment.start(stack, layout, PeerMetadata("memory", b"", RegisteredMemory.from_layout(layout)))
        yield deployment.act
    await target.aclose()
    for name in names:
        del ENDPOINTS[name]
