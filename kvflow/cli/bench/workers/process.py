"""A worker process as the one who started it sees it."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic

import anyio
import msgspec
from anyio.abc import Process, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream
from typing_extensions import Self

from kvflow.cli.bench.workers.options import AnyOptions
from kvflow.errors import KvflowError

__all__ = ["ANSWER_S", "Report", "WorkerFailed", "WorkerProcess"]

MAX_LINE_BYTES = 2**20
ANSWER_S = 60.0

Report = dict[str, Any]


class WorkerFailed(KvflowError):
    """A worker did not do what it was told, or printed something; it has printed why."""


class WorkerProcess(Generic[AnyOptions]):
    """One life of a worker. Use it as an async context manager; leaving it ends the process in an orderly way.

    Args:
        options: What the worker is told.
        tasks: Where what it says is read; it must outlive the process.
        module: What the process runs.
        answer_s: How long it may take to say what is expected of it.

    Raises:
        WorkerFailed: On exit: it ended with another code than 0, or printed to standard error without being told to.
    """

    def __init__(
        self,
        options: AnyOptions,
        tasks: TaskGroup,
        module: str = "kvflow.cli.bench.workers.worker",
        answer_s: float = ANSWER_S,
    ) -> None:
        self.options: AnyOptions = options
        self._tasks = tasks
        self._module = module
        self._answer_s = answer_s
        self.endpoint = ""
        self._reports: dict[tuple[str, int], Report] = {}
        self._changed = anyio.Event()
        self._printed = b""
        self._is_killed = False

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    async def __aenter__(self) -> Self:
        encoded = msgspec.json.encode(self.options).decode()
        command = [sys.executable, "-m", self._module, encoded]
        errors = subprocess.PIPE if self.options.log == "none" else None
        self._process: Process = await anyio.open_process(command, stdin=subprocess.PIPE, stderr=errors)
        self._heard = anyio.Event()
        self._tasks.start_soon(self._listen)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            if exc is None and not self._is_killed:
                await self.tell("leave")
                with anyio.move_on_after(self._answer_s):
                    await self._process.wait()
            if not self._is_killed and self._process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)  # Popen.kill would take the exit code from asyncio
            await self._heard.wait()
            await self._process.aclose()
        if exc is None and (self._printed or (self._process.returncode and not self._is_killed)):
            code, printed = self._process.returncode, self._what_it_printed()
            raise WorkerFailed("worker failed", side=self.options.side, exit_code=code, printed=printed)

    async def tell(self, do: str, **values: Any) -> None:
        """Tell the worker to do something."""
        if self._process.stdin is not None:
            await self._process.stdin.send(json.dumps({"do": do, **values}).encode() + b"\n")

    def signal(self, number: signal.Signals) -> float:
        """Send a signal; give the time just before."""
        self._is_killed |= number is signal.SIGKILL
        now = time.monotonic()
        os.kill(self.pid, number)
        return now

    async def expect(self, event: str, room: int = 0) -> Report:
        """Wait until the worker has reported something, and take the report.

        Raises:
            WorkerFailed: It has not within its time, has ended without it, or has said that it cannot.
        """
        with anyio.move_on_after(self._answer_s):
            while (event, room) not in self._reports:
                self._check_could(room)
                if self._process.returncode is not None:
                    await self._heard.wait()
                    break
                await self._changed.wait()
            if (event, room) in self._reports:
                return self._reports.pop((event, room))
        raise WorkerFailed(
            "worker did not report", side=self.options.side, event=event, room=room, printed=self._what_it_printed()
        )

    async def expect_ready(self) -> None:
        """Wait until the worker's rank is open."""
        self.endpoint = (await self.expect("ready"))["endpoint"]

    async def expect_chunk(self, room: int, index: int) -> bool:
        """Wait until the worker has offered a chunk; False if the transfer has ended before; errors as in `expect`."""
        with anyio.move_on_after(self._answer_s):
            while self._reports.get(("chunk", room), {"index": -1})["index"] < index:
                self._check_could(room)
                if ("ended", room) in self._reports:
                    return False
                await self._changed.wait()
            return True
        raise WorkerFailed("worker did not report", side=self.options.side, event="chunk", room=room)

    def _check_could(self, room: int) -> None:
        """Raise what the worker has said about a room that it cannot move at all."""
        refusal = self._reports.get(("refused", room))
        if refusal is not None:
            raise WorkerFailed("worker refused", side=self.options.side, room=room, detail=refusal["detail"])

    async def _listen(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._take_reports)
            tasks.start_soon(self._take_errors)
        self._heard.set()

    async def _take_reports(self) -> None:
        if self._process.stdout is None:
            return
        lines = BufferedByteReceiveStream(self._process.stdout)
        try:
            while True:
                report = json.loads(await lines.receive_until(b"\n", MAX_LINE_BYTES))
                self._reports[report["event"], report["room"]] = report
                self._wake()
        except (anyio.IncompleteRead, anyio.BrokenResourceError):
            await self._process.wait()
            self._wake()

    async def _take_errors(self) -> None:
        if self._process.stderr is not None:
            async for printed in self._process.stderr:
                self._printed += printed

    def _what_it_printed(self) -> str:
        return self._printed.decode(errors="replace")

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
