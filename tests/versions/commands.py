"""Commands in a process of their own: `python -m tests.versions.commands OPTIONS`, run with any version.

The order `run` runs a command and reports that it has `ended`: its exit code, and what it has printed, which has the
traceback if an exception has left it.
"""

import contextlib
import io
import sys
import traceback

import msgspec

import kvflow
from benchmarks.processes import Line, run_child
from kvflow.cli.main import main

__all__ = ["CommandOptions"]


class CommandOptions(msgspec.Struct, frozen=True):
    """Options of the process: none."""


def run(words: list[str]) -> tuple[int, str, str]:
    """Run a command."""
    out, err = io.StringIO(), io.StringIO()
    code = -1
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except BaseException:  # noqa: BLE001 - also of the parser; the test tells
            traceback.print_exc()
    return code, out.getvalue(), err.getvalue()


def serve(_options: CommandOptions, line: Line) -> None:
    line.report("ready", library=kvflow.__file__)
    while (order := line.receive())["do"] != "leave":
        code, out, err = run(order["words"])
        line.report("ended", code=code, out=out, err=err)


if __name__ == "__main__":
    sys.exit(run_child(serve, CommandOptions))
