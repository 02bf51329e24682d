"""An engine for `benchmarks.failures`: `python -m benchmarks.failures_worker OPTIONS`.

It takes orders to transfer or abort a room, to report its state, and to exit. Times in its reports are from the
monotonic clock, which all processes of a machine share.
"""

import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import anyio
import anyio.to_thread
import numpy as np
from anyio.abc import TaskGroup

import kvflow
from benchmarks.failures import EngineOptions
from benchmarks.pools import PagePool, PoolShape
from benchmarks.processes import Line, next_order, run_child
from benchmarks.resources import num_files, num_threads, resident_bytes
from benchmarks.sides import PREFILL
from kvflow import Stage

__all__ = ["main"]

SETTLE_S = 20.0
"""How long to wait until nothing is open before reporting the account anyway."""

LOOK_S = 0.001

COMPUTE_S = 0.002
"""Compute time of a chunk; without it all chunks are written before the disturbance."""

ROOM_TOKENS = 65_536
"""Distance of the first tokens of successive rooms, which gives the pages of each room distinct content."""

Result = TypeVar("Result")


AnyTransfer = kvflow.RoomSender | kvflow.RoomReceiver


class _Account(NamedTuple):
    """Pages of a pool by state; `all` must be their sum."""

    free: int
    held: int
    quarantined: int
    all: int


class _Pool(PagePool):
    """A pool of one-token pages, with an allocator that frees a page only when `memory` is SAFE.

    Free pages are wiped.
    """

    def __init__(self, options: EngineOptions, seed: int) -> None:
        tensor = PoolShape(layers=options.layers, tensors=("kv",), head_bytes=options.cell_bytes, page_size=1)
        super().__init__(tensor, options.num_pages)
        self.wipe()
        self._free: list[int] = np.random.default_rng(seed).permutation(options.num_pages).tolist()
        self._held: list[list[int]] = []
        self._ended: list[tuple[AnyTransfer, list[int]]] = []

    def take(self, count: int) -> list[int]:
        """Take pages, scattered over the pool."""
        pages, self._free = self._free[:count], self._free[count:]
        if len(pages) < count:
            raise kvflow.CapacityExceeded("pool is empty", free=len(pages), wanted=count)
        self._held.append(pages)
        return pages

    def give_back(self, transfer: AnyTransfer, pages: list[int]) -> None:
        """Give back the pages of an ended transfer; `take_back` returns them once they are safe."""
        self._held.remove(pages)
        self._ended.append((transfer, pages))

    def take_back(self) -> list[list[int]]:
        """Return the pages that have become safe; they count as held until `free`."""
        safe = [entry for entry in self._ended if entry[0].memory is kvflow.Memory.SAFE]
        self._ended = [entry for entry in self._ended if entry not in safe]
        self._held += [pages for _, pages in safe]
        return [pages for _, pages in safe]

    def free(self, pages: list[int]) -> None:
        """Free wiped pages."""
        self._held.remove(pages)
        self._free += pages

    def account(self) -> _Account:
        """Return the number of pages in each state."""
        held = sum(len(pages) for pages in self._held)
        return _Account(len(self._free), held, sum(len(pages) for _, pages in self._ended), self.num_pages)

    def is_free_untouched(self) -> bool:
        """Return whether all free pages are still wiped. Slow."""
        return self.is_wiped(self._free)


class _Known(NamedTuple):
    """When the engine learned the outcome of a transfer, and on decode whether every byte is right."""

    at_s: float
    is_intact: bool | None


class Worker:
    """One engine with one rank."""

    def __init__(self, options: EngineOptions, line: Line) -> None:
        self._options = options
        self._line = line
        self._pool = _Pool(options, seed=os.getpid())
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._limiter = anyio.CapacityLimiter(1)
        timeouts = kvflow.Timeouts(lease_s=options.lease_s)
        common: dict[str, Any] = {
            "instance": options.side,
            "registry": options.registry,
            "backend": options.backend,
            "timeouts": timeouts,
        }
        self._rank: kvflow.PrefillRank | kvflow.DecodeRank
        if options.side == PREFILL:
            self._rank = kvflow.PrefillRank(kvflow.PrefillConfig(bind=options.bind, **common), self._pool.layout)
        else:
            self._rank = kvflow.DecodeRank(kvflow.DecodeConfig(**common), self._pool.layout)

    async def serve(self) -> None:
        """Execute orders until the one to exit."""
        async with self._rank as rank, anyio.create_task_group() as tasks:
            endpoint = rank.endpoint if isinstance(rank, kvflow.PrefillRank) else ""
            self._line.report("ready", endpoint=endpoint)
            while await self._obey(tasks):
                pass

    async def _obey(self, tasks: TaskGroup) -> bool:
        match await next_order(self._line):
            case {"do": "transfer", "room": room}:
                tasks.start_soon(self._transfer, room)
            case {"do": "abort", "room": room}:
                self._line.report("aborted", room=room, at_s=time.monotonic())
                if room in self._scopes:  # else it has already ended, and the round does not count
                    self._scopes[room].cancel()
            case {"do": "settle"}:
                tasks.start_soon(self._settle)
            case _:
                return False
        return True

    async def _transfer(self, room: int) -> None:
        """Run one transfer, and report its outcome."""
        rank, reason = self._rank, ""
        try:
            pages = self._pool.take(self._options.tokens)
        except kvflow.CapacityExceeded as error:  # not raised: the process would exit only at the next order
            self._line.report("refused", room=room, detail=str(error))
            return
        transfer: kvflow.RoomSender | kvflow.RoomReceiver
        run: Coroutine[Any, Any, _Known]
        if isinstance(rank, kvflow.PrefillRank):
            transfer = rank.send(room)
            run = self._send(transfer, room, pages)
        else:
            tokens = (0, self._options.tokens)
            transfer = rank.receive(room, prefill=PREFILL, tokens=tokens, pages={"kv": pages})
            run = self._receive(transfer, room, pages)
        known = _Known(0.0, None)
        with anyio.CancelScope() as self._scopes[room]:
            try:
                known = await run
            except kvflow.TransferFailed as error:
                reason, known = error.reason.value, _Known(_known_at(error), None)
        del self._scopes[room]
        left_at_s = time.monotonic()
        self._pool.give_back(transfer, pages)
        await self._sweep()
        self._line.report(
            "ended",
            room=room,
            outcome=transfer.outcome.value,
            reason=reason,
            memory=transfer.memory.value,
            at_s=known.at_s,
            left_at_s=left_at_s,
            is_intact=known.is_intact,
        )

    async def _send(self, sender: kvflow.RoomSender, room: int, pages: list[int]) -> _Known:
        """Compute and send a room chunk by chunk."""
        step = self._options.tokens // self._options.chunks
        num_writes = self._num_writes()
        async with sender:
            with _stamped():
                for start in range(0, self._options.tokens, step):
                    stop = min(start + step, self._options.tokens)
                    await self._beside(self._pool.write, pages[start:stop], room * ROOM_TOKENS + start)
                    await anyio.sleep(COMPUTE_S)
                    chunk = {"kv": pages[start:stop]}
                    if stop == self._options.tokens:
                        await sender.finish((start, stop), chunk)
                    else:
                        await sender.chunk((start, stop), chunk)
                    if start == 0:
                        await self._wait_for_writes(sender, num_writes)
                    self._line.report(f"chunk {start // step + 1}", room=room)
                await sender.delivered()
            return _Known(time.monotonic(), None)

    async def _wait_for_writes(self, sender: kvflow.RoomSender, num_writes: int) -> None:
        """Wait until the first write has begun, for disturbances to come in the middle of the transfer."""
        while sender.outcome is kvflow.Outcome.PENDING:
            if self._num_writes() > num_writes:
                return
            await anyio.sleep(LOOK_S)

    def _num_writes(self) -> int:
        """Return the number of writes that have begun so far."""
        statistics = self._rank.statistics()
        return statistics.posted + statistics.times.stages[Stage.SUBMIT].count

    async def _receive(self, receiver: kvflow.RoomReceiver, room: int, pages: list[int]) -> _Known:
        """Receive a room, and check every byte of it."""
        async with receiver:
            with _stamped():
                await receiver.done()
            at_s = time.monotonic()
        return _Known(at_s, await self._beside(self._pool.holds, pages, room * ROOM_TOKENS))

    async def _settle(self) -> None:
        """Wait until nothing is open, in quarantine or in flight, and report the account."""
        with anyio.move_on_after(SETTLE_S):
            while not self._is_settled():
                await self._sweep()
                await anyio.sleep(LOOK_S)
        is_untouched = await self._beside(self._pool.is_free_untouched)
        self._line.report("account", is_untouched=is_untouched, **self._account())

    async def _sweep(self) -> None:
        """Wipe and free the pages that have become safe."""
        for pages in self._pool.take_back():
            await self._beside(self._pool.wipe, pages)
            self._pool.free(pages)

    async def _beside(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run slow work in a thread: peers take a rank with a blocked event loop for dead."""
        return await anyio.to_thread.run_sync(work, *arguments, limiter=self._limiter)

    def _is_settled(self) -> bool:
        statistics = self._rank.statistics()
        account = self._pool.account()
        is_open = statistics.rooms or statistics.queued_chunks or statistics.posted or statistics.waiting_grants
        return not (is_open or account.held or account.quarantined)

    def _account(self) -> dict[str, Any]:
        statistics = self._rank.statistics()
        account = self._pool.account()
        return {
            "pages": account._asdict(),
            "is_settled": self._is_settled(),
            "peers": statistics.peers,
            "quarantined_pages": account.quarantined,
            "anomalies": statistics.anomalies,
            "fds": num_files(),
            "threads": num_threads(),
            "rss_mb": resident_bytes() / 1e6,
        }


@contextmanager
def _stamped() -> Iterator[None]:
    """Add to a failure the time at which the engine received it."""
    try:
        yield
    except kvflow.TransferFailed as error:
        error.values["known_at_s"] = time.monotonic()
        raise


def _known_at(error: kvflow.TransferFailed) -> float:
    """Return the time that `_stamped` added to a failure; now if there is none."""
    at_s = error.values.get("known_at_s")
    return at_s if isinstance(at_s, float) else time.monotonic()


def main() -> int:
    """Run one engine, and return the exit code."""
    return run_child(lambda options, line: anyio.run(Worker(options, line).serve), EngineOptions)


if __name__ == "__main__":
    sys.exit(main())
