"""Rooms that wait because the other side was given other ones."""

from collections.abc import Iterator
from typing import Final

from kvflow.admin.client import ask_all, find_sockets
from kvflow.admin.messages import MAX_ROWS, RoomRow, RoomsAnswer, RoomsRequest, StatusAnswer, StatusRequest
from kvflow.doctor.findings import DoctorOptions, Finding, warn

__all__ = ["judge_rooms"]

WAITED_S: Final = 5.0
"""How long one side may wait for the other before that is strange: a prompt may still be computed, or be queued."""

FIX: Final = "compare `kvflow rooms` of both sides; correct the router, which must give both the same room"


def judge_rooms(options: DoctorOptions) -> Iterator[Finding]:
    """Tell of prefill ranks that are asked for rooms other than those which they have open."""
    paths = find_sockets(options.socket)
    answers = [one.parse(StatusAnswer) for one in ask_all(paths, StatusRequest(), options.timeout_s)]
    tables = [one.parse(RoomsAnswer) for one in ask_all(paths, RoomsRequest(limit=MAX_ROWS), options.timeout_s)]
    ranks = [
        (answer, table.rooms)
        for answer, table in zip(answers, tables, strict=True)
        if isinstance(answer, StatusAnswer) and isinstance(table, RoomsAnswer) and table.total == len(table.rooms)
    ]
    for answer, rooms in ranks:
        if answer.role == "prefill":
            waiting = [f"{_name(other)} waits for {_told(row)}" for other, row in _missed(answer, rooms, ranks)]
            yield from _judge(answer, rooms, waiting)


def _judge(prefill: StatusAnswer, rooms: list[RoomRow], waiting: list[str]) -> Iterator[Finding]:
    """Tell of different rooms; grants alone may wait for a prompt that is queued while others are computed."""
    unasked = [_told(row) for row in rooms if not row.num_peers and _is_old(row)]
    num_grants = prefill.statistics["waiting_grants"]
    parts = [f"nobody has asked for {', '.join(unasked[:3])}"] if unasked else []
    parts += [f"rooms that its engine has not opened, but decode has asked for: {num_grants}"] if num_grants else []
    parts += waiting[:3]
    if waiting or (num_grants and (unasked or not rooms)):
        yield warn(f"{_name(prefill)}: {'; '.join(parts)}", FIX)


def _missed(
    prefill: StatusAnswer, rooms: list[RoomRow], ranks: list[tuple[StatusAnswer, list[RoomRow]]]
) -> Iterator[tuple[StatusAnswer, RoomRow]]:
    """Yield the decode ranks of this host that wait for rooms of a prefill rank which it does not have."""
    opened = {row.room for row in rooms}
    for answer, wanted in ranks:
        if answer.role == "decode":
            for row in wanted:
                names = {peer.partition("/")[0] for peer in row.peers}
                if row.room not in opened and prefill.instance in names and _is_old(row):
                    yield answer, row


def _is_old(row: RoomRow) -> bool:
    return row.outcome == "pending" and row.age_s >= WAITED_S


def _told(row: RoomRow) -> str:
    return f"room {row.room}, open for {row.age_s:.0f} s"


def _name(answer: StatusAnswer) -> str:
    return f"{answer.instance}/{answer.engine_rank}"
