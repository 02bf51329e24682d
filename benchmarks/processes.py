"""Child processes that take orders and send reports, one JSON object per line in each direction.

`ChildProcess` is a child as seen by the process that started it; `run_child` and `Line` are the other end. Benchmarks
and tests share them.

A child has its own session, so Ctrl-C in a terminal reaches only the process that started it, which then ends the
child. The kernel kills the child if that process dies.
"""

import abc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Protocol, Self, TextIO, TypedDict, TypeVar

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import Process, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream
from typing_extensions import Unpack, override

from kvflow.cli.mortal import end_with_parent
from kvflow.errors import KvflowError

__all__ = [
    "ANSWER_S",
    "Child",
    "ChildFailed",
    "ChildProcess",
    "Line",
    "PipeLine",
    "Report",
    "next_order",
    "run_child",
]

ANSWER_S: Final = 60.0
"""How long a child may take to send an expected report."""

MAX_LINE_BYTES: Final = 2**20
EXIT_UNUSABLE: Final = 2
FAILED: Final = "failed"
"""Last report of a child that cannot continue."""

Report = dict[str, Any]
Options = TypeVar("Options", bound=msgspec.Struct)


class ChildSettings(TypedDict, total=False):
    """Settings of every child, see `Child`."""

    answer_s: float
    on_report: Callable[[Report], None]


class ChildFailed(KvflowError):
    """A child did not obey an order, printed something (`printed`), or reported an error of its own."""


class Child(abc.ABC):
    """A child, as seen by its parent.

    A report has an `event`, and a `room` if it concerns one; the latest report of each event and room is kept until it
    is expected.

    Args:
        name: Name in errors.
        answer_s: Maximum time for an expected report, in seconds.
        on_report: Called with every report.
    """

    def __init__(
        self, name: str, *, answer_s: float = ANSWER_S, on_report: Callable[[Report], None] = lambda _report: None
    ) -> None:
        self.name = name
        self._answer_s = answer_s
        self._on_report = on_report
        self._reports: dict[tuple[str, int], Report] = {}
        self._changed = anyio.Event()
        self._has_ended = False

    @abc.abstractmethod
    async def tell(self, do: str, **values: Any) -> None:
        """Send the child an order."""

    async def expect(self, event: str, room: int = 0) -> Report:
        """Wait for a report, and remove it.

        Raises:
            ChildFailed: It has not arrived in time, or the child has ended without it, or has refused the room.
        """
        await self.wait_for(room, event)
        return self._reports.pop((event, room))

    async def wait_for(self, room: int, *events: str) -> str:
        """Wait for one of several reports of a room, and return its event; keep the report. Raises the same errors."""
        with anyio.move_on_after(self._answer_s):
            while True:
                for event in events:
                    if (event, room) in self._reports:
                        return event
                self._raise_own_error()
                if ("refused", room) in self._reports:
                    detail = self._reports["refused", room]["detail"]
                    raise ChildFailed("child refused", child=self.name, room=room, detail=detail)
                if self._has_ended:
                    break
                await self._changed.wait()
        message = "child ended without a report" if self._has_ended else "child did not report in time"
        raise ChildFailed(message, child=self.name, event=events[0], room=room, printed=self.printed())

    def printed(self) -> str:
        """Return what it has printed to standard error, if that is collected."""
        return ""

    def _raise_own_error(self) -> None:
        """Raise the error with which the child could not continue, if it has reported one."""
        if (FAILED, 0) in self._reports:
            raise ChildFailed(self._reports[FAILED, 0]["error"], child=self.name)

    def take(self, report: Report) -> None:
        """Store a report, and wake the tasks that wait for one."""
        self._reports[report["event"], report.get("room", 0)] = report
        self._on_report(report)
        self._wake()

    def end(self) -> None:
        """Record that no report will follow."""
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class ChildProcess(Child):
    """A child in its own process. Use it as an async context manager; on exit, the child is told to leave.

    If the block raises an exception, the child is killed.

    Args:
        name: Name in errors.
        module: Module that the process runs; see `run_child`.
        options: Options for the module.
        tasks: Task group that reads its reports; it must outlive the process.
        shows_errors: Its standard error is that of this process. Otherwise it is collected, and any output there counts
            as a failure.
        environment: Its environment variables, by default those of this process.
        settings: `answer_s` and `on_report`, as in `Child`.

    Raises:
        ChildFailed: On exit: its exit code was not 0, or it printed something.
    """

    def __init__(
        self,
        name: str,
        module: str,
        options: msgspec.Struct,
        tasks: TaskGroup,
        *,
        shows_errors: bool = False,
        environment: Mapping[str, str] | None = None,
        **settings: Unpack[ChildSettings],
    ) -> None:
        super().__init__(name, **settings)
        self._environment = environment
        self._command = [sys.executable, "-m", module, msgspec.json.encode(options).decode()]
        self._tasks = tasks
        self._errors = None if shows_errors else subprocess.PIPE
        self._printed = b""
        self._is_killed = False

    async def __aenter__(self) -> Self:
        self._process: Process = await anyio.open_process(
            self._command, stdin=subprocess.PIPE, stderr=self._errors, env=self._environment, start_new_session=True
        )
        self._heard = anyio.Event()
        self._tasks.start_soon(self._listen)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            if exc is None and not self._is_killed:
                with suppress(anyio.BrokenResourceError):  # it has ended already
                    await self.tell("leave")
                with anyio.move_on_after(self._answer_s):
                    await self._process.wait()
            if self._process.returncode is None:
                self._signal(signal.SIGKILL)
            await self._heard.wait()
            await self._process.aclose()
        code = self._process.returncode
        if exc is None:
            self._raise_own_error()
        if exc is None and (self._printed or (code and not self._is_killed)):
            raise ChildFailed("child failed", child=self.name, exit_code=code, printed=self.printed())

    @override
    async def tell(self, do: str, **values: Any) -> None:
        if self._process.stdin is not None:
            await self._process.stdin.send(json.dumps({"do": do, **values}).encode() + b"\n")

    @override
    def printed(self) -> str:
        return self._printed.decode(errors="replace")

    @property
    def pid(self) -> int:
        """Process ID."""
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> float:
        """Send a signal; after SIGKILL the exit code is ignored.

        Returns:
            The monotonic time just before, in seconds.
        """
        self._is_killed |= number is signal.SIGKILL
        now = time.monotonic()
        self._signal(number)
        return now

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)  # Popen.send_signal would reap the exit code before asyncio does

    async def _listen(self) -> None:
        try:
            with anyio.CancelScope(shield=True):  # until the process has ended, which `__aexit__` ensures
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._take_reports)
                    tasks.start_soon(self._take_errors)
        finally:  # an event loop that is closed cancels all tasks, also shielded ones
            self._heard.set()
            self.end()

    async def _take_reports(self) -> None:
        if self._process.stdout is None:
            return
        lines = BufferedByteReceiveStream(self._process.stdout)
        with suppress(anyio.IncompleteRead, anyio.BrokenResourceError):
            while True:
                self.take(json.loads(await lines.receive_until(b"\n", MAX_LINE_BYTES)))
        await self._process.wait()

    async def _take_errors(self) -> None:
        if self._process.stderr is not None:
            async for printed in self._process.stderr:
                self._printed += printed


class Line(Protocol):
    """The child's end of the connection."""

    def report(self, event: str, **values: Any) -> None:
        """Send a report to the parent."""

    def receive(self) -> Report:
        """Wait for the next order.

        Raises:
            EOFError: The parent has ended.
        """


class PipeLine:
    """The child's end, over standard input and output.

    Native libraries print to standard output, so the original is reserved for reports, and their output goes to
    standard error.
    """

    def __init__(self) -> None:
        self._reports: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def report(self, event: str, **values: Any) -> None:
        """Write one line."""
        self._reports.write(json.dumps({"event": event, **values}) + "\n")
        self._reports.flush()

    def receive(self) -> Report:
        """Read one line."""
        line = sys.stdin.readline()
        if not line:
            raise EOFError("the parent process has ended")
        order: Report = json.loads(line)
        return order


async def next_order(line: Line) -> Report:
    """Wait for an order without blocking the event loop; return an order to leave if the parent has ended."""
    try:
        return await anyio.to_thread.run_sync(line.receive)
    except EOFError:
        return {"do": "leave"}


def run_child(serve: Callable[[Options, Line], None], options_type: type[Options]) -> int:
    """Run a child to its end, with the options on this process's command line.

    Args:
        serve: The work of the child.
        options_type: Type of the options.

    Returns:
        The exit code.
    """
    end_with_parent()
    line = PipeLine()
    try:
        serve(msgspec.json.decode(sys.argv[1], type=options_type), line)
    except (EOFError, BrokenPipeError):  # the parent has ended, and needs no answer
        return EXIT_UNUSABLE
    except KvflowError as error:
        line.report(FAILED, error=str(error))
        return EXIT_UNUSABLE
    return 0
