"""Structured logs: one line per event, with a name and values.

kvflow logs through the standard library's logger "kvflow", so the embedding engine decides which lines are printed and
where; without configuration, none are. `configure_logging` is for kvflow's own programs.
"""

import logging
import re
import sys
from typing import Any, Final, Literal, TextIO

import structlog
from structlog.stdlib import BoundLogger, ProcessorFormatter
from structlog.typing import EventDict, Processor, WrappedLogger

__all__ = ["LOGGER", "BoundLogger", "LogFormat", "configure_logging", "get_logger"]

LogFormat = Literal["console", "json"]

LOGGER = logging.getLogger("kvflow")
LOGGER.addHandler(logging.NullHandler())

FIRST: Final = ("room", "outcome", "reason")
LAST: Final = ("detail",)
"""Values at the start and end of a line, where they are easy to find."""

UNQUOTED: Final = re.compile(r"[^\s\"'=\\]+")

META: Final = ("event", "level", "timestamp", "exception")
"""Values that `logging` formatters show in places of their own."""


class _Line(dict[str, Any]):
    """The values of a line. Its text is shown by engines that format records with `logging` alone."""

    def __str__(self) -> str:
        """Return `event key=value ...`, followed by the traceback, if any, on the next lines."""
        shown = [f"{name}={_quoted(value)}" for name, value in self.items() if name not in META]
        text = " ".join([str(self.get("event")), *shown])
        return f"{text}\n{self['exception']}" if "exception" in self else text


def _quoted(value: object) -> str:
    """Return a value as one word, quoted if it contains whitespace or special characters."""
    text = str(value) if not isinstance(value, bytes) else repr(value)
    return text if UNQUOTED.fullmatch(text) and text.isprintable() else repr(text)


def _as_line(_logger: WrappedLogger, _name: str, values: EventDict) -> EventDict:
    line = _Line({name: values[name] for name in FIRST if name in values})
    line.update((name, value) for name, value in values.items() if name not in LAST)
    line.update((name, values[name]) for name in LAST if name in values)
    return line


_PROCESSORS: list[Processor] = [
    structlog.stdlib.filter_by_level,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
    _as_line,
    ProcessorFormatter.wrap_for_formatter,
]


def get_logger(**values: object) -> BoundLogger:
    """Return a logger that adds `values` to each of its lines."""
    logger: BoundLogger = structlog.wrap_logger(LOGGER, processors=_PROCESSORS, wrapper_class=BoundLogger)
    return logger.bind(**values)


def configure_logging(log_format: LogFormat, level: int = logging.INFO, stream: TextIO = sys.stderr) -> None:
    """Print kvflow's log lines: one JSON object a line for machines, aligned columns for people."""
    renderer: Processor
    if log_format == "json":
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=stream.isatty(), sort_keys=False)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        ProcessorFormatter(processors=[ProcessorFormatter.remove_processors_meta, renderer], foreign_pre_chain=[])
    )
    LOGGER.handlers[:] = [handler]
    LOGGER.setLevel(level)
    LOGGER.propagate = False
