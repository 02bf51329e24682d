"""How a worker talks to the process that started it: one JSON object a line, each way."""

import json
import os
import sys
from typing import Any, Protocol, TextIO

__all__ = ["Line", "PipeLine"]


class Line(Protocol):
    """The worker's end."""

    def report(self, event: str, **values: Any) -> None:
        """Tell the coordinator something."""

    def receive(self) -> dict[str, Any]:
        """Wait for the coordinator's next message."""


class PipeLine:
    """Over standard input and output.

    Native libraries print to standard output, so it is put aside for reports, and theirs goes to standard error.
    """

    def __init__(self) -> None:
        self._reports: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def report(self, event: str, **values: Any) -> None:
        """Write one line."""
        self._reports.write(json.dumps({"event": event, **values}) + "\n")
        self._reports.flush()

    def receive(self) -> dict[str, Any]:
        """Read one line."""
        line = sys.stdin.readline()
        if not line:
            raise EOFError("the coordinator is gone")
        message: dict[str, Any] = json.loads(line)
        return message
