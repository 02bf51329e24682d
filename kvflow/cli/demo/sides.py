"""The two sides of the demo, each in its own process, or in a thread if the transport cannot leave the process.

`python -m kvflow.cli.demo.sides SIDE DESCRIPTOR OPTIONS` runs one; DESCRIPTOR is its end of a pipe to the router.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec

from kvflow.cli.demo.options import DemoOptions, SideName
from kvflow.cli.mortal import end_with_parent
from kvflow.errors import KvflowError

__all__ = ["Report", "SideFailed", "Sides", "open_sides"]

Report = dict[str, Any]


class SideFailed(KvflowError):
    """A side reported an error, or ended too early."""


class Sides:
    """Both sides, as the router sees them."""

    def __init__(self, pipes: dict[SideName, Any], options: DemoOptions) -> None:
        self._pipes = pipes
        self._open = {pipe: side for side, pipe in pipes.items()}
        self._is_quiet = options.json
        self._reports: dict[tuple[SideName, str], Report] = {}

    def tell(self, side: SideName, **order: Any) -> None:
        """Send a side its next order; without effect if it has ended."""
        with suppress(BrokenPipeError):
            self._pipes[side].send_bytes(msgspec.json.encode(order))

    def expect(self, side: SideName, event: str) -> Report:
        """Wait for a report; raise SideFailed if a side cannot continue."""
        while (side, event) not in self._reports:
            if self._pipes[side] not in self._open:
                raise SideFailed("side ended without a report", side=side, event=event)
            for pipe in wait(self._open):
                self._read(pipe)
        return self._reports[side, event]

    def _read(self, pipe: Any) -> None:
        side = self._open[pipe]
        try:
            report: Report = msgspec.json.decode(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            del self._open[pipe]
            return
        if report["event"] == "failed":
            raise SideFailed(report["error"], side=side)
        self._reports[side, report["event"]] = report
        if "news" in report and not self._is_quiet:
            print(f"{side}: {report['news']}", file=sys.stderr, flush=True)


@contextmanager
def open_sides(options: DemoOptions) -> Iterator[Sides]:
    """Start all sides; on exit they have ended. An error ends processes at once, and threads at their next report."""
    open_side = _open_thread if options.backend == "memory" else _open_process
    with ExitStack() as stack:
        sides: tuple[SideName, ...] = ("prefill", "decode", "second") if options.migrate else ("prefill", "decode")
        yield Sides({side: stack.enter_context(open_side(side, options)) for side in sides}, options)


@contextmanager
def _open_process(side: SideName, options: DemoOptions) -> Iterator[Any]:
    """Start a side, and yield the router's end of the connection. Ctrl-C in a terminal does not reach the process."""
    ours, theirs = Pipe()
    arguments = [side, str(theirs.fileno()), msgspec.json.encode(options).decode()]
    command = [sys.executable, "-m", "kvflow.cli.demo.sides", *arguments]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True) as process:  # noqa: S603
        theirs.close()
        try:
            yield ours
        except BaseException:
            process.kill()
            raise


@contextmanager
def _open_thread(side: SideName, options: DemoOptions) -> Iterator[Any]:
    from kvflow.cli.demo.ranks import run_side  # noqa: PLC0415 - slow to import

    ours, theirs = Pipe()
    thread = threading.Thread(target=run_side, args=(side, theirs, options))
    thread.start()
    try:
        yield ours
    finally:
        ours.close()
        thread.join()


def main(side: SideName, descriptor: str, options: str) -> None:
    """Run a side in this process, which ends with the router's."""
    end_with_parent()
    os.dup2(2, 1)  # transports print to standard output
    pipe = Connection(int(descriptor))
    if not pipe.poll():  # or the router has ended already: it sends nothing yet
        from kvflow.cli.demo.ranks import run_side  # noqa: PLC0415 - slow to import

        run_side(side, pipe, msgspec.json.decode(options, type=DemoOptions))


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
