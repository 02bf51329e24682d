"""What the objects of one request raise fails that request alone."""

import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvflow.errors import describe

__all__ = ["contained"]


@contextmanager
def contained(fail: Callable[[str], object]) -> Iterator[None]:
    """Run a block that uses an engine's objects of one request: arrays, tensors, indices, events.

    Args:
        fail: Called with the reason if the block raises anything; it fails the request. After that, the engine goes on.

    Raises:
        BaseException: What a signal has raised, once the request has failed: it is for the process.
    """
    try:
        yield
    except BaseException as error:
        fail(describe(error))
        if _is_by_signal(error):
            raise


def _is_by_signal(error: BaseException) -> bool:
    """Return whether a signal has raised an error: Ctrl-C, or a handler such as that with which vLLM ends a worker.

    A KeyboardInterrupt counts as Ctrl-C, which has no frame of its own, on the thread that signals interrupt.
    """
    if isinstance(error, Exception) or threading.current_thread() is not threading.main_thread():
        return False
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    frames = traceback.walk_tb(error.__traceback__)
    return isinstance(error, KeyboardInterrupt) or any(frame.f_code in handlers for frame, _ in frames)
