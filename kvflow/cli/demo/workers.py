"""The two sides of the demo: `python -m kvflow.cli.demo.workers OPTIONS` runs one of them in its own process."""

import sys
from collections.abc import Callable
from typing import Final

import kvflow
from kvflow.cli.demo import decode, prefill
from kvflow.cli.demo.options import DemoOptions, SideName
from kvflow.cli.processes import Line, run_child

__all__ = ["main", "side_of"]

RUN: Final[dict[SideName, Callable[[DemoOptions, Line], None]]] = {"prefill": prefill.run, "decode": decode.run}


def side_of(options: DemoOptions) -> Callable[[DemoOptions, Line], None]:
    """Return the function that runs one side."""
    if options.engine == "transformers":
        from kvflow.cli.demo import managers  # noqa: PLC0415 - requires the version that its adapter supports

        return managers.RUN[options.side]
    return RUN[options.side]


def _run(options: DemoOptions, line: Line) -> None:
    if options.log != "none":
        kvflow.configure_logging(options.log)
    side_of(options)(options, line)


def main() -> int:
    """Run one side to its end, and return the exit code."""
    return run_child(_run, DemoOptions)


if __name__ == "__main__":
    sys.exit(main())
