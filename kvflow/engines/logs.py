"""Loggers of adapters."""

import logging
from typing import Final

from typing_extensions import override

__all__ = ["adapter_logger"]

MAX_LINE: Final = 2_000
"""Maximum length of a log line, which may contain what a client has sent."""


class _Shortened(logging.Filter):
    """Truncates the lines of a logger."""

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if len(text) > MAX_LINE:
            record.msg, record.args = f"{text[:MAX_LINE]}... ({len(text)} characters)", None
        return True


def adapter_logger(name: str) -> logging.Logger:
    """Return a logger whose lines are truncated."""
    logger = logging.getLogger(name)
    if not logger.filters:
        logger.addFilter(_Shortened())
    return logger
