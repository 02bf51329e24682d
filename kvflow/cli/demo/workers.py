"""The two sides of the demo: `python -m kvflow.cli.demo.workers OPTIONS` is one of them in a process of its own."""

import sys
from collections.abc import Callable
from typing import Final

import kvflow
from kvflow.cli.demo import decode, managers, prefill
from kvflow.cli.demo.options import DemoOptions, EngineName, SideName
from kvflow.cli.processes import Line, run_child

__all__ = ["RUN", "main"]

RUN: Final[dict[EngineName, dict[SideName, Callable[[DemoOptions, Line], None]]]] = {
    "none": {"prefill": prefill.run, "decode": decode.run},
    "transformers": managers.RUN,
}


def _run(options: DemoOptions, line: Line) -> None:
    if options.log != "none":
        kvflow.configure_logging(options.log)
    RUN[options.engine][options.side](options, line)


def main() -> int:
    """Run one side to its end; gives the exit code."""
    return run_child(_run, DemoOptions)


if __name__ == "__main__":
    sys.exit(main())
