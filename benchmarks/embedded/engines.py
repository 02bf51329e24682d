"""Both engines: a scheduler thread that polls, and a thread with other work.

Times of events are nanoseconds of the machine's monotonic clock, those of calls microseconds.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np

from benchmarks.embedded.loads import Load

__all__ = ["DecodeEnd", "News", "PrefillEnd", "other_work", "play_decode", "play_prefill"]

LOOK_S: Final = 0.0002
"""Interval of the scheduler's polls."""

PYTHON_S, NUMPY_S = 0.002, 0.003
"""Python and numpy parts of a step."""

NUMBERS: Final = 2_000_000
"""Numbers in one numpy call, which releases the GIL."""

Result = TypeVar("Result")


class News(NamedTuple):
    """Changes in the state of a room.

    Attributes:
        granted: The decode side has granted it.
        freed: Nothing reads its source pages any more.
        ended: It has succeeded.
    """

    room: int
    granted: bool = False
    freed: bool = False
    ended: bool = False


class PrefillEnd(Protocol):
    """Interface of a way for the prefill engine.

    Attributes:
        nap_s: Pause between two polls without news.
        is_quiet: The end needs no polls while every lane computes.
    """

    nap_s: float
    is_quiet: bool

    def send(self, room: int) -> None:
        """Start a request."""

    def chunk(self, room: int) -> None:
        """Send all tokens without ending the room."""

    def finish(self, room: int, *, is_rest: bool) -> None:
        """Send all tokens and end the room; with `is_rest`, only end it."""

    def completed(self) -> Iterable[News]:
        """Return what has changed since the last call."""


class DecodeEnd(Protocol):
    """Interface of a way for the decode engine; `nap_s` as in `PrefillEnd`."""

    nap_s: float

    def receive(self, room: int) -> None:
        """Start a request."""

    def completed(self) -> Iterable[News]:
        """Return what has changed since the last call."""


class Clock:
    """A record of the durations of calls, by name, in microseconds."""

    def __init__(self) -> None:
        self.calls_us: dict[str, list[float]] = defaultdict(list)

    def time(self, name: str, call: Callable[..., Result], *arguments: object, **options: object) -> Result:
        """Make a call and record its duration."""
        began = time.perf_counter_ns()
        result = call(*arguments, **options)
        self.calls_us[name].append((time.perf_counter_ns() - began) / 1e3)
        return result

    def look(self, call: Callable[[], Iterable[News]]) -> Iterable[News]:
        """Poll for news, and record the duration if there are none."""
        began = time.perf_counter_ns()
        news = call()
        took = (time.perf_counter_ns() - began) / 1e3
        if not news:
            self.calls_us["completed"].append(took)
        return news


@contextmanager
def other_work(engine: str) -> Iterator[list[int]]:
    """Run an engine's other work in another thread; yield a list with the number of steps done."""
    over = threading.Event()
    steps = [0]
    works: dict[str, Callable[[], object]] = {
        "sleeps": over.wait,
        "steps": lambda: _run_steps(over, steps),
        "python": lambda: _run_python(over, steps),
    }
    thread = threading.Thread(target=works[engine])
    thread.start()
    try:
        yield steps
    finally:
        over.set()
        thread.join()


def _run_steps(over: threading.Event, steps: list[int]) -> None:
    values = np.random.default_rng(1).random(NUMBERS)
    while not over.is_set():
        _run_until(time.perf_counter() + PYTHON_S, steps)
        until = time.perf_counter() + NUMPY_S
        while time.perf_counter() < until:
            np.sqrt(values)


def _run_python(over: threading.Event, steps: list[int]) -> None:
    while not over.is_set():
        _run_until(time.perf_counter() + PYTHON_S, steps)


def _run_until(when: float, steps: list[int]) -> None:
    while time.perf_counter() < when:
        sum(range(100))
        steps[0] += 1


def play_prefill(end: PrefillEnd, load: Load) -> dict[str, Any]:
    """Send each request of a load."""
    clock = Clock()
    began: dict[int, int] = {}
    freed: dict[int, int] = {}
    ended: dict[int, int] = {}
    rooms, computing = deque(load.rooms), deque[tuple[float, int]]()
    is_split = load.lanes > 1
    while len(ended) < load.count or len(freed) < load.count:
        while rooms and load.may_begin(rooms[0], ended):
            clock.time("send", end.send, rooms.popleft())
        while computing and computing[0][0] <= time.monotonic():
            _, room = computing.popleft()
            if is_split:
                clock.time("chunk", end.chunk, room)
            began[room] = time.monotonic_ns()
            clock.time("finish", end.finish, room, is_rest=is_split)
        news = clock.look(end.completed)
        now = time.monotonic_ns()
        for new in news:
            if new.granted and new.room not in began:
                computing.append((time.monotonic() + load.gap_s, new.room))
            if new.freed:
                freed.setdefault(new.room, now)
            if new.ended:
                ended.setdefault(new.room, now)
        if not news:
            is_idle = end.is_quiet and computing and load.lanes == len(computing)
            time.sleep(max(0.0, computing[0][0] - time.monotonic()) if is_idle else end.nap_s)
    return {
        "began_ns": [began[room] for room in load.rooms],
        "freed_ns": [freed[room] for room in load.rooms],
        "calls_us": _rounded(clock),
    }


def play_decode(end: DecodeEnd, load: Load) -> dict[str, Any]:
    """Receive each request of a load."""
    clock = Clock()
    ended: dict[int, int] = {}
    rooms = deque(load.rooms)
    while len(ended) < load.count:
        while rooms and load.may_begin(rooms[0], ended):
            clock.time("receive", end.receive, rooms.popleft())
        news = clock.look(end.completed)
        now = time.monotonic_ns()
        for new in news:
            if new.ended:
                ended.setdefault(new.room, now)
        if not news:
            time.sleep(end.nap_s)
    return {"ended_ns": [ended[room] for room in load.rooms], "calls_us": _rounded(clock)}


def _rounded(clock: Clock) -> dict[str, list[float]]:
    return {name: [round(took, 2) for took in calls] for name, calls in clock.calls_us.items()}
