"""One server with ranks of both roles: `python -m benchmarks.offers_worker OPTIONS`. Times are monotonic."""

import sys
import time
from contextlib import suppress
from typing import Any

import anyio
import msgspec

import kvflow
from benchmarks.offers import NUM_LANES, OffersOptions, pages_of, pool_of
from benchmarks.processes import Line, next_order, run_child
from kvflow.cli.tasks import open_tasks

__all__ = ["main"]


class Server:
    """A server over one pool and one endpoint of the transport, which takes every offer."""

    def __init__(self, options: OffersOptions, line: Line) -> None:
        self._options, self._line = options, line
        self._pool = pool_of(options)
        self._shared = kvflow.SharedBackend(options.backend)
        self._common: dict[str, Any] = {"instance": options.name, "registry": options.registry}
        self._free_lanes = list(range(NUM_LANES))
        self._orders: dict[str, Any] = {
            "send": self._send,
            "receive": self._receive,
            "move": self._move,
            "account": self._account,
            "switch": self._switch,
        }

    async def _open_prefill(self) -> None:
        config = kvflow.PrefillConfig(takes_offers=True, **self._common)
        self.prefill = await kvflow.PrefillRank(config, self._pool.layout, self._shared).__aenter__()
        self._tasks.start_soon(self._take_offers)

    async def _open_decode(self) -> None:
        config = kvflow.DecodeConfig(**self._common)
        self.decode = await kvflow.DecodeRank(config, self._pool.layout, self._shared).__aenter__()

    async def serve(self) -> None:
        """Carry out orders until the parent ends it."""
        async with open_tasks() as self._tasks:
            await self._open_decode()
            await self._open_prefill()
            self._line.report("ready")
            while (order := await next_order(self._line))["do"] != "leave":
                self._tasks.start_soon(self._carry_out, order)
            for rank in (self.prefill, self.decode):
                await rank.__aexit__(None, None, None)

    async def _carry_out(self, order: dict[str, Any]) -> None:
        do, kind, before, began = order.pop("do"), order["kind"], time.process_time(), time.monotonic()
        found = await self._orders[do](**order) or {}
        took = {"seconds": time.monotonic() - began, "cpu_s": time.process_time() - before}
        self._line.report(f"{do} {kind}", **took, **found)

    async def _send(self, kind: str, first: int, count: int, tokens: int, gap_s: float) -> None:
        """Send rooms one after another, each with the time of its last chunk; an event per room."""
        for number in range(first, first + count):
            await anyio.sleep(gap_s)
            async with self.prefill.send(f"{kind} {number}", background=kind == "warm") as sender:
                stamp = msgspec.json.encode(time.monotonic())
                await sender.finish((0, tokens), {"kv": pages_of(kind, number, tokens)}, metadata=stamp)
                await sender.delivered()

    async def _receive(self, kind: str, first: int, count: int, tokens: int) -> dict[str, Any]:
        """Receive rooms one after another, each granted before it is sent; return the times from their last chunks."""
        times = []
        for number in range(first, first + count):
            pages = {"kv": pages_of(kind, number, tokens)}
            receiver = self.decode.receive(f"{kind} {number}", prefill="a", tokens=(0, tokens), pages=pages)
            async with receiver:
                handover = await receiver.done()
                times.append(time.monotonic() - msgspec.json.decode(handover.metadata, type=float))
        return {"times_s": times}

    async def _move(self, kind: str, first: int, count: int, tokens: int, at_once: int, gap_s: float) -> None:
        """Offer rooms to the third server; each has moved when all of its pages are there."""
        limiter = anyio.CapacityLimiter(at_once)
        async with anyio.create_task_group() as tasks:
            for number in range(first, first + count):
                await anyio.sleep(gap_s)
                await limiter.acquire_on_behalf_of(number)
                tasks.start_soon(self._move_one, f"{kind} {number}", number, tokens, limiter)

    async def _move_one(self, room: str, number: int, tokens: int, limiter: anyio.CapacityLimiter) -> None:
        async with self.prefill.send(room, defer_lease=True) as sender:
            await sender.finish((0, tokens), {"kv": pages_of("live", number, tokens)})
            made = self.decode.offers.make_offer(self.prefill.ticket(room), to="c", tokens=(0, tokens))
            await made.accepted()
            sender.start_lease()
            await sender.delivered()
        limiter.release_on_behalf_of(number)

    async def _take_offers(self) -> None:
        offers = self.prefill.offers
        with suppress(kvflow.LocalProtocolError):  # the rank is closed
            while True:
                offer = await offers.wait_for_offer()
                if not self._free_lanes:
                    offer.decline("no free pages")
                elif offer.accept():
                    self._tasks.start_soon(self._take, offer, self._free_lanes.pop())

    async def _take(self, offer: kvflow.ReceivedOffer, lane: int) -> None:
        pages = {"kv": pages_of("moved", lane, offer.tokens[1])}
        async with self.decode.receive(prefill=offer.ticket, tokens=offer.tokens, pages=pages) as receiver:
            await receiver.done()
        self._free_lanes.append(lane)

    async def _account(self, kind: str) -> dict[str, Any]:
        return {"process_s": time.process_time()}

    async def _switch(self, kind: str, first: int, tokens: int) -> dict[str, Any]:
        """As a drained prefill server, become a decode server, and receive a room; then take up the old role, too."""
        await self.decode.__aexit__(None, None, None)
        agent, began = self._shared.agent, time.monotonic()
        await self.prefill.drain()
        drained = time.monotonic()
        await self._open_decode()
        opened = time.monotonic()
        await self.prefill.__aexit__(None, None, None)
        closed = time.monotonic()
        await self._receive(kind, first, 1, tokens)
        served = time.monotonic()
        if self._shared.agent != agent:
            raise kvflow.LocalProtocolError("the transport was opened again")
        await self._open_prefill()
        times = {"drain_s": drained - began, "open_s": opened - drained, "close_s": closed - opened}
        return {**times, "switch_s": served - drained}


def _serve(options: OffersOptions, line: Line) -> None:
    anyio.run(Server(options, line).serve)


def main() -> int:
    """Run the server to its end."""
    return run_child(_serve, OffersOptions)


if __name__ == "__main__":
    sys.exit(main())
