"""Requests to a rank, and its answers, as JSON.

Each request has `v`, the version of the format, and `ask`. Fields that this version does not know are ignored, so a
newer version may add some; what changes the meaning of others is a new version, or another `ask`, which is refused.
"""

from typing import Annotated, Any, Final, Literal

import msgspec

from kvflow.room import RoomId

__all__ = [
    "DEFAULT_ROWS",
    "MAX_ANSWER_BYTES",
    "MAX_REQUEST_BYTES",
    "MAX_ROWS",
    "AnnounceDrainRequest",
    "DrainAnswer",
    "DrainRequest",
    "ErrorAnswer",
    "Health",
    "HealthAnswer",
    "HealthRequest",
    "IncidentAnswer",
    "IncidentRequest",
    "QuarantineAnswer",
    "QuarantineRequest",
    "QuarantineRow",
    "ReleaseAnswer",
    "ReleaseRequest",
    "Request",
    "RoomRow",
    "RoomsAnswer",
    "RoomsRequest",
    "StatusAnswer",
    "StatusRequest",
]

MAX_REQUEST_BYTES: Final = 4_096
MAX_ANSWER_BYTES: Final = 2**20
"""Maximum length of an answer; rows that do not fit are left out. Encoding it holds the event loop for a few ms."""

DEFAULT_ROWS: Final = 100
MAX_ROWS: Final = 1_000
MAX_REASON: Final = 500

NumRows = Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)]
Because = Annotated[str, msgspec.Meta(max_length=MAX_REASON, pattern=r"\S")]


class RequestBase(msgspec.Struct, frozen=True, tag_field="ask", kw_only=True):
    """What all requests have."""

    v: Literal[1] = 1


class StatusRequest(RequestBase, frozen=True, tag="status"):
    """Who is it, and how is it?"""


class HealthRequest(RequestBase, frozen=True, tag="health"):
    """Can it transfer?"""


class RoomsRequest(RequestBase, frozen=True, tag="rooms"):
    """Which rooms are open? The oldest come first."""

    limit: NumRows = DEFAULT_ROWS


class QuarantineRequest(RequestBase, frozen=True, tag="quarantine"):
    """Which transfers have pages in quarantine? The oldest come first."""

    limit: NumRows = DEFAULT_ROWS


class ReleaseRequest(RequestBase, frozen=True, tag="release"):
    """Release the pages of a transfer without proof; `id` is that of a `QuarantineRow`, `because` is logged."""

    id: str
    because: Because


class AnnounceDrainRequest(RequestBase, frozen=True, tag="announce_drain"):
    """Do not be ready any more, but accept new rooms, see `announce_drain`."""


class DrainRequest(RequestBase, frozen=True, tag="drain"):
    """Refuse new rooms, and let open ones finish."""


class IncidentRequest(RequestBase, frozen=True, tag="incident"):
    """Write what has happened lately to a file, for `kvflow incident`."""


Request = (
    StatusRequest
    | HealthRequest
    | RoomsRequest
    | QuarantineRequest
    | ReleaseRequest
    | AnnounceDrainRequest
    | DrainRequest
    | IncidentRequest
)


class AnswerBase(msgspec.Struct, frozen=True, kw_only=True):
    """What all answers have."""

    v: int = 1


class ErrorAnswer(AnswerBase, frozen=True, forbid_unknown_fields=True):
    """The request was malformed or refused; nothing has changed."""

    error: str


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a rank can transfer.

    Attributes:
        transfer: "ok"; "degraded" if something needs attention, or new rooms are refused; "broken" if the rank has
            failed and must be opened again.
        reason: Why it is not "ok".
        live: False if it is broken.
        ready: Whether it accepts new rooms.
    """

    transfer: Literal["ok", "degraded", "broken"]
    reason: str
    live: bool
    ready: bool


class HealthAnswer(AnswerBase, frozen=True):
    """Answers `HealthRequest`."""

    health: Health


class StatusAnswer(AnswerBase, frozen=True):
    """Answers `StatusRequest`.

    Attributes:
        incarnation: 16 hexadecimal digits.
        version: Of kvflow.
        endpoint: Address of the control socket; empty on decode.
        is_draining: Whether it refuses new rooms because `drain` was asked for.
        layout: What its pools hold, in one line.
        fingerprint: Of its layout, truncated if it is long.
        draft_layers: Layers without which the other side can do.
        settings: Of the rank, without its keys.
        oldest_room_s: Age of the oldest open room, in seconds; None if there is none.
        statistics: As `rank.statistics()`, see `RankStatistics`.
    """

    instance: str
    engine_rank: int
    incarnation: str
    role: Literal["prefill", "decode"]
    version: str
    pid: int
    uptime_s: float
    backend: str
    paths: str
    endpoint: str
    layout: str
    is_draining: bool
    health: Health
    oldest_room_s: float | None
    statistics: dict[str, Any]
    fingerprint: str = ""
    draft_layers: int = 0
    settings: dict[str, Any] = {}


class RoomRow(msgspec.Struct, frozen=True, kw_only=True):
    """An open transfer, or an ended one whose pages are not safe.

    Attributes:
        peers: Ranks at the other end, "instance/rank@incarnation"; or the instance, if it is not connected yet.
        num_peers: How many there are; not all may be listed.
        num_pages: Pages that it holds.
        num_bytes: Their size.
    """

    room: RoomId
    label: str | None
    outcome: str
    memory: str
    age_s: float
    peers: list[str]
    num_peers: int
    num_pages: int
    num_bytes: int


class RoomsAnswer(AnswerBase, frozen=True):
    """Answers `RoomsRequest`; `total` counts the rows that were left out, too."""

    total: int
    rooms: list[RoomRow]


class MissingRow(msgspec.Struct, frozen=True, kw_only=True):
    """A missing proof, see `kvflow.MissingProof`."""

    peer: str
    endpoint: str
    awaited: str
    detail: str


class QuarantineRow(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer in quarantine, see `kvflow.QuarantineRecord`.

    Attributes:
        id: Names it in a `ReleaseRequest`.
        pages: Number of pages of each component.
        missing: The missing proofs; not all may be listed.
        num_missing: How many there are.
    """

    id: str
    room: RoomId
    label: str | None
    since_s: float
    pages: dict[str, int]
    num_bytes: int
    failure: str
    missing: list[MissingRow]
    num_missing: int


class QuarantineAnswer(AnswerBase, frozen=True):
    """Answers `QuarantineRequest`; `total` counts the rows that were left out, too."""

    total: int
    quarantine: list[QuarantineRow]


class ReleaseAnswer(AnswerBase, frozen=True):
    """Answers `ReleaseRequest`: the pages of this room were released."""

    room: RoomId


class DrainAnswer(AnswerBase, frozen=True):
    """Answers both requests for a drain: whether everything has finished, and if not, how many transfers have not."""

    is_drained: bool
    num_unsettled: int


class IncidentAnswer(AnswerBase, frozen=True):
    """Answers `IncidentRequest`: the file appears at this path as soon as it is written."""

    path: str
