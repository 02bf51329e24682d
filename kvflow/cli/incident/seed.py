"""Writes an incident as a scenario of the simulation, which plays it again with the real ranks in virtual time.

A scenario says what engines, processes and the network did, as far as the recordings show it. The ranks decide the
rest. It fails until its room ends with success.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvflow.cli.incident.sides import Side
from kvflow.cli.incident.story import Line, Story
from kvflow.errors import ConfigError
from kvflow.room import RoomId
from kvflow.state import events as ev
from kvflow.state.replay import read_settings
from kvflow.state.settings import DecodeSettings, PrefillSettings

__all__ = ["write_scenario"]

NAMES: Final = {"prefill": "P", "decode": "D"}
TIMEOUTS: Final = ("handshake", "transfer", "open", "grant", "progress", "drain", "lease")

SLOW_S: Final = 0.01
"""Writes that take longer are held in the scenario, because those of the simulation do not."""

UNSAID: Final[Mapping[type, str]] = {
    ev.DigestsVerified: "bytes were wrong: a scenario cannot say which, so the room is played without that",
    ev.PlanFailed: "pages could not be read: a scenario cannot say so",
    ev.DataReady: "a device failed: a scenario cannot say so",
}
"""What has happened, but cannot be said in a scenario."""


SAID: Final[Mapping[type, Callable[[Any], str]]] = {
    ev.SendOpened: lambda _: "{who} opens 1",
    ev.ChunkOffered: lambda one: f"{{who}} computes 1 up to {one.chunk.tokens[1]}" if not one.chunk.last else FINISHES,
    ev.ReceiveOpened: lambda one: (
        f"{{who}} announces 1 for {one.timeout_s:g} s"
        if one.is_announced
        else f"{{who}} receives 1 within {one.timeout_s:g} s"
    ),
    ev.ReceiveGranted: lambda _: "{who} grants 1",
    ev.ReceiveAborted: lambda _: "{who} aborts 1",
    ev.SendAborted: lambda _: "{who} aborts 1",
    ev.QuiesceAsked: lambda _: "{who} preempts 1",
    ev.PostEnded: lambda one: "" if one.failure is None else f"held writes {'linger' if one.lingers else 'fail'}",
    ev.PostInDoubt: lambda _: "held writes are in doubt",
    ev.QuarantineReleased: lambda _: "operator releases 1 on {who}",
    ev.DrainStarted: lambda _: "{who} drains",
}
"""What events say in the language of scenarios."""

FINISHES: Final = "{who} finishes 1"


class Step(NamedTuple):
    """What happened at a time of the common clock, as a line of a scenario."""

    at: float
    text: str


def write_scenario(story: Story, sides: Sequence[Side], room: RoomId) -> str:
    """Return a scenario for one room.

    Raises:
        ConfigError: There is not one side of each kind, or no recording of the room's beginning on decode.
    """
    by_role = {side.header.role: side for side in sides}
    lines = [line for line in story.lines_of(room) if line.text]
    events = [line.moment.event for line in lines]
    opened = [event for event in events if isinstance(event, ev.ReceiveOpened)]
    if set(by_role) != set(NAMES) or len(sides) != len(NAMES) or not opened:
        raise ConfigError(
            "a scenario needs the files of one prefill and one decode rank, with the beginning of the room", room=room
        )
    num_tokens = max((stop for _, stop in opened[0].ranges.values()), default=1)
    steps = sorted([*_steps(lines), *_faults(story, by_role["decode"], room, lines)], key=lambda step: step.at)
    unsaid = [
        text for kind, text in UNSAID.items() for line in lines if isinstance(line.moment.event, kind) if line.wrong
    ]
    head = [
        f"# Room {room} of {' and '.join(side.name for side in sides)}, as it was recorded; here it is room 1.",
        *(f"# It ended: {side.name}: {story.end_of(room, side)}." for side in sides),
        *(f"# Not played: {text}." for text in dict.fromkeys(unsaid)),
        *(_instance(by_role[role], role, num_tokens) for role in NAMES),
        _timeouts(by_role["decode"]),
        *_transport(by_role, events),
        f"request 1: {num_tokens} tokens, P to D",
    ]
    return "\n".join([*head, *_spread(steps, lines), "expect D 1: success, safe", "expect P 1: success, safe", ""])


def _instance(side: Side, role: str, num_tokens: int) -> str:
    page = max(component.tokens_per_slot for component in read_settings(side.header).layout.components)
    return f"{role} {NAMES[role]}: page {page}, pages {-(-num_tokens // page)}"


def _timeouts(side: Side) -> str:
    known = read_settings(side.header).timeouts
    return "timeouts " + " ".join(f"{name}={getattr(known, f'{name}_s'):g}" for name in TIMEOUTS)


def _transport(by_role: Mapping[str, Side], events: Sequence[object]) -> Iterator[str]:
    """Yield what the transport proves about a process that has ended, and whether it delivers notices."""
    prefill, decode = (read_settings(by_role[role].header) for role in NAMES)
    if isinstance(decode, DecodeSettings) and decode.ends_with_process:
        yield "transport that ends with the process"
    elif any(isinstance(event, ev.PeerFenced) for event in events):
        yield "transport that shows last bytes"
    if isinstance(prefill, PrefillSettings) and not prefill.in_band_notices:
        yield "transport without notices"


def _steps(lines: Sequence[Line]) -> Iterator[Step]:
    """Yield what engines and operators did, and how writes ended."""
    for line in lines:
        say = SAID.get(type(line.moment.event))
        text = "" if say is None else say(line.moment.event)
        if text:
            yield Step(line.at, text.format(who=NAMES[line.side.header.role]))


def _faults(story: Story, decode: Side, room: RoomId, lines: Sequence[Line]) -> Iterator[Step]:
    """Yield what the recordings imply: writes that did not end at once, a process that died, a network that was cut."""
    shift = {line.side.me: line.moment.now - line.at for line in story.lines}
    ended = [line for line in lines if isinstance(line.moment.event, ev.PostEnded | ev.PostInDoubt)]
    posted = [line.at for line in lines if any(name in ("PostPiece", "PostPlan") for name, _ in line.moment.effects)]
    is_slow = bool(ended and posted) and ended[-1].at - posted[-1] > SLOW_S
    gone = next((line for line in lines if isinstance(line.moment.event, ev.ProbeFinished) and line.wrong), None)
    if is_slow or any(line.wrong for line in ended) or gone is not None or story.under_way(room):
        yield Step(lines[0].at, "hold writes to D")
    if is_slow and not ended[-1].wrong:
        yield Step(ended[-1].at, "release writes")
    if gone is not None:
        lost = next((line.at for line in lines if isinstance(line.moment.event, ev.ConnectionLost)), gone.at)
        yield Step(lost, "P dies")
    elif (pair := story.lost_of(room)) is not None:
        source, target = ("D", "P") if pair.sender is decode else ("P", "D")
        yield Step(pair.sent_at - shift[pair.sender.me] - 1e-6, f"cut {source} to {target}")


def _spread(steps: Sequence[Step], lines: Sequence[Line]) -> Iterator[str]:
    """Yield the lines of steps, with the time between them, and that until the last event and a second more.

    No time passes between two steps if nothing else was recorded there: on a slow machine, messages between them would
    arrive in the scenario that had not arrived yet.
    """
    others = [line.at for line in lines if type(line.moment.event) not in SAID]
    ended_at = lines[-1].at + 1.0
    times = [*(step.at for step in steps[1:]), ended_at]
    for step, following_at in zip(steps, times, strict=True):
        yield step.text
        has_news = following_at == ended_at or any(step.at <= at <= following_at for at in others)
        if has_news and following_at - step.at >= 1e-3:
            yield f"run {(following_at - step.at) * 1e3:.0f} ms"
