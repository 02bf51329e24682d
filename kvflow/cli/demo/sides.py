"""The two sides of the demo, as the coordinator sees them: a process or a thread that reports and is told things."""

import abc
import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import Process
from anyio.from_thread import BlockingPortal
from anyio.streams.buffered import BufferedByteReceiveStream
from typing_extensions import override

from kvflow.cli.demo.options import DemoOptions
from kvflow.errors import KvflowError

__all__ = ["OnReport", "ProcessSide", "Report", "Side", "SideFailed", "ThreadSide"]

MAX_LINE_BYTES = 2**20

Report = dict[str, Any]
OnReport = Callable[[str, Report], None]


class SideFailed(KvflowError):
    """A side ended before its work was done; what it printed says why."""


class Side(abc.ABC):
    """One side.

    Args:
        name: "prefill" or "decode".
        options: What the user chose.
        on_report: Told everything the side reports.
    """

    def __init__(self, name: str, options: DemoOptions, on_report: OnReport) -> None:
        self.name = name
        self.options = options
        self._on_report = on_report
        self._reports: dict[str, Report] = {}
        self._changed = anyio.Event()
        self._has_ended = False

    async def run(self) -> None:
        """Run the side to its end.

        Raises:
            SideFailed: It failed.
        """
        await self._run()
        self._has_ended = True
        self._changed.set()

    async def expect(self, event: str) -> Report:
        """Wait until the side has reported an event.

        Raises:
            SideFailed: It ended without it.
        """
        while event not in self._reports:
            if self._has_ended:
                raise SideFailed("side ended early", side=self.name, before=event)
            await self._changed.wait()
        return self._reports[event]

    def take(self, report: Report) -> None:
        """Note a report; wakes whoever expects it."""
        self._reports[report["event"]] = report
        self._on_report(self.name, report)
        self._changed.set()
        self._changed = anyio.Event()

    @abc.abstractmethod
    async def start(self) -> None:
        """Get ready to be told something."""

    @abc.abstractmethod
    async def send(self, **message: Any) -> None:
        """Tell the side something."""

    @abc.abstractmethod
    async def _run(self) -> None:
        """Run it, and `take` what it reports."""


class ProcessSide(Side):
    """A side in a process of its own. Its log and its errors go to standard error."""

    @override
    async def start(self) -> None:
        encoded = msgspec.json.encode(self.options).decode()
        command = [sys.executable, "-m", "kvflow.cli.demo.worker", self.name, encoded]
        self._process: Process = await anyio.open_process(command, stdin=subprocess.PIPE, stderr=None)

    @override
    async def send(self, **message: Any) -> None:
        if self._process.stdin is not None:
            await self._process.stdin.send(json.dumps(message).encode() + b"\n")

    @override
    async def _run(self) -> None:
        async with self._process as process:
            if process.stdout is not None:
                await self._take_lines(BufferedByteReceiveStream(process.stdout))
            returncode = await process.wait()
        if returncode:
            raise SideFailed("process failed", side=self.name, exit_code=returncode)

    async def _take_lines(self, lines: BufferedByteReceiveStream) -> None:
        try:
            while True:
                self.take(json.loads(await lines.receive_until(b"\n", MAX_LINE_BYTES)))
        except anyio.IncompleteRead:
            return


class ThreadSide(Side):
    """A side in a thread of this process, for a transport that does not leave it."""

    @override
    async def start(self) -> None:
        self._message_in, self._message_out = anyio.create_memory_object_stream[Report](8)

    @override
    async def send(self, **message: Any) -> None:
        await self._message_in.send(message)

    @override
    async def _run(self) -> None:
        worker = import_module(f"kvflow.cli.demo.{self.name}_worker")
        async with self._message_out, anyio.create_task_group() as tasks, BlockingPortal() as portal:
            tasks.start_soon(self._hang_up_when_cancelled)
            line = _ThreadLine(self, portal, self._message_out.receive)
            await anyio.to_thread.run_sync(worker.run, self.options, line)
            tasks.cancel_scope.cancel()

    async def _hang_up_when_cancelled(self) -> None:
        """A thread cannot be cancelled, but it ends when it learns that nobody will tell it anything any more."""
        try:
            await anyio.sleep_forever()
        finally:
            self._message_in.close()


class _ThreadLine:
    """The worker's end of a `ThreadSide`."""

    def __init__(self, side: ThreadSide, portal: BlockingPortal, receive: Callable[[], Any]) -> None:
        self._side = side
        self._portal = portal
        self._receive = receive

    def report(self, event: str, **values: Any) -> None:
        self._portal.call(self._side.take, {"event": event, **values})

    def receive(self) -> Report:
        try:
            report: Report = self._portal.call(self._receive)
        except anyio.EndOfStream as error:
            raise EOFError("the coordinator is gone") from error
        return report
