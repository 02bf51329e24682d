"""A registry that runs in a thread."""

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self, TypeVar

from anyio.from_thread import BlockingPortal

from kvflow import directory
from kvflow.aio.loop_thread import LoopThread
from kvflow.blocking.calls import call_on_loop
from kvflow.errors import LocalProtocolError
from kvflow.trust import Trust

__all__ = ["Registry"]

Result = TypeVar("Result")


class Registry:
    """`kvflow.Registry` in a thread, for programs without an event loop. Use it as a context manager.

    Args:
        bind: As for `kvflow.Registry`, which also says what is raised.
        advertise: Likewise.
        loop: The thread to run on; by default the registry starts its own.
        trust: As for `kvflow.Registry`.

    Attributes:
        endpoint: Address to use as the `registry` setting of ranks.
    """

    endpoint: str

    def __init__(
        self,
        bind: str = "tcp://127.0.0.1:0",
        advertise: str | None = None,
        *,
        loop: LoopThread | None = None,
        trust: Trust | None = None,
    ) -> None:
        self._registry = directory.Registry(bind, advertise, trust=trust)
        self._loop = loop
        self._portal: BlockingPortal | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            loop = self._loop or stack.enter_context(LoopThread())
            portal = self._portal = stack.enter_context(loop.use())
            stack.enter_context(portal.wrap_async_context_manager(self._registry))
            self.endpoint = self._registry.endpoint
            self._stack = stack.pop_all()
            self._running = loop
        return self

    reload_trust = call_on_loop(directory.Registry.reload_trust)
    statistics = call_on_loop(directory.Registry.statistics)

    def _call(self, function: Callable[[directory.Registry], Result]) -> Result:
        if self._portal is None:
            raise LocalProtocolError("registry is not open")
        return self._portal.call(function, self._registry)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._portal = None
        if self._running.is_running:  # not in a forked process: the thread belongs to the parent
            self._stack.close()
