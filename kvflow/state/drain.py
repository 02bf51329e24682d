"""Whether a rank takes new rooms: until it drains or closes. Pure."""

from kvflow.errors import LocalProtocolError, RankDraining
from kvflow.room import RoomId
from kvflow.wire.messages import Failure

__all__ = ["DrainState"]


class DrainState:
    """How far a rank is on its way out.

    Attributes:
        failure: Why it takes nothing new; None while it does.
        is_closing: What is open has been given up, too.
    """

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.is_closing = False

    def drain(self, failure: Failure) -> None:
        """Take nothing new, and let what is open end."""
        self.failure = failure

    def close(self, failure: Failure) -> None:
        """Take nothing new, and go on with nothing."""
        self.failure, self.is_closing = failure, True

    def check_open(self, room: RoomId) -> None:
        """Refuse to open a room on the way out.

        Raises:
            LocalProtocolError: The rank is closing.
            RankDraining: It is draining.
        """
        if self.is_closing:
            raise LocalProtocolError("rank is closing", room=room)
        if self.failure is not None:
            raise RankDraining("rank is draining", room=room)
