"""Events of both cores."""

import msgspec

from kvflow.room import RoomId
from kvflow.wire.messages import Failure

__all__ = ["CloseStarted", "DrainStarted", "QuarantineReleased", "TimePassed", "TransportClosed"]


class QuarantineReleased(msgspec.Struct, frozen=True):
    """An operator released pages without a proof: of a room on a prefill rank, of a generation on a decode rank."""

    key: RoomId


class DrainStarted(msgspec.Struct, frozen=True):
    """This rank is draining: nothing new starts, and open rooms may finish."""

    failure: Failure


class CloseStarted(msgspec.Struct, frozen=True):
    """This rank is closing: nothing new starts, and all open rooms fail."""

    failure: Failure


class TransportClosed(msgspec.Struct, frozen=True):
    """The transport is closed: it posts and delivers nothing more, and every post has ended."""


class TimePassed(msgspec.Struct, frozen=True):
    """The earliest of the core's `timers` is due."""
