"""What goes wrong in a run: how often, how badly. Drawn from the seed."""

import dataclasses
import random
from dataclasses import dataclass

__all__ = ["Faults", "draw_faults"]


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Chances between 0 and 1, and numbers of events in a run; nothing goes wrong by default.

    Attributes:
        delay: Chance that a message takes up to half a second instead of a millisecond.
        drop: Chance that a message is lost.
        duplicate: Chance that a message comes twice.
        reorder: Chance that a message may overtake others of its line, or be overtaken.
        breaks: Times that a connection breaks: what is on its way is lost, and the dialer connects again.
        partitions: Times that a link carries nothing for a while, one way or both.
        slow_write: Chance that a write takes up to two seconds, landing in pieces.
        failed_write: Chance that a write fails after a part of it.
        lingering_write: Chance that bytes of a write that has failed go on landing after its end.
        doubtful_write: Chance that a write is reported as doubtful while its bytes go on landing.
        refused_write: Chance that the transport does not take a write.
        corrupt_write: Chance that a bit of a write changes on the way, if there are digests that can tell.
        late_notice: Chance that an in-band notice comes long after its last byte.
        lost_notice: Chance that an in-band notice never comes.
        without_notices: The transport has no in-band notices; they go over the control channel.
        forged_notice: Chance that somebody who does not know the token of a grant sends a notice for it.
        kills: Processes that die.
        crashes: Ranks of which a task fails: they say so and decide nothing any more, while their writes go on.
        writes_of_dead: Chance that what a dead sender had under way goes on landing.
        is_fenced: The transport says that nothing lands after the death of the sender, and keeps to it.
        freezes: Processes that stop and go on later; their posted writes may stop with them.
        blocks: Event loops that are blocked while the transport goes on.
        closings: Ranks that are closed in order.
        abort: Chance that an engine gives a room up, on either side.
        absence: Chance that an engine never opens a room that the router sent it.
        retry: Chance that a failed request is tried again.
    """

    delay: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    breaks: int = 0
    partitions: int = 0
    slow_write: float = 0.0
    failed_write: float = 0.0
    lingering_write: float = 0.0
    doubtful_write: float = 0.0
    refused_write: float = 0.0
    corrupt_write: float = 0.0
    late_notice: float = 0.0
    lost_notice: float = 0.0
    without_notices: bool = False
    forged_notice: float = 0.0
    kills: int = 0
    crashes: int = 0
    writes_of_dead: float = 0.0
    is_fenced: bool = False
    freezes: int = 0
    blocks: int = 0
    closings: int = 0
    abort: float = 0.0
    absence: float = 0.0
    retry: float = 0.0

    @property
    def is_lossy(self) -> bool:
        """Messages may be lost, come twice, or overtake each other."""
        return bool(self.drop or self.duplicate or self.reorder or self.breaks)


CHANCES = {
    "delay": 0.3,
    "drop": 0.15,
    "duplicate": 0.3,
    "reorder": 0.3,
    "slow_write": 0.5,
    "failed_write": 0.15,
    "lingering_write": 1.0,
    "doubtful_write": 0.15,
    "refused_write": 0.05,
    "corrupt_write": 0.2,
    "late_notice": 0.3,
    "lost_notice": 0.1,
    "forged_notice": 0.3,
    "abort": 0.2,
    "absence": 0.1,
    "retry": 0.7,
}
"""The most that is drawn for each chance."""

COUNTS = {"partitions": 2, "kills": 2, "freezes": 2, "blocks": 2, "closings": 1, "crashes": 1, "breaks": 3}
"""The most that is drawn for each number."""

ORDERED = 0.4
"""Chance that lines are as TCP makes them: nothing is lost while a connection lives, and order is kept."""

LOSSY = ("drop", "duplicate", "reorder", "breaks")


def draw_faults(rng: random.Random) -> Faults:
    """Draw a mixture in which about every other kind of fault is absent, so that each is seen without the others.

    Args:
        rng: Of the seed.
    """
    drawn: dict[str, float | int | bool] = {
        "without_notices": rng.random() < 0.3,
        "is_fenced": rng.random() < 0.4,
        "writes_of_dead": rng.choice((0.0, 0.5, 1.0)),
    }
    for name, most in CHANCES.items():
        drawn[name] = most * rng.random() if rng.random() < 0.5 else 0.0
    for name, count in COUNTS.items():
        drawn[name] = rng.randint(1, count) if rng.random() < 0.35 else 0
    if rng.random() < ORDERED:
        drawn |= dict.fromkeys(LOSSY, 0)
    return dataclasses.replace(Faults(), **drawn)  # type: ignore[arg-type]
