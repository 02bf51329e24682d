"""A breadth-first search of all reachable states of a world."""

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from simulation.explore.setup import Setup
from simulation.explore.small import SmallWorld

__all__ = ["Exploration", "Violation", "explore"]


class Violation(NamedTuple):
    """A state that violates a promise, and a shortest path to it."""

    steps: tuple[str, ...]
    error: str


class Exploration(NamedTuple):
    """Result of a search.

    Attributes:
        num_states: Distinct states reached.
        num_steps: Steps taken between them.
        num_ends: States in which nothing more can happen without a fault or a timer.
        is_complete: Every reachable state was reached.
        violation: The first violation; None if there is none.
    """

    num_states: int
    num_steps: int
    num_ends: int
    is_complete: bool
    violation: Violation | None


def explore(
    setup: Setup,
    *,
    max_states: int | None = None,
    seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Exploration:
    """Search every interleaving.

    Args:
        setup: Setup of the world.
        max_states: Stop after this number of states.
        seconds: Stop after this time.
        clock: Returns seconds.
    """
    start = SmallWorld(setup)
    stop_at = None if seconds is None else clock() + seconds
    seen = {start.fingerprint()}
    waiting: deque[tuple[SmallWorld, tuple[str, ...]]] = deque([(start, ())])
    num_steps = num_ends = 0
    while waiting:
        if (max_states is not None and len(seen) >= max_states) or (stop_at is not None and clock() >= stop_at):
            return Exploration(len(seen), num_steps, num_ends, is_complete=False, violation=None)
        world, path = waiting.popleft()
        steps = list(world.steps())
        if all(step.is_fault for step in steps):
            num_ends += 1
            error = _attempt(world.copy().check_end)
            if error is not None:
                return Exploration(len(seen), num_steps, num_ends, is_complete=False, violation=Violation(path, error))
        for step in steps:
            num_steps += 1
            after = world.copy()
            after.num_faults += step.is_fault
            error = _attempt(functools.partial(step.take, after))
            if error is not None:
                violation = Violation((*path, step.label), error)
                return Exploration(len(seen), num_steps, num_ends, is_complete=False, violation=violation)
            mark = after.fingerprint()
            if mark not in seen:
                seen.add(mark)
                waiting.append((after, (*path, step.label)))
    return Exploration(len(seen), num_steps, num_ends, is_complete=True, violation=None)


def _attempt(call: Callable[[], None]) -> str | None:
    """Call a function, and return its error: a broken promise, or an error that no event may cause."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - any error is a finding
        return f"{type(error).__name__}: {error}"
    return None
