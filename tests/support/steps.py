"""What an act of a core or a table costs, counted without a clock."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import kvflow

__all__ = ["num_steps"]

LIBRARY = str(Path(kvflow.__file__).parent)


def num_steps(act: Callable[[], object]) -> int:
    """Return the number of lines of kvflow that an act executes.

    Other code is not counted: the garbage collector may call some at any time.
    """
    count = 0

    def note(frame: FrameType, event: str, _argument: object) -> Callable[..., Any] | None:
        nonlocal count
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        count += event == "line"  # Python 3.12 misses the first opcodes
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        act()
    finally:
        sys.settrace(before)
    return count
