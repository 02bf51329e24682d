"""A registry in a thread."""

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from kvflow import directory
from kvflow.aio.loop_thread import LoopThread

__all__ = ["Registry"]


class Registry:
    """`kvflow.Registry` in a thread, for programs without an event loop. Use it as a context manager.

    Args:
        bind: "tcp://host:port"; port 0 takes a free one.
        advertise: Host to give to others, if not the one bound; needed if `bind` is a wildcard.
        loop: The thread to run on; one of its own by default.

    Attributes:
        endpoint: Address for the `registry` setting of ranks.

    Raises:
        ConfigError: The address is malformed, or others could not use it; on entry: it cannot be bound.
        LocalProtocolError: On entry: it is open.
    """

    endpoint: str

    def __init__(
        self, bind: str = "tcp://127.0.0.1:0", advertise: str | None = None, *, loop: LoopThread | None = None
    ) -> None:
        self._registry = directory.Registry(bind, advertise)
        self._loop = loop
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            loop = self._loop or stack.enter_context(LoopThread())
            portal = stack.enter_context(loop.use())
            stack.enter_context(portal.wrap_async_context_manager(self._registry))
            self.endpoint = self._registry.endpoint
            self._stack = stack.pop_all()
            self._running = loop
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._running.is_running:  # it is the parent's in a fork
            self._stack.close()
