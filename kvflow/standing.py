"""Whether a rank may be used, and from where."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from kvflow.errors import LocalProtocolError, RankBroken
from kvflow.observe.logs import get_logger
from kvflow.wire.messages import PeerId

__all__ = ["Standing"]


ANSWER_S: Final = 10.0

Result = TypeVar("Result")


class Standing:
    """Base class of ranks: used on the event loop that has opened them, while they are open and not broken.

    Args:
        me: This incarnation of the rank.
    """

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_open = False
        self._log = get_logger(instance=me.rank.instance, engine_rank=me.rank.engine_rank)
        self._will_drain = False
        self._is_draining = False
        self._error: Exception | None = None

    def _check_loop(self) -> None:
        """Raise LocalProtocolError unless the call comes from the event loop and thread that the rank was opened on."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is not self._loop and self._loop is not None:
            raise LocalProtocolError("rank must be used on the event loop that opened it", rank=str(self.me.rank))

    def _call_on_loop(self, function: Callable[[], Result]) -> Result:
        """Call a function on the event loop, from any thread, and return its result.

        Raises:
            LocalProtocolError: The rank has not been opened.
            TimeoutError: The event loop has not answered within 10 s.
        """
        loop = self._loop
        if loop is None:
            raise self._not_open()
        if not loop.is_running() or asyncio._get_running_loop() is loop:
            return function()

        async def call() -> Result:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), loop).result(ANSWER_S)

    def _not_open(self) -> LocalProtocolError:
        """Return the error for a call that requires an open rank."""
        message = "rank is not open any more" if self._loop else "rank is not open; enter it with `async with` first"
        return LocalProtocolError(message, rank=str(self.me.rank))

    def _check_open(self) -> None:
        """Check the loop, and that the rank is open; raises as `_check_loop` and `_check_usable`."""
        self._check_loop()
        self._check_usable()

    def announce_drain(self) -> None:
        """Say in `health` that the rank is not ready, so that routers leave it out, but go on accepting new work.

        Call `start_drain` when they have noticed: what they have sent until then is not refused. Calling it again, or
        while the rank drains, has no effect.

        Raises:
            LocalProtocolError, RankBroken: The rank is not open, or broken.
        """
        self._check_open()
        if not self._will_drain and not self._is_draining:
            self._will_drain = True
            self._log.info("drain_announced")

    @property
    def is_draining(self) -> bool:
        """True if draining has started."""
        return self._is_draining

    @property
    def _is_usable(self) -> bool:
        """True if the rank is open and not broken."""
        return self._is_open and self._error is None

    def _check_usable(self) -> None:
        """Raise RankBroken or LocalProtocolError unless the rank is open. Can be called from any thread."""
        if self._error is not None:
            raise RankBroken("rank has failed; close it and open another one") from self._error
        if not self._is_open:
            raise self._not_open()
