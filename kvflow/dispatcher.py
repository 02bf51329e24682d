"""Passes events to the core of a rank, one at a time, and has the effects carried out."""

import asyncio
import logging
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

from kvflow.aio.alarm import Alarm
from kvflow.errors import CapacityExceeded, ConfigError, KvflowError, LocalProtocolError, RankBroken, RankDraining
from kvflow.observe.logs import LOGGER, BoundLogger
from kvflow.observe.trace import describe
from kvflow.state.recorder import Recorder
from kvflow.state.settings import DecodeSettings, PrefillSettings
from kvflow.wire.messages import PeerId

__all__ = ["Dispatcher", "open_recorder"]

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
        self._core: Callable[[AnyEvent, float], Sequence[AnyEffect]]
        self._handle: Callable[[AnyEvent, float], Sequence[AnyEffect]]
        self._recorder: Recorder | None = None

    def start(
        self, core: Callable[[AnyEvent, float], Sequence[AnyEffect]], alarm: Alarm, recorder: Recorder | None
    ) -> None:
        """Accept events from now on, for a core with this alarm, and record them if there is a recorder."""
        self._core, self._alarm, self._recorder = core, alarm, recorder
        self._handle = core if recorder is None else self._handle_and_record

    def submit(self, event: AnyEvent) -> None:
        """Pass a request of the engine to the core, and carry out the effects.

        Raises:
            LocalProtocolError, CapacityExceeded, RankDraining: The request is not allowed now; nothing has changed.
            RankBroken: The core has failed.
        """
        if self._is_dispatching:
            raise LocalProtocolError("rank cannot be used from within its own callbacks")
        try:
            effects = self._handle(event, self._now())
        except (LocalProtocolError, CapacityExceeded, RankDraining):
            raise
        except Exception as error:
            self._log.error("event_failed", event_type=type(event).__name__)
            self.fail(error)
            raise RankBroken("rank has failed; close it and open another one") from error
        self._carry_out(event, effects)

    def dispatch(self, event: AnyEvent) -> None:
        """Pass an event to the core, and carry out the effects. Never raises: an exception breaks the rank.

        An event dispatched while other effects are being carried out waits until they are done. Events are dropped once
        the rank is closed or broken.
        """
        if self.is_over:
            return
        self._events.append(event)
        if not self._is_dispatching:
            self._carry_out(None, ())

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

    def _carry_out(self, event: AnyEvent | None, effects: Sequence[AnyEffect]) -> None:
        """Carry out effects, then handle the queued events."""
        self._is_dispatching = True
        num_done = 0
        try:
            while True:
                if event is not None and LOGGER.isEnabledFor(logging.DEBUG):
                    self._trace(event, effects)
                for num_done, effect in enumerate(effects):  # noqa: B007 - for the log, if one fails
                    self._perform(effect)
                if not self._events or self._is_broken:
                    break
                event, effects, num_done = self._events.popleft(), (), 0
                effects = self._handle(event, self._now())
            self._alarm.check()
        except BaseException as error:
            left = [type(effect).__name__ for effect in effects[num_done:]]
            self._log.error("event_failed", event_type=type(event).__name__, effects_left=left)
            if not isinstance(error, Exception):
                self.break_down(RuntimeError(f"interrupted by {type(error).__name__}"))
                raise
            self.fail(error)
        finally:
            self._is_dispatching = False
            if self._is_broken:
                self._events.clear()

    def _handle_and_record(self, event: AnyEvent, now: float) -> Sequence[AnyEffect]:
        try:
            effects = self._core(event, now)
        except KvflowError as error:
            self._record(event, now, (), error)
            raise
        self._record(event, now, effects)
        return effects

    def _record(self, event: Any, now: float, effects: Sequence[Any], error: KvflowError | None = None) -> None:
        if self._recorder is None:
            return
        try:
            self._recorder.record(event, now, effects, error)
        except OSError as failure:  # such as a full disk; the rank continues without recording
            self._recorder, self._handle = None, self._core
            self._log.error("recording_ended", detail=str(failure))

    def _trace(self, event: Any, effects: Sequence[Any]) -> None:
        name, values = describe(event)
        self._log.debug(name, **values, effects=[type(effect).__name__ for effect in effects])


@contextmanager
def open_recorder(
    path: str | os.PathLike[str] | None, me: PeerId, settings: PrefillSettings | DecodeSettings
) -> Iterator[Recorder | None]:
    """Start to record a core with these settings in a file, if there is a path; raise ConfigError if that fails."""
    if path is None:
        yield None
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "wb", 0, opener=_open_for_owner))
            recorder = Recorder(file, me, settings)
        except OSError as error:
            raise ConfigError("file cannot be written", record=str(path), detail=str(error)) from error
        yield recorder


def _open_for_owner(path: str, flags: int) -> int:
    """Open a file that nobody but its owner may read, even if it already exists."""
    descriptor = os.open(path, flags, 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.fchmod(descriptor, 0o600)
    return descriptor
