"""What becomes of a message: the words in which every part of the gate decides. Pure."""

from enum import Enum, auto
from typing import Final, NamedTuple

__all__ = ["ACCEPTED", "Action", "Cut", "Verdict"]


class Action(Enum):
    """What becomes of a message.

    Attributes:
        ACCEPT: It is used.
        DROP: It is ignored; no honest peer sends it.
        POSTPONE: It is ignored for now; honest peers send it, too, and repeat it.
    """

    ACCEPT = auto()
    DROP = auto()
    POSTPONE = auto()


class Verdict(NamedTuple):
    """The decision about a message: what becomes of it, and what it counts as if it is not accepted.

    `kind` is empty if it has been counted; `cut` says why its connection is closed as well.
    """

    action: Action
    kind: str = ""
    cut: str = ""


Cut = tuple[int | bytes, str]
"""The decision to close a connection: its descriptor (its routing id if it has ended, and the rest of it is dropped);
the reason."""

ACCEPTED: Final = Verdict(Action.ACCEPT)
