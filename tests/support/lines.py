"""Cost of an event for a core, measured without a clock."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from kvflow.state.decode.core import DecodeCore
from kvflow.state.prefill.core import PrefillCore

__all__ = ["lines_of"]


def lines_of(core: PrefillCore | DecodeCore, event: Any) -> int:
    """Return the number of Python lines that a core executes for one event."""
    lines = 0

    def count(_frame: FrameType, kind: str, _argument: object) -> Callable[..., Any]:
        nonlocal lines
        lines += kind == "line"
        return count

    sys.settrace(count)
    try:
        core.handle(event, 0.0)
    finally:
        sys.settrace(None)
    return lines
