"""Entry point of a worker process: `python -m kvflow.cli.demo.worker SIDE OPTIONS`."""

import sys
from importlib import import_module

import msgspec

from kvflow import configure_logging
from kvflow.cli.demo.line import PipeLine
from kvflow.cli.demo.options import DemoOptions
from kvflow.errors import KvflowError

__all__ = ["main"]


EXIT_UNUSABLE = 2


def main() -> int:
    """Run one side of the demo.

    Returns:
        The exit code.
    """
    side, encoded = sys.argv[1:]
    line = PipeLine()
    options = msgspec.json.decode(encoded, type=DemoOptions)
    if options.log != "none":
        configure_logging(options.log)
    try:
        import_module(f"kvflow.cli.demo.{side}_worker").run(options, line)
    except (EOFError, BrokenPipeError):  # the coordinator is gone, and nobody wants an answer any more
        return EXIT_UNUSABLE
    except KvflowError as error:
        print(f"kvflow demo, {side} side: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
