"""Say what happened from the files that ranks have written about an incident; or have them written now."""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvflow import __version__
from kvflow.cli.asking import add_rank_options, ask_ranks, find_ranks, print_problems
from kvflow.errors import ConfigError
from kvflow.room import RoomId

if TYPE_CHECKING:
    from kvflow.cli.incident.sides import Side
    from kvflow.cli.incident.story import Story
    from kvflow.state.replay import ReplayDifference

__all__ = ["add_arguments", "prepare"]

EXIT_DIFFERENCE: Final = 1
EXIT_SILENT: Final = 1
POLL_S: Final = 0.05
MAX_ROOMS: Final = 8
"""Maximum number of rooms that are told without being asked for."""

MAX_LISTED: Final = 32
"""Maximum number of rooms that are listed by name."""

MAX_CHARACTERS: Final = 400
"""Maximum length of a displayed event or effect; page tables can be long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    files = "what ranks have written (`incident_written`), or recorded (`record`); best those of both sides"
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help=files)
    parser.add_argument("--room", action="append", metavar="ROOM", help="tell of this room; may be repeated")
    trace = "write the time line for ui.perfetto.dev or chrome://tracing"
    parser.add_argument("--perfetto", type=Path, metavar="OUT", help=trace)
    parser.add_argument("--png", type=Path, metavar="OUT", help="draw the time line; needs matplotlib")
    seed = "write the first room as a scenario of the simulation, which fails as long as the room does"
    parser.add_argument("--seed", type=Path, metavar="OUT", help=seed)
    parser.add_argument("--now", action="store_true", help="have ranks of this host write files, and print their paths")
    add_rank_options(parser)


def prepare(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that reads files, or has them written; its exit code is 1 if a replay differs.

    Raises:
        ConfigError: There are no files and no `--now`, or there are both; or a file cannot be read, or is no recording.
    """
    if bool(arguments.files) is arguments.now:
        raise ConfigError("name files, or have them written with --now", files=len(arguments.files), now=arguments.now)
    return lambda: _write_now(arguments) if arguments.now else _tell(arguments)


def _write_now(arguments: argparse.Namespace) -> int:
    from kvflow.admin.messages import IncidentAnswer, IncidentRequest  # noqa: PLC0415 - `kvflow --help` loads little

    problems = []
    ends_at = time.monotonic() + arguments.timeout
    for one, _, answer in ask_ranks(find_ranks(arguments), IncidentRequest(), IncidentAnswer, arguments.timeout):
        if isinstance(answer, str):
            problems.append((one.name, answer))
            continue
        while not Path(answer.path).exists() and time.monotonic() < ends_at:
            time.sleep(POLL_S)
        if Path(answer.path).exists():
            print(answer.path)
        else:
            problems.append((one.name, f"{answer.path} has not appeared; see incident_unwritten in the rank's log"))
    print_problems(problems)
    return EXIT_SILENT if problems else 0


def _tell(arguments: argparse.Namespace) -> int:
    from kvflow.cli.incident.clocks import align_clocks, describe_offsets  # noqa: PLC0415 - as above
    from kvflow.cli.incident.sides import pair_messages, read_sides  # noqa: PLC0415 - as above
    from kvflow.cli.incident.story import tell_story  # noqa: PLC0415 - as above

    sides = read_sides(arguments.files)
    pairs = pair_messages(sides)
    offsets = align_clocks(sides, pairs)
    story = tell_story(sides, pairs, offsets)
    chosen = _choose_rooms(sides, story, arguments.room)
    rooms = chosen if arguments.room else chosen[:MAX_ROOMS]
    origin = min((line.at for room in rooms for line in story.lines_of(room)), default=0.0)
    for side in sides:
        print(_head(side))
    print("\n".join(describe_offsets(sides, offsets)), end="\n" if len(sides) > 1 else "")
    for room in rooms:
        print(f"\nroom {room}")
        print("\n".join(_told_room(story, sides, room, origin)))
    if left_out := list(map(str, chosen[len(rooms) :])):
        print(f"\nfurther rooms, shown with --room: {_listed_names(left_out)}")
    print()
    _write_outputs(arguments, story, sides, rooms, origin)
    return max([_replay(side) for side in sides], default=0)


def _write_outputs(
    arguments: argparse.Namespace, story: "Story", sides: "Sequence[Side]", rooms: Sequence[RoomId], origin: float
) -> None:
    from kvflow.cli.incident.pictures import draw_picture, write_trace  # noqa: PLC0415 - as above
    from kvflow.cli.incident.seed import write_scenario  # noqa: PLC0415 - as above

    try:
        if arguments.perfetto is not None:
            write_trace(arguments.perfetto, story, sides, rooms, origin)
        if arguments.png is not None:
            draw_picture(arguments.png, story, sides, rooms, origin)
        if arguments.seed is not None and rooms:
            arguments.seed.write_text(write_scenario(story, sides, rooms[0]))
    except OSError as error:
        raise ConfigError("file cannot be written", path=error.filename, detail=error.strerror) from error


def _choose_rooms(sides: "Sequence[Side]", story: "Story", asked: Sequence[str] | None) -> list[RoomId]:
    """Return the rooms that were asked for, or those for which files were written, open ones, or those that went wrong.

    Raises:
        ConfigError: The files do not have a room that was asked for.
    """
    known = {room: None for line in story.lines for room in line.rooms}
    if asked:
        names = {str(room): room for room in known}
        for name in asked:
            if name not in names:
                raise ConfigError("the files do not have this room", room=name, rooms=_listed_names(list(names)))
        return [names[name] for name in dict.fromkeys(asked)]
    causes = [cause for side in sides for cause in side.causes]
    found: list[RoomId] = [cause.room for cause in causes if cause.room is not None]
    if not found or any(cause.room is None for cause in causes):  # somebody has asked, perhaps because a room hangs
        found += [room for room, _ in story.open]
    found = found or [room for room in known if story.first_wrong(room) is not None]
    return list(dict.fromkeys(found))


def _listed_names(names: Sequence[str]) -> str:
    more = f", and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def _head(side: "Side") -> str:
    first, last = side.span
    version = "" if side.header.version == __version__ else f", written by kvflow {side.header.version or 'unknown'}"
    begins = "from its beginning" if side.header.first == 0 else f"without its first {side.header.first}"
    asked = ", ".join(dict.fromkeys(cause.text.partition(":")[0] for cause in side.causes)) or "recorded"
    return (
        f"{side.header.role} rank {side.me}: {len(side.moments)} events of {last - first:.1f} s, {begins}{version} "
        f"({asked})"
    )


def _told_room(story: "Story", sides: "Sequence[Side]", room: RoomId, origin: float) -> list[str]:
    width = max(len(side.name) for side in sides)
    lines = [f"{line.at - origin:12.6f}  {line.side.name:{width}}  {line.text}" for line in story.lines_of(room)]
    return [*lines, *_verdict(story, sides, room, origin)]


def _verdict(story: "Story", sides: "Sequence[Side]", room: RoomId, origin: float) -> list[str]:
    """Return how it ended or what it waits for, what went wrong first, and which message and which proof is missing."""
    wrong, lost = story.first_wrong(room), story.lost_of(room)
    lines = [_state(story, side, room, origin) for side in sides]
    for pair in [lost] if lost else []:
        at = _at_on_line(story, pair.sender, pair.sent_at) - origin
        lines.append(
            f"  lost: {pair.what[0]} from {pair.sender.name} at {at:.6f} did not arrive at {pair.receiver.name}"
        )
    for pair in story.under_way(room):
        at = _at_on_line(story, pair.sender, pair.sent_at) - origin
        lines.append(f"  under way: the write of {pair.sender.name} to {pair.receiver.name} from {at:.6f}")
    if wrong is not None:
        lines.append(f"  first: {wrong.at - origin:.6f} {wrong.side.name}: {wrong.wrong}")
    elif lost is None and not any((room, side.me) in story.open for side in sides):
        lines.append("  first: nothing that is recorded here")
    missing = [
        (side.name, text) for side in sides for cause in side.causes if cause.room == room for text in cause.missing
    ]
    lines += [f"  missing proof: {name}: {text}" for name, text in dict.fromkeys(missing)]
    return lines


def _state(story: "Story", side: "Side", room: RoomId, origin: float) -> str:
    from kvflow.cli.incident.waits import describe_wait  # noqa: PLC0415 - as above

    if (lines := story.open.get((room, side.me))) is not None:
        return f"  still open: {side.name}: {describe_wait(lines, origin)}"
    return f"  ended: {side.name}: {story.end_of(room, side)}"


def _at_on_line(story: "Story", side: "Side", at: float) -> float:
    """Return a time of a side on the common clock."""
    line = next((line for line in story.lines if line.side is side), None)
    return at if line is None else at + line.at - line.moment.now


def _replay(side: "Side") -> int:
    """Replay a side, or what can be replayed of it, and say whether code and recording agree."""
    from kvflow.state.part_replay import replay_part  # noqa: PLC0415 - as above
    from kvflow.state.replay import replay  # noqa: PLC0415 - as above

    head = f"replay of {side.name}"
    if side.has_gap:
        print(f"{head}: not possible, as events between its files are missing")
        return 0
    if not side.header.first:
        whole = replay(side.recording)
        difference = whole.difference
        head = f"{head}: {whole.num_events} events, {whole.num_effects} effects"
    else:
        try:
            part = replay_part(side.recording)
        except ConfigError as error:
            print(f"{head}: not possible: {error}; the setting `record` keeps all events")
            return 0
        difference = part.difference
        head = f"{head}: in part, {part.num_rooms} rooms that were opened meanwhile"
        head += f", without {part.num_left_out} others" if part.num_left_out else ""
        head += "" if part.stopped_at is None else f", up to event {part.stopped_at}, as it depends on one of these"
    print(f"{head}: code and recording {'agree' if difference is None else 'differ'}")
    if difference is None:
        return 0
    print("\n".join(_told_difference(difference)))
    if side.header.first:
        print("  the reason may be a room that was opened before")
    return EXIT_DIFFERENCE


def _told_difference(difference: "ReplayDifference") -> list[str]:
    """Return lines about the first event whose effects differ."""
    return [
        f"  event {difference.number}, at {difference.now:.6f} s: {_short(difference.event)}",
        *_listed("recorded", difference.recorded),
        *_listed("replayed", difference.replayed),
    ]


def _listed(title: str, items: Sequence[object]) -> list[str]:
    return [f"  {title}:", *(f"    {_short(item)}" for item in items or ["nothing"])]


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}... ({len(text)} characters)"
