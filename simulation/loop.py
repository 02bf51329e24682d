"""An asyncio event loop in virtual time, and the processes that run on it.

The loop never waits: when no callback is ready, time jumps to the next timer. Callbacks run in the order in which they
were scheduled, so a run is determined by what the world around the processes draws from its seed.

A callback belongs to the process in whose context it runs. Callbacks of a killed process never run, and those of a
paused process wait until it resumes, so one loop can run every process of a deployment.
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
"""Callbacks at one moment of virtual time above which the code under test is considered to spin."""

MAX_AWAITS_IN_CLEANUP: Final = 100

RESOLUTION_S: Final = 1e-9
"""Minimum delay of a timer, so that a timer that is set again until its time has come does not spin."""

PROCESS: Final[contextvars.ContextVar["Process"]] = contextvars.ContextVar("process")


class Violation(Exception):
    """A promise was broken, or the code under test raised an exception that was not caught."""


class ProcessState(enum.Enum):
    """State of a process, which decides whether its callbacks run."""

    RUNNING = "running"
    PAUSED = "paused"
    DEAD = "dead"


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in virtual time. Sockets, threads, signals and subprocesses are not available.

    Attributes:
        now: Virtual seconds since the start of the run. `time` returns the clock of the current process instead.
        num_callbacks: Callbacks run so far.
        failure: The violation or uncaught exception that has stopped the run, or None.
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

    # What asyncio calls ------------------------------------------------------------------------------------------

    @override
    def time(self) -> float:
        """Return the clock of the current process."""
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
        """Do nothing: a cancelled timer is dropped when it is due."""

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
        """Stop the run, because the code under test must not let exceptions escape."""
        error = context.get("exception")
        if isinstance(error, Violation):
            self.fail(error)
        else:
            handle = context.get("handle")
            process = PROCESS.get(None) if handle is None else _process_of(handle)
            violation = Violation(f"{process or 'world'}: {context.get('message')}: {error!r}")
            violation.__cause__ = error
            self.fail(violation)

    # What the world calls ----------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Stop the run after the current callback; only the first failure is kept."""
        if self.failure is None:
            self.failure = error

    def call_in(self, delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.Handle:
        """Call a function of the world after a delay; the callback belongs to no process."""
        handle = asyncio.Handle(callback, args, self, self._world)
        self._push(self.now + delay_s, handle)
        return handle

    def call_process(self, process: "Process", callback: Callable[..., object], *args: Any) -> None:
        """Call a function in a process as soon as it runs; never if it is dead."""
        self._ready.append(asyncio.Handle(callback, args, self, process.context))

    def queue(self, handles: "deque[asyncio.Handle]") -> None:
        """Schedule callbacks that were kept during a pause; timers are delayed further if the clock has stood still."""
        self._ready.extend(handle for handle in handles if not self._is_put_off(handle))

    def advance(self, lasts_s: float) -> None:
        """Run everything that is due within some virtual seconds.

        Raises:
            Violation: The code under test broke a promise; the loop is unusable from then on.
        """
        until = self.now + lasts_s
        with self._running():
            self._run_until(until)
        self.now = until

    def run_ready(self) -> None:
        """Run ready callbacks without advancing time."""
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
            self._thread_id = None  # type: ignore[assignment] # None means that the loop does not run
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
        """Delay a timer further if its process's clock has stood still, and return whether it was delayed."""
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
        """End every task, whatever it waits for, running none of its code except cleanup."""
        with self._running(), warnings.catch_warnings():
            # anyio wraps a task's coroutine: if the task ends before its first step, the inner coroutine was never
            # awaited.
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            while self._tasks:
                tasks, self._tasks = self._tasks, []  # cleanup may start new tasks, which are ended next
                for task in tasks:
                    if not task.done():
                        self._end_task(task)
        self._ready.clear()
        self._timers.clear()
        super().close()

    def _end_task(self, task: "asyncio.Task[Any]") -> None:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        asyncio._enter_task(self, task)  # cancel scopes must be left by the task that entered them
        try:
            _end(task.get_coro())
        finally:
            asyncio._leave_task(self, task)


def _process_of(handle: asyncio.Handle) -> "Process | None":
    process: Process | None = handle._context.get(PROCESS)  # type: ignore[attr-defined]
    return process


class _WorldEnded(BaseException):
    """Raised into the coroutine of a task that must end. GeneratorExit would not unwind a cleanup that awaits."""


def _end(coroutine: Any) -> None:
    """Unwind a coroutine, even if its cleanup awaits."""
    for _ in range(MAX_AWAITS_IN_CLEANUP):
        try:
            coroutine.throw(_WorldEnded())
        except BaseException:  # noqa: BLE001 - in a dead process, nothing can handle it
            return


class Process:
    """One process of a deployment.

    Args:
        loop: Event loop of the world.
        name: Unique name for stories.
        host: Host that it runs on. Links between hosts can be cut.

    Attributes:
        state: Whether its callbacks run.
        context: Callbacks run in this context belong to the process.
        clock_lag_s: Total time for which its clock has stood still.
        stopped_s: Total time of its completed pauses.
        is_stalling: It is paused, including the threads of its transport and its sockets.
        has_vanished: Its host ended with it, so its peers were not notified.
        was_killed: It was ended from outside.
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
        """The process has not ended."""
        return self.state is not ProcessState.DEAD

    @property
    def is_running(self) -> bool:
        """The process is alive and not paused."""
        return self.state is ProcessState.RUNNING

    def now(self) -> float:
        """Return its monotonic clock in seconds."""
        return self.loop.now - self.clock_lag_s

    def start(self, main: Callable[[], Coroutine[Any, Any, object]]) -> Self:
        """Run `main`; the process ends when it returns."""
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
        except Exception as error:  # noqa: BLE001 - reported as the exit of the process
            self.exit = error
        self.end()

    def call(self, callback: Callable[..., object], *args: Any) -> None:
        """Call a function in this process as soon as it runs; never if it has ended."""
        if self.state is not ProcessState.DEAD:
            self.loop.call_process(self, callback, *args)

    def keep(self, handle: asyncio.Handle) -> None:
        """Keep a callback that became ready while the process was paused; drop it if the process is dead."""
        if self.state is ProcessState.PAUSED:
            self._kept.append(handle)

    def when_dead(self, callback: Callable[[], object]) -> None:
        """Register a callback of the world for the end of the process, however it ends."""
        if self.state is ProcessState.DEAD:
            callback()
        else:
            self._when_dead.append(callback)

    def when_resumed(self, callback: Callable[[], object]) -> None:
        """Register a callback of the world for when the process resumes or has ended."""
        self._when_resumed.append(callback)

    def kill(self, *, vanish: bool = False) -> None:
        """End it at once, like SIGKILL.

        Args:
            vanish: Its host ends with it, so no operating system closes its connections.
        """
        self.has_vanished = vanish
        self.was_killed = True
        self.end()

    def end(self) -> None:
        """Mark the process as dead, so that none of its callbacks runs any more."""
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
        """Pause it until `resume`; do nothing if it does not run.

        Args:
            stalls: All of its threads stop, as with SIGSTOP. Otherwise only its event loop is blocked, while its
                transport and its sockets continue.
            stops_clock: Its clock stands still meanwhile, like that of a migrating virtual machine.
        """
        if self.state is ProcessState.RUNNING:
            self.state = ProcessState.PAUSED
            self.is_stalling = stalls
            self._paused_at = self.loop.now
            self._stops_clock = stops_clock

    def resume(self) -> None:
        """Resume it; do nothing if it is not paused."""
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
        """Return the total time of its pauses, including the current one."""
        lasting = self.loop.now - self._paused_at if self.state is ProcessState.PAUSED else 0.0
        return self.stopped_s + lasting

    async def run_in_thread(self, function: Callable[[], Result], delay_s: float) -> Result:
        """Call a function after a delay, as a thread beside the event loop would.

        A function that would wait for a device raises `NotYet` instead, and is called again when the device is done.
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
            except Exception as error:  # noqa: BLE001 - passed on to the waiting task
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


class NotYet(Exception):
    """Raised by an operation that would block a thread.

    Attributes:
        call_when_done: Registers a callback for when the operation would no longer block.
    """

    def __init__(self, call_when_done: Callable[[Callable[[], object]], None]) -> None:
        super().__init__()
        self.call_when_done = call_when_done
