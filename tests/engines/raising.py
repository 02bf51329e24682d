"""Objects of an engine that raise whatever is asked of them."""

import asyncio
from typing import Any, Final

__all__ = ["ERRORS", "Raising", "Unprintable", "name_of"]


class Unprintable(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise SystemExit("no text")


ERRORS: Final = [ValueError("why"), Unprintable(), SystemExit(3), asyncio.CancelledError(), GeneratorExit()]


def name_of(error: BaseException) -> str:
    """Return the name of a case."""
    return type(error).__name__


class Raising:
    """An array, a tensor, a number and a list."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __len__(self) -> int:
        raise self.error

    def _raise(self, *_: object) -> Any:
        raise self.error

    __index__ = __int__ = __iter__ = __getitem__ = __array__ = data_ptr = _raise
