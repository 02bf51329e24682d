"""Whether a rank accepts new rooms, which it does until it drains or closes. Pure."""

from kvflow.errors import LocalProtocolError, RankDraining
from kvflow.room import RoomId
from kvflow.wire.messages import Failure

__all__ = ["DrainState"]


class DrainState:
    """Whether a rank is open, draining or closing; `failure` says why it accepts nothing new."""

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.is_closing = False

    def drain(self, failure: Failure) -> None:
        """Accept nothing new, and let open rooms finish."""
        self.failure = failure

    def close(self, failure: Failure) -> None:
        """Accept nothing new; open rooms are aborted."""
        self.failure, self.is_closing = failure, True

    def check_open(self, room: RoomId) -> None:
        """Raise RankDraining while draining, and LocalProtocolError while closing: no room may be opened."""
        if self.is_closing:
            raise LocalProtocolError("rank is closing", room=room)
        if self.failure is not None:
            raise RankDraining("rank is draining", room=room)
