"""Outputs of a vision encoder, moved to the prefill servers that ask for them by content hash.

An encoder server turns images into rows of embeddings, as many as the image has patches. A prefill server puts them in
place of the image's tokens. Here each row is a "token" of a pool without layers; everything else is as for KV caches:
pages, page tables, proofs. Run it with `python examples/encoder_outputs.py`.

Who knows what:

- The prefill server knows the hash, and asks the encoder server in the engine's own way (HTTP, for example).
- The answer has the number of rows, for which the prefill server allocates pages, and a ticket. Each answer has a room
  of its own, so several prefill servers may ask for one item at once, and read it from the same pages.
- A prefill server asks only once for a hash that several of its requests need.

An item stays in its pages while a room for it is open, which is until the transfer has ended, or until nobody has come
for it within `Timeouts.grant_s`. Otherwise the item that was used least recently makes way for a new one.
"""

import asyncio
import itertools
import math
from asyncio import Future
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import anyio
import torch
from anyio.abc import TaskGroup

import kvflow

__all__ = ["Answer", "EncoderOutputs", "ItemNotHeld", "OutOfPages", "ReceivedOutputs", "describe_rows", "new_rows"]


class ItemNotHeld(KeyError):
    """The encoder server does not have the item, or no longer: encode it (again)."""


class OutOfPages(Exception):
    """There are not enough free pages now."""


class Answer(NamedTuple):
    """Answer of the encoder server to a prefill server; JSON-serialisable.

    Attributes:
        ticket: Ticket of the room in which the rows are sent.
        num_rows: Number of rows.
    """

    ticket: dict[str, object]
    num_rows: int


def new_rows(pages: int, page_rows: int, width: int) -> torch.Tensor:
    """Return a zeroed pool: float32[pages, page_rows, width]; a fixed dtype and width are those of the model."""
    return torch.zeros(pages, page_rows, width)


def describe_rows(pool: torch.Tensor, fingerprint: str) -> kvflow.KVLayout:
    """Return the layout of a pool. The fingerprint names the encoder: model, revision, and how images are prepared."""
    return kvflow.layout_from_tensors(
        {"embedding": [pool]}, axes="page row dim", heads=(0, 1), fingerprint=fingerprint, component="rows"
    )


class RowPool:
    """Rows in pages, of which some are free."""

    def __init__(self, pool: torch.Tensor) -> None:
        self.pool = pool
        self._free = list(range(len(pool)))

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def allocate(self, num_rows: int) -> list[int]:
        """Return pages for that many rows, or raise OutOfPages."""
        count = math.ceil(num_rows / self.pool.shape[1])
        if count > len(self._free):
            raise OutOfPages(f"{num_rows} rows need {count} pages, and {len(self._free)} are free")
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def free(self, pages: list[int]) -> None:
        """Return pages."""
        self._free += pages

    def read(self, pages: list[int], num_rows: int) -> torch.Tensor:
        """Return a copy of rows: float32[num_rows, width]."""
        return self.pool[pages].flatten(0, 1)[:num_rows]

    def write(self, pages: list[int], rows: torch.Tensor) -> None:
        """Write rows."""
        page_rows = self.pool.shape[1]
        for place, page in enumerate(pages):
            part = rows[place * page_rows : (place + 1) * page_rows]
            self.pool[page, : len(part)] = part


@dataclass
class _Item:
    pages: list[int]
    num_rows: int
    num_rooms: int = 0


class EncoderOutputs:
    """What an encoder server has computed, by content hash.

    Args:
        rank: An open rank on `pool`.
        pool: Memory of the rows, see `new_rows`.
        tasks: Task group in which items are sent.
    """

    def __init__(self, rank: kvflow.PrefillRank, pool: torch.Tensor, tasks: TaskGroup) -> None:
        self._rank = rank
        self._rows = RowPool(pool)
        self._tasks = tasks
        self._items: OrderedDict[str, _Item] = OrderedDict()
        self._numbers = itertools.count()

    def __contains__(self, content_hash: str) -> bool:
        return content_hash in self._items

    def put(self, content_hash: str, rows: torch.Tensor) -> None:
        """Keep an item: float32[num_rows, width]. Items that are not being sent make way for it.

        Raises:
            OutOfPages: All others are being sent, or it is larger than the pool.
        """
        if content_hash in self._items:
            return
        while True:
            try:
                pages = self._rows.allocate(len(rows))
                break
            except OutOfPages:
                if not self._evict_one():
                    raise
        self._rows.write(pages, rows)
        self._items[content_hash] = _Item(pages, len(rows))

    def _evict_one(self) -> bool:
        for content_hash, item in self._items.items():
            if not item.num_rooms:
                del self._items[content_hash]
                self._rows.free(item.pages)
                return True
        return False

    def answer(self, content_hash: str) -> Answer:
        """Start to send an item to the prefill server that asks for it.

        Raises:
            ItemNotHeld: It was never put, or was evicted.
        """
        item = self._items.get(content_hash)
        if item is None:
            raise ItemNotHeld(content_hash)
        self._items.move_to_end(content_hash)
        item.num_rooms += 1
        room = f"rows of {content_hash} for {next(self._numbers)}"
        self._tasks.start_soon(self._send, room, item)
        return Answer(self._rank.ticket(room), item.num_rows)

    async def _send(self, room: str, item: _Item) -> None:
        sender = self._rank.send(room)
        with suppress(kvflow.KvflowError):  # kvflow logs it: nobody has come, or the prefill server has left
            async with sender:
                await sender.finish((0, item.num_rows), {"rows": item.pages})
        if sender.memory is kvflow.Memory.SAFE or await sender.until_safe() is kvflow.Memory.SAFE:
            item.num_rooms -= 1


class ReceivedOutputs:
    """Encoder outputs that a prefill server receives.

    Args:
        rank: An open rank on `pool`.
        pool: Memory of the rows, see `new_rows`.
        tasks: Task group in which items are received.
        ask: Asks the encoder server for an item, or raises ItemNotHeld.
    """

    def __init__(
        self, rank: kvflow.DecodeRank, pool: torch.Tensor, tasks: TaskGroup, ask: Callable[[str], Awaitable[Answer]]
    ) -> None:
        self._rank = rank
        self._rows = RowPool(pool)
        self._tasks = tasks
        self._ask = ask
        self._coming: dict[str, Future[torch.Tensor]] = {}

    async def get(self, content_hash: str) -> torch.Tensor:
        """Return the rows of an item: float32[num_rows, width]. Requests that wait for it together share one transfer.

        Raises:
            ItemNotHeld: The encoder server does not have it.
            OutOfPages: Too many items are on their way.
            kvflow.TransferFailed: It did not arrive; `reason` says why, for example that the encoder server has died.
            kvflow.TicketError: The encoder server has another model.
        """
        coming = self._coming.get(content_hash)
        if coming is None:
            coming = self._coming[content_hash] = Future()
            # in a task of its own, so that the others get it even if the client of the first request leaves
            self._tasks.start_soon(self._fetch, content_hash, coming)
        return await asyncio.shield(coming)

    async def _fetch(self, content_hash: str, coming: "Future[torch.Tensor]") -> None:
        try:
            coming.set_result(await self._receive(await self._ask(content_hash)))
        except Exception as error:  # noqa: BLE001 - for those who wait; the server goes on
            coming.set_exception(error)
        finally:
            coming.cancel()  # if the server is shut down
            del self._coming[content_hash]

    async def _receive(self, answer: Answer) -> torch.Tensor:
        receiver, pages = self._rank.announce(prefill=answer.ticket), list[int]()
        try:
            async with receiver:
                pages = self._rows.allocate(answer.num_rows)
                receiver.grant(tokens=(0, answer.num_rows), pages={"rows": pages})
                await receiver.done()
                return self._rows.read(pages, answer.num_rows)
        finally:
            self._tasks.start_soon(self._free_when_safe, receiver, pages)

    async def _free_when_safe(self, receiver: kvflow.RoomReceiver, pages: list[int]) -> None:
        if receiver.memory is kvflow.Memory.SAFE or await receiver.until_safe() is kvflow.Memory.SAFE:
            self._rows.free(pages)


async def main() -> None:
    """Move an item between two ranks in one process; usually they are two servers."""
    source, target = new_rows(8, 16, 64), new_rows(8, 16, 64)
    encoder = kvflow.PrefillRank(kvflow.PrefillConfig(instance="encoder"), describe_rows(source, "my-encoder"))
    prefill = kvflow.DecodeRank(kvflow.DecodeConfig(instance="prefill"), describe_rows(target, "my-encoder"))
    async with encoder, prefill, anyio.create_task_group() as tasks:
        outputs = EncoderOutputs(encoder, source, tasks)

        async def ask(content_hash: str) -> Answer:
            return outputs.answer(content_hash)

        outputs.put("hash of an image", torch.randn(50, 64))
        rows = await ReceivedOutputs(prefill, target, tasks, ask).get("hash of an image")
        print(rows.shape)


if __name__ == "__main__":
    anyio.run(main)
