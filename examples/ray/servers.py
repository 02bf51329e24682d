"""Prefill and decode servers as async Ray actors, each with a kvflow rank in its event loop.

`Prefill.prefill` is a streaming method: it yields the ticket, which the caller passes to `Decode.decode`, and ends when
decode has everything. No registry is needed: a ticket has the address, and identifies the process, so that one from
before a restart is refused.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

import kvflow

PAGE, NUM_PAGES, LAYERS, HEADS, DIM, CHUNK = 16, 128, 2, 2, 64, 64
PLAIN = kvflow.Trust.none()  # a network that nobody else is on; `kvflow.load_trust(directory)` on any other


class Request(NamedTuple):
    """A prompt; `room` is another one for each try."""

    room: str
    seed: int
    num_tokens: int

    def compute_cells(self) -> NDArray[np.float32]:
        """Return what the model computes: [layers of keys, then of values; tokens; heads; dim]."""
        return np.random.default_rng(self.seed).random((2 * LAYERS, self.num_tokens, HEADS, DIM), np.float32)


class Server:
    """What both kinds have: a pool, its free pages, and a rank that opens in the actor's event loop."""

    opening: "asyncio.Task[Any]"

    def __init__(self) -> None:
        self.pools = [np.zeros((NUM_PAGES, PAGE, HEADS, DIM), np.float32) for _ in range(2 * LAYERS)]
        tensors = {"k": self.pools[:LAYERS], "v": self.pools[LAYERS:]}
        axes = "page token head dim"
        self.layout = kvflow.layout_from_tensors(tensors, axes=axes, heads=(0, HEADS), fingerprint="ray-example")
        self.free = list(range(NUM_PAGES))
        self.freed = asyncio.Condition()
        self.tasks: set[asyncio.Task[None]] = set()
        self.stack = AsyncExitStack()

    async def await_opening(self) -> str:
        """Return the ID of the actor's node once its rank is open."""
        await self.opening
        return str(ray.get_runtime_context().get_node_id())

    async def leave_fleet(self) -> None:
        """Let open requests finish, and close the rank."""
        rank = await self.opening
        rank.start_drain()
        await rank.drain(timeout_s=20)  # what is still open then fails, and is retried
        await self.stack.aclose()

    async def take_pages(self, request: Request) -> list[int]:
        """Wait for enough free pages, and take them."""
        count = -(-request.num_tokens // PAGE)
        async with self.freed:
            await self.freed.wait_for(lambda: len(self.free) >= count)
            return [self.free.pop() for _ in range(count)]

    def free_soon(self, transfer: Any, pages: list[int]) -> None:
        """Give pages back when nothing can touch them: after the death of a peer, once there is proof."""
        self.tasks.add(task := asyncio.create_task(self._free_pages(transfer, pages)))
        task.add_done_callback(self.tasks.discard)

    async def _free_pages(self, transfer: Any, pages: list[int]) -> None:
        if await transfer.until_safe() is kvflow.Memory.SAFE:
            async with self.freed:
                self.free += pages
                self.freed.notify_all()


def find_cells(pages: list[int], start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where tokens are in a pool: their pages, and their places there."""
    tokens = np.arange(start, stop)
    return np.array(pages)[tokens // PAGE], tokens % PAGE


class Prefill(Server):
    """Computes prompts, and sends them chunk by chunk."""

    def __init__(self, name: str) -> None:
        super().__init__()
        bind = f"tcp://{ray.util.get_node_ip_address()}:0"
        config = kvflow.PrefillConfig(instance=name, bind=bind, backend="nixl", trust=PLAIN)
        self.opening = asyncio.create_task(self.stack.enter_async_context(kvflow.PrefillRank(config, self.layout)))

    async def prefill(self, request: Request) -> AsyncIterator[dict[str, object]]:
        """Yield the ticket, then compute and send; raise TransferFailed if decode does not get everything."""
        rank = await self.opening
        async with rank.send(request.room) as sender:  # opened before the ticket leaves, so that a drain waits for it
            yield rank.ticket(request.room)
            pages = await self.take_pages(request)
            try:
                computed = request.compute_cells()
                for start in range(0, request.num_tokens, CHUNK):
                    stop = min(start + CHUNK, request.num_tokens)
                    for pool, layer in zip(self.pools, computed, strict=True):
                        pool[find_cells(pages, start, stop)] = layer[start:stop]
                    await sender.chunk((start, stop), {"kv": pages[start // PAGE : -(-stop // PAGE)]})
                await sender.finish((stop, stop), {}, metadata=str(request.seed).encode())
            finally:
                self.free_soon(sender, pages)


class Decode(Server):
    """Receives prompts, and compares every byte."""

    def __init__(self, name: str) -> None:
        super().__init__()
        config = kvflow.DecodeConfig(instance=name, backend="nixl", digest_every=1, trust=PLAIN)
        self.opening = asyncio.create_task(self.stack.enter_async_context(kvflow.DecodeRank(config, self.layout)))

    async def decode(self, ticket: dict[str, object], request: Request) -> int:
        """Receive a prompt, and return its number of bytes; raise TransferFailed, or ValueError if a byte is wrong."""
        rank = await self.opening
        async with rank.announce(prefill=ticket) as receiver:  # before there are pages: prefill keeps its own
            pages = await self.take_pages(request)
            try:
                receiver.grant(tokens=(0, request.num_tokens), pages={"kv": pages})
                handover = await receiver.done()
                cells = find_cells(pages, 0, request.num_tokens)
                found = np.stack([pool[cells] for pool in self.pools])
                if (
                    not np.array_equal(found, request.compute_cells())
                    or handover.metadata != str(request.seed).encode()
                ):
                    raise ValueError(f"room {request.room}: decode does not have what prefill has computed")
                return found.nbytes
            finally:
                self.free_soon(receiver, pages)
