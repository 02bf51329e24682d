"""What the harness and its workers say to each other: one JSON object a line. Times are CLOCK_MONOTONIC, in seconds."""

import msgspec

from kvflow.room import RoomId

__all__ = [
    "SUCCESS",
    "WRONG_PAGES",
    "Close",
    "Closed",
    "Command",
    "Drain",
    "Drained",
    "Ended",
    "Landed",
    "Opened",
    "Prepared",
    "Report",
    "Room",
    "Second",
    "Trespassed",
]

SUCCESS = "success"
WRONG_PAGES = "wrong_pages"
"""Why a room ended, besides the reasons of kvflow's own failures: as wanted, or with other content than was sent."""


class Room(msgspec.Struct, frozen=True, tag="room"):
    """A request has come: send this room, or receive it."""

    room: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Take nothing new and finish what has begun, for so long."""

    timeout_s: float


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Give up what is open, close the rank in the orderly way and end."""


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """A process that is to open its rank later has loaded what it needs."""

    at: float


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The rank, or the registry, is ready."""

    at: float


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A room has its outcome.

    Attributes:
        at: When the engine learned of it.
        room: Which one.
        reason: `SUCCESS`, `WRONG_PAGES`, a failure reason or the name of an error.
    """

    at: float
    room: int
    reason: str


class Second(msgspec.Struct, frozen=True, tag="second"):
    """What has happened since the line before.

    Attributes:
        at: Now.
        successes: Rooms that ended well; in one second, so this is the rate.
        failures: Other rooms that ended, by reason.
        held_pages: Pages now of rooms that have ended and are not safe, in quarantine or not yet.
        quarantined_pages: Those in quarantine, by what the rank says.
        waiting: Rooms that wait for free pages now.
    """

    at: float
    successes: int
    failures: dict[str, int]
    held_pages: int
    quarantined_pages: int
    waiting: int


class Landed(msgspec.Struct, frozen=True, tag="landed"):
    """Bytes have arrived in the pages of a transfer that had failed.

    Attributes:
        at: When that was seen.
        room: Whose pages.
        failed_at: When the transfer failed.
        memory: What kvflow said of the pages before they changed; "safe" would be a broken promise.
    """

    at: float
    room: RoomId
    failed_at: float
    memory: str


class Trespassed(msgspec.Struct, frozen=True, tag="trespassed"):
    """Pages that belonged to nobody, or to a room that was complete, have changed.

    Attributes:
        at: When that was seen.
        room: Whose pages they had been last.
    """

    at: float
    room: int


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """`drain` has returned.

    Attributes:
        is_settled: What it returned.
        quarantined_pages: Pages in quarantine now.
    """

    at: float
    is_settled: bool
    quarantined_pages: int


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """The rank is closed.

    Attributes:
        quarantined_pages: Pages that are still in quarantine, for good.
    """

    at: float
    quarantined_pages: int


Command = Room | Drain | Close
Report = Prepared | Opened | Ended | Second | Landed | Trespassed | Drained | Closed
