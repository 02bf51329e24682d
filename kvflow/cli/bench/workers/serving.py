"""What the programs of all worker processes have in common: they are told what to do, until they are to leave."""

import sys
from collections.abc import Callable
from typing import Any, Protocol

import anyio
import anyio.to_thread
import msgspec

import kvflow
from kvflow.cli.bench.workers.options import AnyOptions
from kvflow.cli.demo.line import PipeLine

__all__ = ["next_order", "run_worker"]


class Serving(Protocol):
    """A worker, in its own process."""

    async def serve(self) -> None:
        """Do what is said until it is to leave."""


def run_worker(make: Callable[[AnyOptions, PipeLine], Serving], options_type: type[AnyOptions]) -> int:
    """Run a worker to its end, with the options on the command line of this process.

    Returns:
        The exit code.
    """
    line = PipeLine()
    options = msgspec.json.decode(sys.argv[1], type=options_type)
    if options.log != "none":
        kvflow.configure_logging(options.log)
    anyio.run(make(options, line).serve)
    return 0


async def next_order(line: PipeLine) -> dict[str, Any]:
    """Wait for what a worker is told to do; to leave, if whoever started it is gone."""
    try:
        return await anyio.to_thread.run_sync(line.receive)
    except EOFError:
        return {"do": "leave"}
