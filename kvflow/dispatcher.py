"""Passes events to the core of a rank, one at a time, and has the effects carried out."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from kvflow.aio.alarm import Alarm
from kvflow.errors import CapacityExceeded, LocalProtocolError, RankBroken, RankDraining
from kvflow.observe.logs import LOGGER, BoundLogger
from kvflow.observe.trace import describe
from kvflow.state.recorder import BlackBox

__all__ = ["Dispatcher"]

AnyEvent = TypeVar("AnyEvent")
AnyEffect = TypeVar("AnyEffect")


class Dispatcher(Generic[AnyEvent, AnyEffect]):
    """Passes events to a core, and has the effects carried out. Used on one event loop.

    Args:
        perform: Carries out an effect. What it raises breaks the rank.
        on_broken: Called once, with what has broken the rank.
        raise_at_exit: Called with an exception that the rank's exit has to raise.

    Attributes:
        is_over: Drop events from now on.
    """

    def __init__(
        self,
        perform: Callable[[AnyEffect], None],
        on_broken: Callable[[Exception], None],
        raise_at_exit: Callable[[Exception], None],
        now: Callable[[], float],
        log: BoundLogger,
    ) -> None:
        self.is_over = False
        self._perform = perform
        self._on_broken = on_broken
        self._raise_at_exit = raise_at_exit
        self._now = now
        self._log = log
        self._events: deque[AnyEvent] = deque()
        self._is_dispatching = False
        self._is_broken = False
        self._alarm: Alarm
        self._handle: Callable[[AnyEvent, float], Sequence[AnyEffect]]
        self._box: BlackBox | None = None

    def start(self, core: Callable[[AnyEvent, float], Sequence[AnyEffect]], alarm: Alarm, box: BlackBox | None) -> None:
        """Accept events from now on, for a core with this alarm, and keep them if there is a black box."""
        self._handle, self._alarm, self._box = core, alarm, box

    def submit(self, event: AnyEvent) -> None:
        """Pass a request of the engine to the core, and carry out the effects.

        Raises:
            LocalProtocolError, CapacityExceeded, RankDraining: The request is not allowed now; nothing has changed.
            RankBroken: The core has failed.
        """
        if self._is_dispatching:
            raise LocalProtocolError("rank cannot be used from within its own callbacks")
        now = self._now()
        try:
            effects = self._handle(event, now)
        except (LocalProtocolError, CapacityExceeded, RankDraining) as error:
            self._keep(event, now, error)
            raise
        except Exception as error:
            self._keep(event, now, error)
            self._log.error("event_failed", event_type=type(event).__name__)
            self.fail(error)
            raise RankBroken("rank has failed; close it and open another one") from error
        self._carry_out(event, effects, now)

    def dispatch(self, event: AnyEvent) -> None:
        """Pass an event to the core, and carry out the effects. Never raises: an exception breaks the rank.

        An event dispatched while other effects are being carried out waits until they are done. Events are dropped once
        the rank is closed or broken.
        """
        if self.is_over:
            return
        self._events.append(event)
        if not self._is_dispatching:
            self._carry_out(None, (), 0.0)

    def dispatch_soon(self, event: AnyEvent) -> None:
        """Dispatch an event after the event loop has had a turn."""
        asyncio.get_running_loop().call_soon(self.dispatch, event)

    def fail(self, error: Exception) -> None:
        """Break the rank, and make its exit raise the error."""
        self._raise_at_exit(error)
        self.break_down(error)

    def break_down(self, error: Exception) -> None:
        """Break the rank, unless it is broken already."""
        if not self._is_broken:
            self._is_broken = True
            self._alarm.close()
            self._log.error("rank_broken", exc_info=error)
            self._on_broken(error)

    def _carry_out(self, event: AnyEvent | None, effects: Sequence[AnyEffect], now: float) -> None:
        """Carry out effects, then handle the queued events."""
        self._is_dispatching = True
        num_done = 0
        try:
            while True:
                if event is not None and (box := self._box) is not None:
                    box.recent.append((event, now, effects, ""))
                    if len(box.recent) >= box.batch:
                        self._pack(box)
                if event is not None and LOGGER.isEnabledFor(logging.DEBUG):
                    self._trace(event, effects)
                for num_done, effect in enumerate(effects):  # noqa: B007 - for the log, if one fails
                    self._perform(effect)
                if not self._events or self._is_broken:
                    break
                event, effects, num_done = self._events.popleft(), (), 0
                now = self._now()
                effects = self._handle(event, now)
            self._alarm.check()
        except BaseException as error:
            self._stop_at(error, event, now, effects, num_done)
            if not isinstance(error, Exception):
                raise
        finally:
            self._is_dispatching = False
            if self._is_broken:
                self._events.clear()

    def _stop_at(
        self, error: BaseException, event: AnyEvent | None, now: float, effects: Sequence[AnyEffect], num_done: int
    ) -> None:
        """Break the rank because the core has raised an error, or what carries out its effects."""
        if effects == () and event is not None:  # the core
            self._keep(event, now, error)
        left = [type(effect).__name__ for effect in effects[num_done:]]
        self._log.error("event_failed", event_type=type(event).__name__, effects_left=left)
        if isinstance(error, Exception):
            self.fail(error)
        else:
            self.break_down(RuntimeError(f"interrupted by {type(error).__name__}"))

    def _keep(self, event: AnyEvent, now: float, error: BaseException) -> None:
        """Keep an event that the core has refused, or that has broken it."""
        if self._box is not None:
            self._box.recent.append((event, now, (), type(error).__name__))
            self._pack(self._box)

    def _pack(self, box: BlackBox) -> None:
        try:
            box.pack()
        except (TypeError, ValueError, OverflowError) as failure:  # such as a text that cannot be encoded
            self._box = None
            self._log.error("recording_ended", detail=f"{type(failure).__name__}: {failure}")

    def _trace(self, event: Any, effects: Sequence[Any]) -> None:
        name, values = describe(event)
        self._log.debug(name, **values, effects=[type(effect).__name__ for effect in effects])
