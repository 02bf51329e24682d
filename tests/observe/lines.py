"""Capture and parse kvflow's log output."""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from kvflow.observe.logs import LOGGER, LogFormat, configure_logging

__all__ = ["Lines", "printed"]


class Lines(io.StringIO):
    """A stream of log lines, read as text or as JSON."""

    def texts(self) -> list[str]:
        return self.getvalue().splitlines()

    def objects(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(line, type=dict[str, Any]) for line in self.texts()]

    def named(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.objects() if line["event"] == event]


@contextmanager
def printed(log_format: LogFormat = "json", level: int = logging.INFO) -> Iterator[Lines]:
    """Redirect the log to a new stream within the block."""
    before = (LOGGER.handlers[:], LOGGER.level, LOGGER.propagate)
    stream = Lines()
    configure_logging(log_format, level, stream)
    try:
        yield stream
    finally:
        LOGGER.handlers[:], LOGGER.level, LOGGER.propagate = before
