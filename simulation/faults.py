"""The faults of a run, drawn from its seed."""

import dataclasses
import random
from dataclasses import dataclass
from typing import Final

__all__ = ["NO_FAULTS", "Faults", "draw_faults"]


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Chances between 0 and 1, and numbers of events in a run; by default, no faults.

    Attributes:
        delay: Chance that a message takes up to half a second instead of a millisecond.
        drop: Chance that a message is lost.
        duplicate: Chance that a message arrives twice.
        reorder: Chance that a message may overtake others of its connection, or be overtaken.
        late_grant: Chance that a Grant is overtaken by what is sent in the next moments, such as its Cancel.
        full_queue: Chance that a message is refused because the queue is full.
        handshake_reset: Chance that a connection is reset during a handshake.
        connect_fails: Chance that a connection cannot be opened because the process has no sockets left.
        no_thread: Chance that no thread can be started.
        slow_thread: Chance that a function in a thread begins up to 0.3 s late.
        breaks: Times that a connection breaks: messages in flight are lost, and the dialer reconnects.
        half_open: Times that a connection swallows everything until the heartbeats of both ends time out.
        partitions: Times that a link carries nothing for a while, in one or both directions.
        registry_restarts: Times that the registry dies and restarts without any records.
        slow_write: Chance that a write takes up to two seconds, landing in pieces.
        failed_write: Chance that a write fails after a part of it.
        lingering_write: Chance that bytes of a failed write continue to land after its end.
        write_in_doubt: Chance that a write is reported as in doubt while its bytes continue to land.
        refused_write: Chance that the transport refuses a write.
        refused_peer: Chance that the transport refuses to connect to a peer.
        corrupt_write: Chance that a bit of a write flips on the way, if there are digests to detect it.
        late_notice: Chance that an in-band notice arrives long after its last byte.
        lost_notice: Chance that an in-band notice is lost.
        overtaking_notice: Chance that an in-band notice arrives before its bytes, if there are digests to detect it.
        forged_notice: Chance that a notice with a wrong token arrives for a grant.
        kills: Processes that die.
        vanishes: Processes that die with their host, so that their connections are not closed.
        crashes: Ranks whose transport breaks down, or raises forbidden exceptions; their writes continue.
        writes_of_dead: Chance that posts in flight of a dead sender continue to land.
        stops: Processes that are suspended and later resumed, together with their posted writes and their sockets.
        blocks: Event loops that are blocked while the transport continues.
        clock_stops: Processes that are suspended together with their clock.
        closings: Ranks that are closed in order, half of them after a drain.
        abort: Chance that an engine aborts a room, on either side.
        cancel: Chance that an engine's task is cancelled, at any of its await points.
        absence: Chance that an engine never opens a room that the router sent it.
        no_pages: Chance that a decode engine never gets pages for a room that it has announced.
        retry: Chance that a failed request is retried.
    """

    delay: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    late_grant: float = 0.0
    full_queue: float = 0.0
    handshake_reset: float = 0.0
    connect_fails: float = 0.0
    no_thread: float = 0.0
    slow_thread: float = 0.0
    breaks: int = 0
    half_open: int = 0
    partitions: int = 0
    registry_restarts: int = 0
    slow_write: float = 0.0
    failed_write: float = 0.0
    lingering_write: float = 0.0
    write_in_doubt: float = 0.0
    refused_write: float = 0.0
    refused_peer: float = 0.0
    corrupt_write: float = 0.0
    late_notice: float = 0.0
    lost_notice: float = 0.0
    overtaking_notice: float = 0.0
    forged_notice: float = 0.0
    kills: int = 0
    vanishes: int = 0
    crashes: int = 0
    writes_of_dead: float = 0.0
    stops: int = 0
    blocks: int = 0
    clock_stops: int = 0
    closings: int = 0
    abort: float = 0.0
    cancel: float = 0.0
    absence: float = 0.0
    no_pages: float = 0.0
    retry: float = 0.0


NO_FAULTS: Final = Faults()

CHANCES: Final = {
    "delay": 0.3,
    "drop": 0.15,
    "duplicate": 0.3,
    "reorder": 0.3,
    "full_queue": 0.1,
    "handshake_reset": 0.5,
    "connect_fails": 0.2,
    "no_thread": 0.3,
    "slow_write": 0.5,
    "failed_write": 0.25,
    "write_in_doubt": 0.15,
    "refused_write": 0.05,
    "refused_peer": 0.2,
    "corrupt_write": 0.6,
    "late_notice": 0.3,
    "lost_notice": 0.1,
    "forged_notice": 0.3,
    "abort": 0.2,
    "cancel": 0.2,
    "absence": 0.1,
    "retry": 0.7,
}
"""Maximum drawn for each chance."""

COUNTS: Final = {
    "partitions": 2,
    "kills": 2,
    "vanishes": 1,
    "stops": 2,
    "blocks": 2,
    "clock_stops": 1,
    "closings": 1,
    "crashes": 1,
    "breaks": 3,
    "half_open": 2,
    "registry_restarts": 1,
}
"""Maximum drawn for each number."""

CHANCE_DRAWN: Final = 0.4
COUNT_DRAWN: Final = 0.3
"""Chance that a kind of fault occurs in a run at all, so that each also occurs without most of the others."""

ORDERED: Final = 0.5
"""Chance that connections behave like TCP: nothing is lost while one lives, and order is preserved."""

AFTER_THE_END: Final = ("lingering_write", "writes_of_dead")
"""What continues after it should have ended; this requires another fault first."""

RACING: Final = 0.3
RACES: Final = {
    "abort": 0.6, "delay": 0.3, "reorder": 0.3, "late_grant": 0.8, "slow_thread": 0.7, "forged_notice": 0.3,
}  # fmt: skip
"""Used together, at a high rate, so that messages and work of ended transfers meet those of new ones."""

LONE: Final = 0.15
LONE_STRIKES: Final = ("kills", "closings")
HIDES_STRIKES: Final = (
    "delay", "drop", "reorder", "full_queue", "handshake_reset", "connect_fails", "refused_peer",
    "breaks", "half_open", "partitions", "stops", "blocks", "clock_stops", "vanishes",
)  # fmt: skip
"""Faults left out when a rank dies or leaves alone: its peers must notice at once, or have its proofs."""

LOSSY: Final = ("drop", "duplicate", "reorder")


def draw_faults(rng: random.Random) -> Faults:
    """Draw a mixture of faults that leaves out about half of the kinds.

    Args:
        rng: Generator of the seed.
    """
    drawn: dict[str, float | int] = {name: rng.choice((0.0, 0.5, 1.0)) for name in AFTER_THE_END}
    for name, most in CHANCES.items():
        drawn[name] = most * rng.random() if rng.random() < CHANCE_DRAWN else 0.0
    for name, count in COUNTS.items():
        drawn[name] = rng.randint(1, count) if rng.random() < COUNT_DRAWN else 0
    if rng.random() < ORDERED:
        drawn |= dict.fromkeys(LOSSY, 0.0)
    mixture = rng.random()
    if mixture < RACING:
        drawn |= RACES
    elif mixture > 1 - LONE:
        number = int((1 - mixture) / LONE * len(LONE_STRIKES))
        drawn |= dict.fromkeys(HIDES_STRIKES, 0)
        drawn |= {LONE_STRIKES[number]: COUNTS["kills"], "slow_write": CHANCES["slow_write"]}
    return dataclasses.replace(NO_FAULTS, **drawn)  # type: ignore[arg-type]
