"""A server of conversations that move from one to the next: `python -m tests.support.turn_process OPTIONS`.

It plays an engine with ranks of both roles over one pool. Orders: `compute` a turn of a conversation, `offer` what it
has to another server, `end` a conversation, `account` for its pages. It takes offers for as long as it has pages, asks
only for what it lacks, and checks every page of the conversation.
"""

import asyncio
import sys
from collections import Counter
from contextlib import suppress
from typing import Any, Final

import anyio
import msgspec
import numpy as np

import kvflow
from benchmarks.processes import Line, next_order, run_child
from kvflow.config import Timeouts
from tests.support.instances import NUM_PAGES, PAGE_SIZE, make_pool

__all__ = ["TurnOptions"]

TIMEOUTS: Final = Timeouts(handshake_s=5.0, transfer_s=10.0, grant_s=5.0, open_s=5.0, progress_s=5.0, lease_s=1.0)

ROWS: Final = 2
"""K and V, in the buffer of each layer."""


class TurnOptions(msgspec.Struct, frozen=True):
    """Options of the process: its name, the registry, and the transport."""

    name: str
    registry: str
    backend: str = "nixl"


class TurnServer:
    """Pages of conversations: page number n of a conversation has the tokens of its turn n."""

    def __init__(self, options: TurnOptions, line: Line) -> None:
        self._options = options
        self._line = line
        self._pool = make_pool()
        self._free = list(range(NUM_PAGES))
        self._kept: dict[str, list[int]] = {}
        self._moving: Counter[str] = Counter()
        self._ended: set[str] = set()
        self._prefill: kvflow.PrefillRank
        self._decode: kvflow.DecodeRank

    async def run(self) -> None:
        """Serve until the parent ends it."""
        name, registry, backend = self._options.name, self._options.registry, self._options.backend
        common: dict[str, Any] = {"instance": name, "registry": registry, "backend": backend, "timeouts": TIMEOUTS}
        sending, receiving = kvflow.PrefillConfig(takes_offers=True, **common), kvflow.DecodeConfig(**common)
        async with (
            kvflow.PrefillRank(sending, self._pool.layout) as self._prefill,
            kvflow.DecodeRank(receiving, self._pool.layout) as self._decode,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(self._take_offers, tasks)
            self._line.report("ready")
            while (order := await next_order(self._line))["do"] != "leave":
                match order["do"]:
                    case "compute":
                        is_done = self._compute(order["of"], order["turn"])
                        self._line.report("computed", of=order["of"], turn=order["turn"], ok=is_done)
                    case "offer":
                        tasks.start_soon(self._offer, order["of"], order["turn"], order["to"])
                    case "end":
                        self._ended.add(order["of"])
                        self._free_ended(order["of"])
                    case "account":
                        quarantined = len(self._prefill.quarantined()) + len(self._decode.quarantined())
                        kept = sum(map(len, self._kept.values()))
                        self._line.report("account", free=len(self._free), kept=kept, quarantined=quarantined)
            tasks.cancel_scope.cancel()

    def _compute(self, name: str, turn: int) -> bool:
        """Compute what is not here of the turns up to one; return whether there were pages."""
        kept = self._kept.setdefault(name, [])
        while len(kept) <= turn:
            if not self._free:
                return False
            kept.append(self._free.pop())
            for rows, wanted in zip(self._rows(kept[-1]), _content(name, len(kept) - 1), strict=True):
                rows[:] = wanted
        return True

    def _rows(self, page: int) -> list[Any]:
        return [buffer.reshape(ROWS, NUM_PAGES, -1)[:, page] for buffer in self._pool.buffers]

    def _is_right(self, name: str, pages: list[int]) -> bool:
        return all(
            np.array_equal(rows, wanted)
            for number, page in enumerate(pages)
            for rows, wanted in zip(self._rows(page), _content(name, number), strict=True)
        )

    def _free_ended(self, name: str) -> None:
        """Free the pages of a conversation that has ended, once no transfer uses them."""
        if name in self._ended and not self._moving[name]:
            self._free += self._kept.pop(name, [])

    async def _offer(self, name: str, turn: int, to: str) -> None:
        tokens, pages = (0, (turn + 1) * PAGE_SIZE), self._kept.get(name, [])[: turn + 1]
        metadata = msgspec.json.encode([name, turn])
        sender = self._prefill.send(name, defer_lease=True)
        self._moving[name] += 1
        try:
            async with sender:
                await sender.finish(tokens, {"kv": pages})
                ticket = self._prefill.ticket(name)
                await self._decode.offers.make_offer(ticket, to=to, tokens=tokens, metadata=metadata).accepted()
                sender.start_lease()
                await sender.delivered()
        except kvflow.KvflowError as error:
            self._line.report("kept", of=name, turn=turn, why=str(error))
        else:
            self._line.report("sent", of=name, turn=turn)
        await self._moved(name, sender)

    async def _moved(self, name: str, transfer: kvflow.RoomSender | kvflow.RoomReceiver) -> None:
        """Wait until nothing can access the pages of a transfer any more."""
        with suppress(kvflow.KvflowError):
            await transfer.until_safe()
        self._moving[name] -= 1
        self._free_ended(name)

    async def _take_offers(self, tasks: Any) -> None:
        while True:
            offer = await self._prefill.offers.wait_for_offer()
            name, turn = msgspec.json.decode(offer.metadata, type=tuple[str, int])
            have = len(self._kept.get(name, []))
            num_lacking = turn + 1 - have
            if name in self._ended or num_lacking > len(self._free):
                offer.decline("no free pages")
            elif offer.accept():
                pages = [self._free.pop() for _ in range(num_lacking)]
                tasks.start_soon(self._receive, offer, name, turn, have, pages)

    async def _receive(self, offer: kvflow.ReceivedOffer, name: str, turn: int, have: int, pages: list[int]) -> None:
        tokens = (have * PAGE_SIZE, offer.tokens[1])
        receiver = self._decode.receive(prefill=offer.ticket, tokens=tokens, pages={"kv": pages})
        self._moving[name] += 1
        try:
            async with receiver:
                await receiver.done()
        except kvflow.KvflowError as error:
            self._line.report("lost", of=name, turn=turn, why=str(error))
            with suppress(kvflow.KvflowError):
                await receiver.until_safe()
            self._free += pages
        else:
            kept = self._kept[name] = [*self._kept.get(name, []), *pages]
            self._line.report("holds", of=name, turn=turn, ok=self._is_right(name, kept), moved=len(pages))
        await self._moved(name, receiver)


def _content(name: str, number: int) -> list[Any]:
    """Return what a page of a conversation contains, for each layer."""
    seed = [*name.encode(), number]
    rng = np.random.default_rng(seed)
    pool = make_pool().shape
    return [rng.integers(0, 255, (ROWS, pool.page_bytes), np.uint8) for _ in range(pool.num_layers)]


if __name__ == "__main__":
    sys.exit(run_child(lambda options, line: asyncio.run(TurnServer(options, line).run()), TurnOptions))
