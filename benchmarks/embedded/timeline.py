"""Times at which a kvflow handover reaches certain points of its code.

The module wraps internal functions of kvflow: when one is renamed, its step here has to follow.
"""

import functools
import importlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from benchmarks.sides import DECODE, PREFILL, SideName

__all__ = ["STEPS", "Mark", "Timeline", "steps_of"]

Mark = tuple[str, int]
"""A step and its time, in nanoseconds of the machine's monotonic clock."""


class Step(NamedTuple):
    """A point in the code.

    Attributes:
        name: Name in the output.
        side: Side that reaches it.
        function: "module:Class.method".
        is_end: Take the return of the function, not its call.
        counts: Predicate on the arguments that selects the right call.
    """

    name: str
    side: SideName
    function: str
    is_end: bool = False
    counts: Callable[..., bool] = lambda *_, **__: True


def _is_safe(_self: object, _outcome: object, memory: Any, _failure: object) -> bool:
    return bool(memory.value == "safe")


def _is_success(_self: object, outcome: Any, _memory: object, _failure: object) -> bool:
    return bool(outcome.value == "success")


STEPS: Final = (
    Step("`finish()` returns", PREFILL, "kvflow.blocking:BlockingSender.finish", is_end=True),
    Step("event loop takes the chunk up", PREFILL, "kvflow.sender:RoomSender._offer_nowait"),
    Step("planned", PREFILL, "kvflow.stages.submit:Submit.post"),
    Step("transport has it", PREFILL, "kvflow.stages.submit:Submit.post", is_end=True),
    Step("agent is about to post", PREFILL, "kvflow.backends.nixl.agent:NixlAgent.post_next"),
    Step("native post has returned", PREFILL, "kvflow.backends.nixl.writes:NativeWrites._follow", is_end=True),
    Step("decode's agent has the notice", DECODE, "kvflow.backends.delivery:EventDelivery.deliver_soon"),
    Step("decode's event loop takes it up", DECODE, "kvflow.stages.aggregate:Aggregate.handle_event"),
    Step(
        "decode's transfer has succeeded", DECODE, "kvflow.transfer:Transfer._report", is_end=True, counts=_is_success
    ),
    Step("decode's engine sees it", DECODE, ""),
    Step("prefill's pages are safe", PREFILL, "kvflow.sender:RoomSender._report", is_end=True, counts=_is_safe),
    Step("prefill's engine sees it", PREFILL, ""),
)
"""Steps in the order of the output; the engines record those without a function."""


class Timeline:
    """A recorder of the times at which this process reaches its steps.

    Args:
        side: Side of this process.
    """

    def __init__(self, side: SideName) -> None:
        self._marks: list[Mark] = []
        for step in STEPS:
            if step.side == side and step.function:
                self._wrap(step)

    def take(self) -> list[Mark]:
        """Return the marks since the last call."""
        taken, self._marks[:] = self._marks.copy(), []
        return taken

    def _wrap(self, step: Step) -> None:
        module, _, path = step.function.partition(":")
        owner, _, name = path.partition(".")
        place = getattr(importlib.import_module(module), owner)
        function, marks = getattr(place, name), self._marks

        @functools.wraps(function)
        def noted(*arguments: Any, **options: Any) -> Any:
            began = time.monotonic_ns()
            result = function(*arguments, **options)
            if step.counts(*arguments, **options):
                marks.append((step.name, time.monotonic_ns() if step.is_end else began))
            return result

        setattr(place, name, noted)


def steps_of(
    began_ns: Sequence[int], ended_ns: Sequence[int], freed_ns: Sequence[int], marks: Iterable[Mark]
) -> dict[str, list[float]]:
    """Return when each request reached each step, in milliseconds since the offer of its last chunk.

    Args:
        began_ns: Time of the offer, for consecutive requests that went one at a time.
        ended_ns: When decode's engine saw each request complete.
        freed_ns: When prefill's engine saw its pages free.
        marks: Marks of both processes.
    """
    found: dict[str, list[float]] = {step.name: [] for step in STEPS}
    by_time = sorted(marks, key=lambda mark: mark[1])
    ends = [*began_ns[1:], max(*ended_ns, *freed_ns) + 1]
    for began, stop, ended, freed in zip(began_ns, ends, ended_ns, freed_ns, strict=True):
        first: dict[str, int] = {}
        for name, at in by_time:
            if began <= at < stop:
                first.setdefault(name, at)
        first["decode's engine sees it"], first["prefill's engine sees it"] = ended, freed
        for name, at in first.items():
            found[name].append((at - began) / 1e6)
    return found
