"""Memory held by a waiting transfer: `python -m benchmarks.memory CASE METHOD COUNT` measures one case.

Each case runs in a process of its own, because a case that reuses memory freed by an earlier one would seem to need
less. The engine's own objects (a list of all rooms, and their page tables) are shared or included.
"""

import gc
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

import anyio
import msgspec
from anyio.abc import TaskGroup

import kvflow
from benchmarks.resources import resident_bytes
from benchmarks.rooms import (
    PAGES,
    PATIENT,
    TOKENS,
    Pair,
    Rooms,
    deploy,
    enter_receiver,
    enter_sender,
    make_pool,
    pages_of,
)
from benchmarks.rows import Measured, Row, compare
from kvflow import blocking

__all__ = ["CASES", "LIMIT_BYTES", "METHODS", "Held", "main", "measure_in_process", "measure_memory"]

LIMIT_BYTES: Final = 4_096
"""Limit of the memory that a waiting transfer holds on each side."""

BATCH: Final = 100

FIRST_ROOM: Final = 1_000_000
"""Number of the first measured room."""

CASES: Final = {
    "granted": ("a receive that is granted", ("decode", "prefill")),
    "opened": ("a room that nobody has asked for", ("prefill", "")),
    "computed": ("a computed room that nobody has asked for", ("prefill", "")),
    "awaited": ("a receive that a task of the engine awaits", ("both", "")),
    "blocking-granted": ("a receive of kvflow.blocking", ("both", "")),
    "blocking-opened": ("a room of kvflow.blocking", ("prefill", "")),
}
"""By name: what waits, the side that opens it, and the other side that then holds something, if any."""

TRACED: Final = replace(PATIENT, lease_s=60)
"""Timeouts for a process under tracemalloc, which is slow and must not be taken for dead."""

METHODS: Final = ("tracemalloc", "rss")


class Held(NamedTuple):
    """Bytes per waiting transfer: on the side that opened it, and on the other one."""

    here: float
    there: float


async def measure_memory(count: int, report: Callable[[Row], None]) -> list[Row]:
    """Measure each case in bytes that Python has allocated; the growth of the process is among the facts.

    Args:
        count: Number of waiting transfers.
        report: Called with each row.
    """
    rows = []
    for name, (case, sides) in CASES.items():
        held = {method: await measure_in_process(name, method, count) for method in METHODS}
        facts: dict[str, float | str] = {"rss of both sides": round(sum(held["rss"])), "limit": LIMIT_BYTES}
        for side, value in zip(sides, held["tracemalloc"], strict=True):
            if side:
                measured = Measured(
                    bench="scale",
                    group="waiting",
                    case=f"{case}, {side}",
                    quantity="memory",
                    unit="bytes",
                    better="lower",
                )
                rows.append(compare(measured, [value], facts=facts))
                report(rows[-1])
    return rows


async def measure_in_process(case: str, method: str, count: int) -> Held:
    """Measure a case of `CASES` by one of `METHODS`, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.memory", case, method, str(count)]
    ended = await anyio.run_process(command, start_new_session=True)
    return msgspec.json.decode(ended.stdout, type=Held)


async def _measure(case: str, count: int, in_use: Callable[[], int]) -> Held:
    """Open transfers in batches, and attribute the growth of memory to the two sides."""
    async with deploy(timeouts=TRACED, num_rooms=max(count, 2 * BATCH)) as (pair,), anyio.create_task_group() as tasks:
        await _warm_up(pair)
        held: list[Any] = []
        here = there = 0
        before = in_use()
        for number in range(count):
            held.append(await _begin(case, pair, number, tasks))
            if number % BATCH == BATCH - 1 or number == count - 1:
                opened = in_use()
                await _settle(case, pair, number + 1)
                settled = in_use()
                here, there, before = here + opened - before, there + settled - opened, settled
        tasks.cancel_scope.cancel()
    if case == "awaited":  # its task starts in a later turn of the event loop, which mixes both sides
        here, there = here + there, 0
    return Held(here / count, there / count)


async def _warm_up(pair: Pair) -> None:
    """Connect both ranks, and allocate everything that stays."""
    rooms = Rooms([pair])
    await rooms.fill(2 * BATCH)
    await rooms.finish_all()
    gc.collect()


async def _begin(case: str, pair: Pair, lane: int, tasks: TaskGroup) -> object:
    number = FIRST_ROOM + lane
    if case == "awaited":
        return tasks.start_soon(_await, pair, number, lane)
    if case == "granted":
        return await enter_receiver(pair, number, lane)
    sender = await enter_sender(pair, number)
    if case == "computed":
        await sender.finish(TOKENS, PAGES)
    return sender


async def _await(pair: Pair, number: int, lane: int) -> None:
    name = pair.prefill.config.instance
    async with pair.decode.receive(number, prefill=name, tokens=TOKENS, pages=pages_of(lane)) as receiver:
        await receiver.done()


async def _settle(case: str, pair: Pair, count: int) -> None:
    """Wait for the grants of all open transfers."""
    num_grants = 0 if case in ("opened", "computed") else count
    while True:
        await anyio.sleep(0.001)
        if pair.prefill.statistics().waiting_grants >= num_grants:
            break
    gc.collect()


def _measure_blocking(case: str, count: int, in_use: Callable[[], int]) -> Held:
    """Measure a case of kvflow.blocking from the engine's thread, with both sides added up."""
    source, target = make_pool(), make_pool(count + 1)
    with blocking.LoopThread() as loop:
        registry = loop.portal.wrap_async_context_manager(kvflow.Registry())
        with registry as opened:
            common: dict[str, Any] = {"registry": opened.endpoint, "backend": "memory", "timeouts": TRACED}
            configs = kvflow.PrefillConfig(instance="prefill", **common), kvflow.DecodeConfig(instance="d", **common)
            with (
                blocking.PrefillRank(configs[0], source.layout, loop=loop) as prefill,
                blocking.DecodeRank(configs[1], target.layout, loop=loop) as decode,
            ):
                sides = _BlockingSides(prefill, decode)
                sides.warm_up()
                before = in_use()
                held = [sides.begin(case, lane) for lane in range(count)]
                sides.settle(case, count)
                taken = in_use() - before
                for transfer in held:
                    transfer.abort()
    return Held(taken / count, 0.0)


class _BlockingSides(NamedTuple):
    prefill: blocking.PrefillRank
    decode: blocking.DecodeRank

    def warm_up(self) -> None:
        receiver = self.receive(1, 0)
        sender = self.prefill.send(1)
        sender.finish(TOKENS, PAGES)
        receiver.wait()
        sender.wait()
        gc.collect()

    def receive(self, number: int, lane: int) -> blocking.BlockingReceiver:
        return self.decode.receive(number, prefill="prefill", tokens=TOKENS, pages=pages_of(lane))

    def begin(self, case: str, lane: int) -> blocking.BlockingReceiver | blocking.BlockingSender:
        number = FIRST_ROOM + lane
        return self.receive(number, lane) if case == "blocking-granted" else self.prefill.send(number)

    def settle(self, case: str, count: int) -> None:
        while self._num_waiting(case) < count:
            time.sleep(0.01)
        gc.collect()

    def _num_waiting(self, case: str) -> int:
        statistics = self.prefill.statistics()
        return statistics.waiting_grants if case == "blocking-granted" else statistics.rooms


def _allocated_bytes() -> int:
    return tracemalloc.get_traced_memory()[0]


def main() -> int:
    """Measure one case in this process, and print the bytes per transfer.

    Returns:
        The exit code.
    """
    case, method, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if method == "tracemalloc":
        tracemalloc.start()
    in_use = _allocated_bytes if method == "tracemalloc" else resident_bytes
    if case.startswith("blocking"):
        held = _measure_blocking(case, count, in_use)
    else:
        held = anyio.run(_measure, case, count, in_use)
    print(msgspec.json.encode(held).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
