"""Loggers of adapters."""

import logging
from typing import Final

__all__ = ["adapter_logger"]

MAX_LINE: Final = 2_000
"""Maximum length of a log line, which may contain what a client has sent."""


def adapter_logger(name: str) -> logging.Logger:
    """Return a logger whose lines are truncated."""
    logger = logging.getLogger(name)
    logger.addFilter(_shorten)  # a function that is there already is not added again
    return logger


def _shorten(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    if len(text) > MAX_LINE:
        record.msg, record.args = f"{text[:MAX_LINE]}... ({len(text)} characters)", None
    return True
