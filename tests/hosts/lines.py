"""Commands to workers and their reports, one JSON object a line. Times are CLOCK_MONOTONIC, in seconds."""

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
"""Outcomes of a room besides kvflow's failure reasons: complete, or complete with other content than was sent."""


class Room(msgspec.Struct, frozen=True, tag="room"):
    """Send or receive this room."""

    room: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Drain the rank: refuse new rooms, and finish the open ones."""

    timeout_s: float


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Cancel open rooms, close the rank in an orderly way and exit."""


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """A process with `is_prepared` has loaded everything that it needs."""

    at: float


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The rank, or the registry, is ready.

    Attributes:
        at: When.
        library: The file that kvflow was loaded from.
    """

    at: float
    library: str = ""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A room has ended.

    Attributes:
        at: When the engine noticed.
        room: The room.
        reason: `SUCCESS`, `WRONG_PAGES`, a failure reason or the name of an error.
        took_s: How long a receive took, by the engine's own clock; 0 if it failed.
        parts: Its parts, in seconds, as kvflow tells them.
        clock_error_s: Their error, as kvflow tells it.
    """

    at: float
    room: int
    reason: str
    took_s: float = 0.0
    parts: dict[str, float] = {}
    clock_error_s: float = 0.0


class Second(msgspec.Struct, frozen=True, tag="second"):
    """Counts since the previous line, one second before.

    Attributes:
        at: Time of the report.
        successes: Rooms that succeeded, which is the rate per second.
        failures: Rooms that failed, by reason.
        held_pages: Pages of ended rooms that are not safe now, whether in quarantine or not.
        quarantined_pages: Pages that the rank reports in quarantine now.
        waiting: Rooms that wait for free pages now.
        free_pages: Pages that belong to no room now.
    """

    at: float
    successes: int
    failures: dict[str, int]
    held_pages: int
    quarantined_pages: int
    waiting: int
    free_pages: int = 0


class Landed(msgspec.Struct, frozen=True, tag="landed"):
    """Bytes have arrived in the pages of a failed transfer.

    Attributes:
        at: When the worker noticed.
        room: Room of the transfer.
        failed_at: When the transfer failed.
        memory: State that kvflow reported before the pages changed; "safe" would be a broken promise.
    """

    at: float
    room: RoomId
    failed_at: float
    memory: str


class Trespassed(msgspec.Struct, frozen=True, tag="trespassed"):
    """Free pages, or pages of a complete room, have changed.

    Attributes:
        at: When the worker noticed.
        room: Last room of these pages.
    """

    at: float
    room: int


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """`drain` has returned.

    Attributes:
        is_settled: Its return value.
        quarantined_pages: Pages in quarantine now.
    """

    at: float
    is_settled: bool
    quarantined_pages: int


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """The rank is closed.

    Attributes:
        quarantined_pages: Pages that remain in quarantine for good.
    """

    at: float
    quarantined_pages: int


Command = Room | Drain | Close
Report = Prepared | Opened | Ended | Second | Landed | Trespassed | Drained | Closed
