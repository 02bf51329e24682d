"""An asyncio event loop in virtual time, and the processes that run on it.

Nothing ever waits: when no callback is ready, time jumps to the next timer. Callbacks run in the order in which they
were asked for, so a run is decided by what the world around the processes draws from its seed.

A callback belongs to the process whose context it runs in. What a killed process had asked for never runs, and what a
stopped one has asked for waits until it goes on; so one loop carries every process of a deployment.
"""

import asyncio
import contextvars
import enum
import heapq
import threading
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NotYet", "Process", "ProcessState", "Violation", "VirtualLoop"]

Result = TypeVar("Result")

MAX_CALLBACKS_AT_ONCE: Final = 100_000
"""Callbacks at one moment of virtual time beyond which the code under test is spinning."""

MAX_AWAITS_IN_CLEANUP: Final = 100

RESOLUTION_S: Final = 1e-9
"""No timer is due earlier than this, so that one which is set again until its time has come does not spin."""

PROCESS: Final[contextvars.ContextVar["Process"]] = contextvars.ContextVar("process")


class Violation(Exception):
    """A promise was broken, or the code under test let an exception out."""


class ProcessState(enum.Enum):
    """Whether callbacks of a process run."""

    RUNNING = "running"
    PAUSED = "paused"
    DEAD = "dead"


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in virtual time. Sockets, threads, signals and subprocesses are not there.

    Attributes:
        now: Virtual seconds since the run began. Processes see their own clock, which `time` gives.
        num_callbacks: Callbacks that were run.
        failure: What has stopped the run: a violation, or an exception that nobody caught.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.num_callbacks = 0
        self.failure: BaseException | None = None
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.Handle]] = []
        self._num_timers = 0
        self._world = contextvars.copy_context()
        self._tasks: list[asyncio.Task[Any]] = []
        self._prune_at = 256

    # What asyncio asks for ---------------------------------------------------------------------------------------

    @override
    def time(self) -> float:
        """The clock of the process that asks."""
        process = PROCESS.get(None)
        return self.now if process is None else self.now - process.clock_lag_s

    @override
    def call_at(  # type: ignore[override] # without TypeVarTuple, which Python 3.10 lacks
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        process = _process_of(timer)
        at = when if process is None else when + process.clock_lag_s
        self._push(max(at, self.now + RESOLUTION_S), timer)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer is dropped when it comes up."""

    @override
    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = super().create_task(coro, **options)
        self._tasks.append(task)
        if len(self._tasks) > self._prune_at:
            self._tasks = [one for one in self._tasks if not one.done()]
            self._prune_at = 2 * len(self._tasks) + 256
        return task

    @override
    def call_soon_threadsafe(  # type: ignore[override] # as above
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    @override
    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        raise Violation(f"a thread is used beside the port for threads: {func!r}")

    @override
    def call_exception_handler(self, context: Mapping[str, Any]) -> None:
        """Stop the run: code under test lets no exception out."""
        error = context.get("exception")
        if isinstance(error, Violation):
            self.fail(error)
        else:
            handle = context.get("handle")
            process = PROCESS.get(None) if handle is None else _process_of(handle)
            violation = Violation(f"{process or 'world'}: {context.get('message')}: {error!r}")
            violation.__cause__ = error
            self.fail(violation)

    # What the world asks for -------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Stop the run after the current callback; the first failure counts."""
        if self.failure is None:
            self.failure = error

    def call_in(self, delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.Handle:
        """Call something of the world after a while; it belongs to no process."""
        handle = asyncio.Handle(callback, args, self, self._world)
        self._push(self.now + delay_s, handle)
        return handle

    def call_process(self, process: "Process", callback: Callable[..., object], *args: Any) -> None:
        """Call something of a process as soon as it runs; never, if it is dead."""
        self._ready.append(asyncio.Handle(callback, args, self, process.context))

    def queue(self, handles: "deque[asyncio.Handle]") -> None:
        """Run callbacks that had waited; timers wait longer if their clock has stood still."""
        self._ready.extend(handle for handle in handles if not self._is_put_off(handle))

    def advance(self, lasts_s: float) -> None:
        """Run everything that is due within some virtual seconds.

        Raises:
            Violation: The code under test broke a promise; the loop cannot be used any more.
        """
        until = self.now + lasts_s
        with self._running():
            self._run_until(until)
        self.now = until

    def run_ready(self) -> None:
        """Run what can run without letting time pass."""
        with self._running():
            self._run_ready()

    @contextmanager
    def _running(self) -> "Iterator[None]":
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        self._thread_id = threading.get_ident()
        try:
            yield
        finally:
            self._thread_id = None  # type: ignore[assignment] # which says that it does not run
            asyncio._set_running_loop(before)

    def _run_until(self, until: float) -> None:
        timers, ready = self._timers, self._ready
        while True:
            self._run_ready()
            if not timers or timers[0][0] > until:
                return
            due = timers[0][0]
            self.now = max(self.now, due)
            while timers and timers[0][0] <= due:
                handle = heapq.heappop(timers)[2]
                if not handle.cancelled() and not self._is_put_off(handle):
                    ready.append(handle)

    def _is_put_off(self, handle: asyncio.Handle) -> bool:
        """Wait longer for a timer of a process whose clock has stood still since."""
        process = _process_of(handle)
        if process is None or not isinstance(handle, asyncio.TimerHandle):
            return False
        due = handle.when() + process.clock_lag_s
        if due <= self.now + RESOLUTION_S:
            return False
        self._push(due, handle)
        return True

    def _run_ready(self) -> None:
        ready = self._ready
        stop_at = self.num_callbacks + MAX_CALLBACKS_AT_ONCE
        while ready:
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = _process_of(handle)
            if process is not None and process.state is not ProcessState.RUNNING:
                process.keep(handle)
                continue
            self.num_callbacks += 1
            handle._run()
            if self.failure is not None:
                raise self.failure
            if self.num_callbacks > stop_at:
                raise Violation(f"time stands still: {MAX_CALLBACKS_AT_ONCE} callbacks at {self.now:.4f} s")

    def _push(self, when: float, handle: asyncio.Handle) -> None:
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, handle))

    @override
    def close(self) -> None:
        """End every task, whatever it waits for, without running anything of it but its cleanup."""
        with self._running(), warnings.catch_warnings():
            # anyio wraps what a task is to run: ended before its first step, the inner coroutine was never awaited.
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            while self._tasks:
                tasks, self._tasks = self._tasks, []  # cleanup may start further ones, which are ended next
                for task in tasks:
                    if not task.done():
                        self._end_task(task)
        self._ready.clear()
        self._timers.clear()
        super().close()

    def _end_task(self, task: "asyncio.Task[Any]") -> None:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        asyncio._enter_task(self, task)  # cancel scopes want to be left by the task that entered them
        try:
            _end(task.get_coro())
        finally:
            asyncio._leave_task(self, task)


def _process_of(handle: asyncio.Handle) -> "Process | None":
    process: Process | None = handle._context.get(PROCESS)  # type: ignore[attr-defined]
    return process


class _WorldEnded(BaseException):
    """Ends what a task was doing. GeneratorExit would leave behind what awaits in its cleanup."""


def _end(coroutine: Any) -> None:
    """Unwind a coroutine, even one that awaits meanwhile."""
    for _ in range(MAX_AWAITS_IN_CLEANUP):
        try:
            coroutine.throw(_WorldEnded())
        except BaseException:  # noqa: BLE001 - a dead process has nobody who could take it
            return


class Process:
    """One process of the deployment: what it runs, and whether it runs.

    Args:
        loop: Of the world.
        name: For stories; unique.
        host: Where it runs. Links between hosts can be cut.

    Attributes:
        state: Whether its callbacks run.
        context: Whatever is called in it belongs to the process.
        clock_lag_s: How long its clock has stood still so far.
        stopped_s: How long it has not run so far.
        is_stalling: It is paused, and so is what its transport and its sockets do in threads of their own.
        has_vanished: Its host went away with it, so that nobody was told of its end.
        was_killed: It was ended from outside, whatever it was doing.
    """

    def __init__(self, loop: VirtualLoop, name: str, host: str) -> None:
        self.loop = loop
        self.name = name
        self.host = host
        self.state = ProcessState.RUNNING
        self.context = loop._world.copy()
        self.context.run(PROCESS.set, self)
        self.clock_lag_s = 0.0
        self.stopped_s = 0.0
        self.is_stalling = False
        self.has_vanished = False
        self.was_killed = False
        self.exit: BaseException | None = None
        self._paused_at = 0.0
        self._stops_clock = False
        self._kept: deque[asyncio.Handle] = deque()
        self._main: asyncio.Task[Any] | None = None
        self._when_dead: list[Callable[[], object]] = []
        self._when_resumed: list[Callable[[], object]] = []

    def __str__(self) -> str:
        return self.name

    @property
    def is_alive(self) -> bool:
        """It has not ended."""
        return self.state is not ProcessState.DEAD

    @property
    def is_running(self) -> bool:
        """It is alive, and not paused."""
        return self.state is ProcessState.RUNNING

    def now(self) -> float:
        """Its monotonic clock, in seconds."""
        return self.loop.now - self.clock_lag_s

    def start(self, main: Callable[[], Coroutine[Any, Any, object]]) -> Self:
        """Begin; the process ends when `main` does."""
        self._main = self.spawn(self._run(main))
        return self

    def spawn(self, coroutine: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        """Run a coroutine as a task of this process."""
        if PROCESS.get(None) is self:
            return self.loop.create_task(coroutine)
        return self.context.run(self.loop.create_task, coroutine)

    async def _run(self, main: Callable[[], Coroutine[Any, Any, object]]) -> None:
        try:
            await main()
        except Exception as error:  # noqa: BLE001 - the end of a process, as its supervisor sees it
            self.exit = error
        self.end()

    def call(self, callback: Callable[..., object], *args: Any) -> None:
        """Call something in this process as soon as it runs; never, if it has ended."""
        if self.state is not ProcessState.DEAD:
            self.loop.call_process(self, callback, *args)

    def keep(self, handle: asyncio.Handle) -> None:
        """Keep a callback that came up while the process does not run."""
        if self.state is ProcessState.PAUSED:
            self._kept.append(handle)

    def when_dead(self, callback: Callable[[], object]) -> None:
        """Have the world called when it has ended, in whatever way."""
        if self.state is ProcessState.DEAD:
            callback()
        else:
            self._when_dead.append(callback)

    def when_resumed(self, callback: Callable[[], object]) -> None:
        """Have the world called when it goes on, or has ended."""
        self._when_resumed.append(callback)

    def kill(self, *, vanish: bool = False) -> None:
        """End it at once, as SIGKILL does.

        Args:
            vanish: Its host goes with it, so that no operating system closes its connections.
        """
        self.has_vanished = vanish
        self.was_killed = True
        self.end()

    def end(self) -> None:
        """Note that nothing of it runs any more."""
        if self.state is ProcessState.DEAD:
            return
        if self.state is ProcessState.PAUSED:
            self._count_pause()
        self.state = ProcessState.DEAD
        self._kept.clear()
        for callbacks in (self._when_dead, self._when_resumed):
            waiting = list(callbacks)
            callbacks.clear()
            for callback in waiting:
                callback()

    def pause(self, *, stalls: bool = True, stops_clock: bool = False) -> None:
        """Stop it until `resume`; it does nothing if it does not run.

        Args:
            stalls: All of its threads stop, as SIGSTOP does it. Otherwise its event loop is blocked, while its
                transport and its sockets go on.
            stops_clock: Its clock stands still meanwhile, as that of a virtual machine that is moved.
        """
        if self.state is ProcessState.RUNNING:
            self.state = ProcessState.PAUSED
            self.is_stalling = stalls
            self._paused_at = self.loop.now
            self._stops_clock = stops_clock

    def resume(self) -> None:
        """Let it go on; it does nothing if it is not paused."""
        if self.state is not ProcessState.PAUSED:
            return
        self._count_pause()
        self.state = ProcessState.RUNNING
        self.is_stalling = False
        kept, self._kept = self._kept, deque()
        self.loop.queue(kept)
        waiting, self._when_resumed = self._when_resumed, []
        for callback in waiting:
            callback()

    def _count_pause(self) -> None:
        lasted_s = self.loop.now - self._paused_at
        self.stopped_s += lasted_s
        if self._stops_clock:
            self.clock_lag_s += lasted_s

    def stopped_so_far_s(self) -> float:
        """How long it has not run, a pause that lasts included."""
        lasting = self.loop.now - self._paused_at if self.state is ProcessState.PAUSED else 0.0
        return self.stopped_s + lasting

    async def run_in_thread(self, function: Callable[[], Result], delay_s: float) -> Result:
        """Call a function after a while, as a thread would beside the event loop.

        A function that waits for a device does so by raising `NotYet`; it is called again when the device is done.
        """
        waiting: asyncio.Future[Result] = self.loop.create_future()

        def attempt() -> None:
            if self.state is ProcessState.DEAD or waiting.done():
                return
            if self.is_stalling:
                self.when_resumed(attempt)
                return
            try:
                result = self.context.copy().run(function)
            except NotYet as not_yet:
                not_yet.call_when_done(attempt)
            except Exception as error:  # noqa: BLE001 - whoever waits gets it
                self.call(_set_unless_done, waiting, None, error)
            else:
                self.call(_set_unless_done, waiting, result, None)

        self.loop.call_in(delay_s, attempt)
        return await waiting


def _set_unless_done(waiting: "asyncio.Future[Any]", result: object, error: Exception | None) -> None:
    if waiting.done():
        return
    if error is None:
        waiting.set_result(result)
    else:
        waiting.set_exception(error)


class NotYet(BaseException):
    """Raised by what would block a thread.

    Attributes:
        call_when_done: Takes what is to be called when it would not block any more.
    """

    def __init__(self, call_when_done: Callable[[Callable[[], object]], None]) -> None:
        super().__init__()
        self.call_when_done = call_when_done
