"""The time line for Perfetto and Chrome (trace event format), and as a picture."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kvflow.cli.incident.sides import Pair, Side
from kvflow.cli.incident.story import Line, Story
from kvflow.cli.options import check_installed
from kvflow.room import RoomId
from kvflow.state import events as ev

__all__ = ["draw_picture", "write_trace"]

EVENT_US: Final = 1.0
"""Width of an event, so that arrows have something to start and end at."""

SENDER, RECEIVER = "#1f5fa8", "#4c9f70"
WRONG: Final = "#c44e52"
MAX_LABEL: Final = 90


def write_trace(path: Path, story: Story, sides: Sequence[Side], rooms: Sequence[RoomId], origin: float) -> None:
    """Write the events of some rooms, their writes, and arrows for messages; open it with ui.perfetto.dev."""
    items = [*_names(sides), *_spans(story, sides, rooms, origin)]
    for line in _chosen(story, rooms):
        name = line.text.partition(" ")[0]
        items.append(
            _item("X", f"{name}: {line.wrong}" if line.wrong else name, sides.index(line.side), line.at - origin)
            | {"dur": EVENT_US, "args": {"text": line.text}}
        )
    for number, (pair, sent_at, heard_at) in enumerate(_arrows(story, rooms)):
        common = {"cat": "message", "id": number}
        kind = str(pair.what[0])
        items.append(_item("s", kind, sides.index(pair.sender), sent_at - origin) | common)
        items.append(_item("f", kind, sides.index(pair.receiver), heard_at - origin) | common | {"bp": "e"})
    path.write_text(json.dumps({"traceEvents": items, "displayTimeUnit": "ms"}))


def _names(sides: Sequence[Side]) -> Iterator[dict[str, Any]]:
    for number, side in enumerate(sides):
        yield _item("M", "process_name", number, 0.0) | {"args": {"name": f"{side.header.role} {side.me}"}}


def _spans(story: Story, sides: Sequence[Side], rooms: Sequence[RoomId], origin: float) -> Iterator[dict[str, Any]]:
    """Yield each room on each side from its first to its last event, and each write from its post to its end."""
    for number, side in enumerate(sides):
        for room in rooms:
            times = [line.at for line in story.lines if line.side is side and room in line.rooms]
            for phase, at in zip("be", (times[0], times[-1]) if times else (), strict=False):
                yield _item(phase, f"room {room}", number, at - origin) | {"cat": "room", "id": f"{number} {room}"}
        for line in story.lines:
            event = line.moment.event
            if line.side is not side or not line.rooms & set(rooms):
                continue
            posted = [fields["seq"] for name, fields in line.moment.effects if name in ("PostPiece", "PostPlan")]
            ended = [event.seq] if isinstance(event, ev.PostEnded) else []
            for phase, seqs in (("b", posted), ("e", ended)):
                for seq in seqs:
                    identity = {"cat": "write", "id": f"{number} {sorted(map(str, line.rooms))} {seq}"}
                    yield _item(phase, f"write {seq}", number, line.at - origin) | identity


def _item(phase: str, name: str, process: int, at: float) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": process, "tid": 0, "ts": round(at * 1e6, 3)}


def _chosen(story: Story, rooms: Sequence[RoomId]) -> list[Line]:
    found = {id(line): line for room in rooms for line in story.lines_of(room)}
    return sorted(found.values(), key=lambda line: line.at)


def _arrows(story: Story, rooms: Sequence[RoomId]) -> Iterator[tuple[Pair, float, float]]:
    """Yield the messages about some rooms that have arrived, with both times on the common clock."""
    shift = {line.side.me: line.moment.now - line.at for line in story.lines}
    for pair in story.pairs:
        if pair.heard_at is not None and pair.what[1] in rooms:
            yield pair, pair.sent_at - shift[pair.sender.me], pair.heard_at - shift[pair.receiver.me]


def draw_picture(path: Path, story: Story, sides: Sequence[Side], rooms: Sequence[RoomId], origin: float) -> None:
    """Draw a lane for each side, a dot for each event, red if something went wrong, and a line for each message.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    check_installed("matplotlib")
    from matplotlib.figure import Figure  # noqa: PLC0415 - only a picture needs it

    figure = Figure(figsize=(12, 1.5 + 1.2 * len(sides)), layout="constrained")
    axes = figure.subplots()
    for pair, sent_at, heard_at in _arrows(story, rooms):
        lanes = (sides.index(pair.sender), sides.index(pair.receiver))
        axes.plot((sent_at - origin, heard_at - origin), lanes, color="#b9c4d0", linewidth=0.8, zorder=1)
    shift = {line.side.me: line.moment.now - line.at for line in story.lines}
    for pair in story.lost:
        if pair.what[1] in rooms:
            lanes = (sides.index(pair.sender), sides.index(pair.receiver))
            sent_at = pair.sent_at - shift[pair.sender.me] - origin
            middle = (lanes[0] + lanes[1]) / 2
            axes.plot((sent_at, sent_at), (lanes[0], middle), color=WRONG, linestyle=":", marker="x", markevery=[1])
            axes.annotate(f"{pair.what[0]} lost", (sent_at, middle), (6, 0), textcoords="offset points", fontsize=7)
    labels = set()
    for line in _chosen(story, rooms):
        lane = sides.index(line.side)
        colour = WRONG if line.wrong else SENDER if line.side.header.role == "prefill" else RECEIVER
        axes.plot(line.at - origin, lane, "o", color=colour, markersize=5, zorder=2)
        if line.wrong and (lane, line.wrong) not in labels:
            labels.add((lane, line.wrong))
            text = line.wrong if len(line.wrong) <= MAX_LABEL else f"{line.wrong[:MAX_LABEL]}..."
            axes.annotate(text, (line.at - origin, lane), (4, 8), textcoords="offset points", fontsize=7)
    axes.set_yticks(range(len(sides)), [side.name for side in sides])
    axes.set_ylim(len(sides) - 0.5, -0.5)
    axes.set_xlabel("seconds")
    axes.set_title(", ".join(f"room {room}" for room in rooms), fontsize=9)
    figure.savefig(path, format="png", dpi=150)
