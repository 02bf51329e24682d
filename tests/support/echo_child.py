"""A child process that executes the orders of a test: `python -m tests.support.echo_child OPTIONS`."""

import os
import sys

import msgspec

from benchmarks.processes import Line, run_child
from kvflow import ConfigError

__all__ = ["EchoOptions"]


class EchoOptions(msgspec.Struct, frozen=True):
    """Options of the process: its first report."""

    greeting: str = "ready"


def serve(options: EchoOptions, line: Line) -> None:
    line.report(options.greeting, pid=os.getpid())
    while True:
        match line.receive():
            case {"do": "echo", "text": text, "room": room}:
                line.report("echoed", room=room, text=text)
            case {"do": "print", "text": text}:
                os.write(1, text.encode())  # as native libraries do
            case {"do": "refuse", "room": room}:
                line.report("refused", room=room, detail="pool is full")
            case {"do": "fail"}:
                raise ConfigError("child cannot go on", because="told so")
            case {"do": "crash"}:
                raise RuntimeError("child cannot go on")
            case {"do": "exit"}:
                sys.exit(3)
            case {"do": "hang"}:
                sys.stdin.readlines()
            case _:
                return


if __name__ == "__main__":
    sys.exit(run_child(serve, EchoOptions))
