"""Structured logs: one line per event, with a name and values.

kvflow logs through the standard library's logger "kvflow", so the embedding engine decides which lines are printed and
where; without configuration, none are. `configure_logging` is for kvflow's own programs.
"""

import datetime
import logging
import re
import sys
import traceback
from collections.abc import Mapping
from typing import Any, Final, Literal, TextIO

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


class _LogLine(dict[str, Any]):
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


class BoundLogger:
    """Logs lines that all contain some values.

    structlog, which only renders lines, is loaded by `configure_logging` alone: a fifth of a rank's imports.
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def bind(self, **values: object) -> "BoundLogger":
        """Return a logger that adds further values."""
        return BoundLogger({**self._values, **values})

    def debug(self, event: str, /, **values: object) -> None:
        """Log a line with some more values; `exc_info` is an exception whose traceback it shows."""
        self.log(logging.DEBUG, event, **values)

    def info(self, event: str, /, **values: object) -> None:
        """Log a line; see `debug`."""
        self.log(logging.INFO, event, **values)

    def warning(self, event: str, /, **values: object) -> None:
        """Log a line; see `debug`."""
        self.log(logging.WARNING, event, **values)

    def error(self, event: str, /, **values: object) -> None:
        """Log a line; see `debug`."""
        self.log(logging.ERROR, event, **values)

    def log(self, level: int, event: str, /, **values: object) -> None:
        """Log a line of any of `logging`'s levels; see `debug`."""
        if not LOGGER.isEnabledFor(level):
            return
        values = {**self._values, **values}
        error = values.pop("exc_info", None)
        line = _LogLine({name: values[name] for name in FIRST if name in values})
        line.update((name, value) for name, value in values.items() if name not in LAST)
        name = logging.getLevelName(level).lower()
        line.update(event=event, level=name, timestamp=_now())
        if isinstance(error, BaseException):
            line["exception"] = "".join(traceback.format_exception(error)).rstrip("\n")
        line.update((name, values[name]) for name in LAST if name in values)
        LOGGER.log(level, line, extra={"_logger": LOGGER, "_name": name})  # by which structlog knows it


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


def get_logger(**values: object) -> BoundLogger:
    """Return a logger that adds `values` to each of its lines."""
    return BoundLogger(values)


def configure_logging(log_format: LogFormat, level: int = logging.INFO, stream: TextIO = sys.stderr) -> None:
    """Print kvflow's log lines: one JSON object a line for machines, aligned columns for people."""
    import structlog  # noqa: PLC0415 - slow to import, see `BoundLogger`
    from structlog.stdlib import ProcessorFormatter  # noqa: PLC0415 - as above

    renderer: structlog.typing.Processor
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
