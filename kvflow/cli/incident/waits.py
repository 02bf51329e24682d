"""What a room that is still open waits for, as far as the events of one side show it."""

from collections.abc import Sequence
from typing import Final

from kvflow.cli.incident.story import Line
from kvflow.state import events as ev
from kvflow.wire.messages import Announce, Grant, Notice

__all__ = ["describe_wait"]

POSTS: Final = ("PostPiece", "PostPlan")


def describe_wait(lines: Sequence[Line], origin: float) -> str:
    """Return what the events of an open room on one side show; times are relative to `origin`."""
    side = lines[0].side
    is_opened = any(isinstance(line.moment.event, ev.SendOpened | ev.ReceiveOpened) for line in lines)
    if not is_opened and (side.header.first or side.has_gap):
        last_at = lines[-1].at - origin
        return f"its beginning is missing; the last event was at {last_at:.6f}"
    return (_describe_sending if side.header.role == "prefill" else _describe_receiving)(lines, origin)


def _describe_sending(lines: Sequence[Line], origin: float) -> str:
    asked: dict[bytes, float] = {}
    num_expected = num_granted = 0
    for line in lines:
        event = line.moment.event
        if isinstance(event, ev.MessageArrived) and isinstance(event.message, Announce | Grant):
            asked.setdefault(event.connection, line.at - origin)
            num_expected = event.message.num_decode_ranks
            num_granted += isinstance(event.message, Grant)
    if not any(isinstance(line.moment.event, ev.SendOpened) for line in lines):
        return f"decode has asked for it at {min(asked.values()):.6f}, and prefill's engine has not opened it"
    if not asked:
        return "no decode rank has asked for it"
    if len(asked) < num_expected:
        return f"{len(asked)} of {num_expected} decode ranks have asked for it"
    if not num_granted:
        return f"decode has announced it at {min(asked.values()):.6f}, and has not granted pages"
    return _describe_writes(lines, origin)


def _describe_writes(lines: Sequence[Line], origin: float) -> str:
    chunks = [
        (line.at - origin, event.chunk) for line in lines if isinstance(event := line.moment.event, ev.ChunkOffered)
    ]
    posted, computing = (
        [line.at - origin for line in lines for name, _ in line.moment.effects if name in names]
        for names in (POSTS, ("AwaitData",))
    )
    num_ended, num_computed = (
        sum(isinstance(line.moment.event, kind) for line in lines) for kind in (ev.PostEnded, ev.DataReady)
    )
    if len(posted) > num_ended:
        return f"writes that have not ended: {len(posted) - num_ended}, the last one from {posted[-1]:.6f}"
    if len(computing) > num_computed:
        return f"its pages are not computed yet, the last ones were offered at {computing[-1]:.6f}"
    if isinstance(lines[-1].moment.event, ev.ChunkWaits):
        return f"a chunk waits for capacity since {lines[-1].at - origin:.6f}"
    if not chunks:
        return "prefill's engine has not offered tokens"
    at, chunk = chunks[-1]
    if not chunk.last:
        return f"prefill's engine has offered tokens up to {chunk.tokens[1]}, at {at:.6f}, and none since"
    return f"everything was offered at {at:.6f}, writes have ended: {num_ended}, and decode has not confirmed it"


def _describe_receiving(lines: Sequence[Line], origin: float) -> str:
    asked: dict[int, float] = {}
    arrived: dict[int, float] = {}
    for line in lines:
        for name, fields in line.moment.effects:
            if name == "SendMessage" and fields["message"]["type"] == "grant":
                asked.setdefault(fields["peer"][0][1], line.at - origin)
        event = line.moment.event
        notice = event.notice if isinstance(event, ev.NoticeDelivered) else getattr(event, "message", None)
        if isinstance(notice, Notice):
            arrived[notice.engine_rank] = line.at - origin
    opened = lines[0].moment.event
    is_announced = isinstance(opened, ev.ReceiveOpened) and opened.is_announced
    if is_announced and not any(isinstance(line.moment.event, ev.ReceiveGranted) for line in lines):
        return "decode's engine has announced it, and has not granted pages"
    if not asked:
        return "prefill was not asked, as it is not connected"
    silent = [rank for rank in asked if rank not in arrived]
    if silent:
        ranks = ", ".join(map(str, silent))
        return f"nothing has arrived from prefill rank {ranks}, which was asked at {asked[silent[0]]:.6f}"
    return f"nothing has arrived since {max(arrived.values()):.6f}"
