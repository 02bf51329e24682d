"""Timeline of a request, joined from the traces of its client and both servers.

All processes run on one machine and share its monotonic clock.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.vllm_handover.client import Answer

__all__ = ["BETWEEN", "FIRST_TOKEN", "HANDOVER", "SPANS", "WITHIN_MOVE", "Event", "read_events", "spans"]

HANDOVER: Final = "last step of prefill to first step of decode"
FIRST_TOKEN: Final = "first token"  # noqa: S105 - not that kind
BETWEEN: Final = "between the first two tokens"

SPANS: Final = ("reply", "schedule", "move", "step", "compute", "stream")
"""Parts of a handover, in order.

`reply`: from the end of prefill's last step until the client has its answer. `schedule`: until decode has allocated
blocks. `move`: until decode's worker reports them filled. `step`: until its next step begins, which ends the handover.
`compute`: that step. `stream`: until the client has the first token.
"""

WITHIN_MOVE: Final = ("ask", "first notice", "notices", "poll")
"""Parts of `move`, from kvflow's calls.

`ask`: until `grant`. `first notice`: until the first piece has arrived, which is the time of prefill's plan and of the
first write. `notices`: until the last piece. `poll`: until the worker reports to vLLM.
"""


class Event(msgspec.Struct, frozen=True):
    """A line of a trace, see `benchmarks.vllm_handover.plugin`."""

    at: float
    event: str
    requests: tuple[str, ...]
    values: dict[str, float] = {}


def read_events(trace: Path) -> list[Event]:
    """Read the trace of one server."""
    return [msgspec.json.decode(line, type=Event) for line in trace.read_bytes().splitlines() if line.endswith(b"}")]


def spans(
    name: str, prefill: Sequence[Event], decode: Sequence[Event], answers: tuple[Answer, Answer]
) -> dict[str, float]:
    """Return the durations of the parts of a handover.

    Args:
        name: Name of the request, part of its ids on both servers.
        prefill: Trace of prefill.
        decode: Trace of decode.
        answers: Answers of both servers to the client.

    Returns:
        Seconds of each of `SPANS`, of `WITHIN_MOVE` where known, of `HANDOVER`, `FIRST_TOKEN` and `BETWEEN`.
    """
    first, second = answers
    ended = _times(name, prefill)["step_ended"][-1]
    noted = _times(name, decode)
    received = noted["received"][0]
    began = min(at for at in noted["step_began"] if at >= received)
    computed = min(at for at in noted["step_ended"] if at >= began)
    points = (ended, first.ended_at, noted["allocated"][0], received, began, computed, second.first_at)
    parts = dict(zip(SPANS, (later - earlier for earlier, later in itertools.pairwise(points)), strict=True))
    asked = [event for event in decode if event.event == "granted" and noted["allocated"][0] <= event.at <= received]
    brought = [event for event in decode if event.event == "brought" and noted["allocated"][0] <= event.at <= received]
    if asked and brought:
        first_s, all_s = brought[0].values["first_notice_s"], brought[0].values["elapsed_s"]
        within = (asked[0].at - noted["allocated"][0], first_s, all_s - first_s, received - asked[0].at - all_s)
        parts |= dict(zip(WITHIN_MOVE, within, strict=True))
    first_token = second.first_at - min(first.began_at, second.began_at)
    return {**parts, HANDOVER: began - ended, FIRST_TOKEN: first_token, BETWEEN: second.second_at - second.first_at}


def _times(name: str, events: Sequence[Event]) -> Mapping[str, list[float]]:
    found: dict[str, list[float]] = {}
    for event in events:
        if any(name in request for request in event.requests):
            found.setdefault(event.event, []).append(event.at)
    return found
