"""One room, as an engine holds it: two facts, and a way to wait for each."""

import abc
import operator
from collections.abc import Callable

import anyio

from kvflow.aio.flag import Flag
from kvflow.errors import LocalProtocolError, TransferFailed
from kvflow.state.tables import Memory, Outcome
from kvflow.wire.messages import Failure

__all__ = ["Transfer", "check_instance", "check_room"]

MAX_ROOM = 2**63
"""Rooms travel as signed 64-bit integers."""


def check_room(room: int) -> int:
    """Turn any kind of integer into a room.

    Raises:
        LocalProtocolError: It is none, or out of range.
    """
    try:
        number = operator.index(room)
    except TypeError:
        number = -1
    if not 0 <= number < MAX_ROOM:
        raise LocalProtocolError("room must be an integer in 0 ... 2**63 - 1", room=room)
    return number


def check_instance(name: object) -> str:
    """Give the name of an instance.

    Raises:
        LocalProtocolError: It is none.
    """
    if not isinstance(name, str) or not name:
        raise LocalProtocolError("an instance is named by a string", instance=name)
    return name


class Transfer(abc.ABC):
    """Base of both ends.

    Attributes:
        room: The router's id of the request.
        on_settled: Called on the event loop when `is_settled` has become true, and maybe again after that.
    """

    __slots__ = ("_decided", "_failure", "_has_begun", "_memory", "_outcome", "_settled", "on_settled", "room")

    def __init__(self, room: int) -> None:
        self.room = check_room(room)
        self._outcome = Outcome.PENDING
        self._memory = Memory.SAFE
        self._failure: Failure | None = None
        self._decided = Flag()
        self._settled = Flag()
        self._has_begun = False
        self.on_settled: Callable[[], None] | None = None

    @property
    def outcome(self) -> Outcome:
        """Whether the transfer succeeded; decided once."""
        return self._outcome

    @property
    def memory(self) -> Memory:
        """Whether somebody can still touch its pages."""
        return self._memory

    @property
    def is_settled(self) -> bool:
        """Its outcome is decided, and its pages are quiet or in quarantine."""
        return self._outcome is not Outcome.PENDING and self._memory in (Memory.SAFE, Memory.QUARANTINED)

    @property
    def failure(self) -> Failure | None:
        """Why it did not succeed, once that is decided."""
        return self._failure

    def begin(self) -> None:
        """Note that it is on record now.

        Raises:
            LocalProtocolError: It was before; another try is another transfer.
        """
        if self._has_begun:
            raise LocalProtocolError("a transfer can be entered only once; make another one", room=self.room)
        self._has_begun = True
        self._memory = Memory.HELD

    def never_begin(self) -> None:
        """Note that it was refused, so that nobody will ever touch its pages."""
        self._memory = Memory.SAFE

    def report(self, outcome: Outcome, memory: Memory, failure: Failure | None) -> None:
        """Take in what the core says."""
        self._outcome, self._memory, self._failure = outcome, memory, failure
        if outcome is not Outcome.PENDING:
            self._decided.set()
        if memory in (Memory.SAFE, Memory.QUARANTINED):
            self._settled.set()
        if self.on_settled is not None and self.is_settled:
            self.on_settled()

    def error(self) -> TransferFailed:
        """The exception that says why it failed.

        Raises:
            LocalProtocolError: It has not.
        """
        failure = self._failure
        if failure is None:
            raise LocalProtocolError("transfer has not failed", room=self.room, outcome=self._outcome.value)
        is_quarantined = self._memory is Memory.QUARANTINED
        return TransferFailed(
            self.room, failure.reason, failure.stage, failure.rank, failure.detail, quarantined=is_quarantined
        )

    @abc.abstractmethod
    def open(self) -> None:
        """Begin, as entering the block does.

        Raises:
            LocalProtocolError, CapacityExceeded, RankDraining, RankBroken: It may not begin; nothing has changed.
        """

    def give_up(self) -> None:
        """Abort it, unless it is decided."""
        if self._has_begun and not self._decided.is_set:
            self._abort()

    @abc.abstractmethod
    def _abort(self) -> None:
        """Tell the core that the engine gives up."""

    async def _end(self, error: BaseException | None) -> None:
        """Give up what is not decided, and wait until the pages are quiet or in quarantine, whatever happens.

        Args:
            error: What the engine's block raised; if it is about this transfer, it learns what became of the pages.
        """
        self.give_up()
        if not self._settled.is_set:
            with anyio.CancelScope(shield=True):
                await self._settled.wait()
        if isinstance(error, TransferFailed) and error.room == self.room:
            error.quarantined = self._memory is Memory.QUARANTINED

    def _check_begun(self) -> None:
        if not self._has_begun:
            raise LocalProtocolError("enter the transfer with `async with` first", room=self.room)

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self.error()
