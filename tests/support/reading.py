"""A context for reading messages without a rank."""

from collections.abc import Awaitable, Callable

from kvflow.control.reading import ReadingContext
from kvflow.observe.logs import BoundLogger
from kvflow.observe.trace import AnomalyLog
from kvflow.system import system_ports

__all__ = ["reading_context"]


def reading_context(log: BoundLogger, start_task: Callable[..., None] | None = None) -> ReadingContext:
    """Return a context with the system's ports; for short messages only, unless `start_task` is given."""
    ports = system_ports()
    return ReadingContext(ports, AnomalyLog(log, ports.now), start_task or _start_none)


def _start_none(run: Callable[..., Awaitable[None]], *_arguments: object) -> None:
    raise AssertionError(run)
