"""One process with an engine: `python -m benchmarks.embedded_worker OPTIONS`.

Times of events are nanoseconds of the machine's monotonic clock, those of calls microseconds.
"""

import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from benchmarks.embedded import LANES, EmbeddedOptions, Load
from kvflow import DecodeConfig, PrefillConfig
from kvflow.blocking import BlockingSender, DecodeRank, Memory, Outcome, PrefillRank
from kvflow.cli.bench.loads import SHAPES
from kvflow.cli.bench.sides import DECODE, PREFILL
from kvflow.cli.pools import PagePool, page_tables
from kvflow.cli.processes import Line, run_child
from kvflow.errors import KvflowError

__all__ = ["main"]

LOOK_S: Final = 0.0002
"""Between two looks of the scheduler."""

PYTHON_S, NUMPY_S = 0.002, 0.003
"""Parts of a step."""

Result = TypeVar("Result")


class Clock:
    """Notes how long calls take, by name, in microseconds."""

    def __init__(self) -> None:
        self.calls_us: dict[str, list[float]] = defaultdict(list)

    def time(self, name: str, call: Callable[[], Result]) -> Result:
        """Make a call."""
        began = time.perf_counter_ns()
        result = call()
        self.calls_us[name].append((time.perf_counter_ns() - began) / 1e3)
        return result


@contextmanager
def other_work(engine: str) -> Iterator[None]:
    """Have another thread do what an engine does meanwhile."""
    over = threading.Event()
    works: dict[str, Callable[[], object]] = {
        "sleeps": over.wait,
        "steps": lambda: _run_steps(over),
        "python": lambda: _run_python(over),
    }
    thread = threading.Thread(target=works[engine])
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _run_steps(over: threading.Event) -> None:
    values = np.random.default_rng(1).random(2_000_000)
    while not over.is_set():
        _run_until(time.perf_counter() + PYTHON_S)
        until = time.perf_counter() + NUMPY_S
        while time.perf_counter() < until:
            np.sqrt(values)


def _run_python(over: threading.Event) -> None:
    while not over.is_set():
        _run_until(time.perf_counter() + PYTHON_S)


def _run_until(when: float) -> None:
    while time.perf_counter() < when:
        sum(range(100))


class PrefillEngine:
    """Sends requests."""

    def __init__(self, rank: PrefillRank, options: EmbeddedOptions, tables: list[list[int]]) -> None:
        self._rank = rank
        self._tokens = (0, options.tokens)
        self._tables = tables

    def play(self, load: Load) -> dict[str, Any]:
        """Send each request of a load."""
        clock, rank = Clock(), self._rank
        began: dict[int, int] = {}
        freed: dict[int, int] = {}
        ended: dict[int, int] = {}
        rooms, computing = deque(load.rooms), deque[tuple[float, BlockingSender]]()
        while len(ended) < load.count or len(freed) < load.count:
            while rooms and load.count - len(rooms) - len(ended) < load.lanes:
                room = rooms.popleft()
                sender = clock.time("send", lambda: rank.send(room))  # noqa: B023 - called at once
                computing.append((time.monotonic() + load.gap_s, sender))
            while computing and computing[0][0] <= time.monotonic():
                _, sender = computing.popleft()
                pages = {"kv": self._tables[sender.room % LANES]}
                began[sender.room] = time.monotonic_ns()
                clock.time("finish", lambda: sender.finish(self._tokens, pages, metadata=b"token"))  # noqa: B023 - as above
            updates = clock.time("completed", rank.completed)
            for update in updates:
                _check(update.failure)
                if update.memory is Memory.SAFE:
                    freed.setdefault(update.room, time.monotonic_ns())
                if update.outcome is Outcome.SUCCESS:
                    ended.setdefault(update.room, time.monotonic_ns())
            if updates:  # only looks that bring nothing count
                clock.calls_us["completed"].pop()
            else:
                time.sleep(LOOK_S)
        return {
            "began_ns": [began[room] for room in load.rooms],
            "freed_ns": [freed[room] for room in load.rooms],
            "calls_us": clock.calls_us,
        }


class DecodeEngine:
    """Receives requests."""

    def __init__(self, rank: DecodeRank, options: EmbeddedOptions, tables: list[list[int]]) -> None:
        self._rank = rank
        self._tokens = (0, options.tokens)
        self._tables = tables

    def play(self, load: Load) -> dict[str, Any]:
        """Receive each request of a load."""
        clock, rank = Clock(), self._rank
        ended: dict[int, int] = {}
        rooms = deque(load.rooms)
        while len(ended) < load.count:
            while rooms and load.count - len(rooms) - len(ended) < load.lanes:
                room = rooms.popleft()
                pages = {"kv": self._tables[room % LANES]}
                clock.time(
                    "receive",
                    lambda: rank.receive(room, prefill=PREFILL, tokens=self._tokens, pages=pages),  # noqa: B023 - called at once
                )
            updates = clock.time("completed", rank.completed)
            for update in updates:
                _check(update.failure)
                if update.outcome is Outcome.SUCCESS:
                    ended.setdefault(update.room, time.monotonic_ns())
            if updates:
                clock.calls_us["completed"].pop()
            else:
                time.sleep(LOOK_S)
        return {"ended_ns": [ended[room] for room in load.rooms], "calls_us": clock.calls_us}


def _check(failure: object) -> None:
    if failure is not None:
        raise KvflowError("a transfer failed", failure=str(failure))


def serve(options: EmbeddedOptions, line: Line) -> None:
    """Do as told until told to leave."""
    shape = SHAPES[options.shape]
    size = options.tokens // shape.page_size
    pool = PagePool(shape, LANES * size)
    tables = page_tables(pool.num_pages, LANES, size, [options.side == PREFILL]).tolist()
    engine: PrefillEngine | DecodeEngine
    if options.side == PREFILL:
        sending = PrefillConfig(instance=PREFILL, registry=options.registry, backend=options.backend)
        rank: PrefillRank | DecodeRank = PrefillRank(sending, pool.layout)
    else:
        receiving = DecodeConfig(instance=DECODE, registry=options.registry, backend=options.backend)
        rank = DecodeRank(receiving, pool.layout)
    with rank:
        engine = (PrefillEngine if isinstance(rank, PrefillRank) else DecodeEngine)(rank, options, tables)  # type: ignore[arg-type]
        line.report("ready")
        while (order := line.receive())["do"] != "leave":
            load = msgspec.convert(order["load"], Load)
            with other_work(load.engine):
                played = engine.play(load)
            line.report("played", room=load.first_room, **played)


def main() -> int:
    """Run the process; gives the exit code."""
    return run_child(serve, EmbeddedOptions)


if __name__ == "__main__":
    sys.exit(main())
