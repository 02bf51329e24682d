"""A registry that runs in a thread."""

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from anyio.from_thread import BlockingPortal

from kvflow import directory
from kvflow.aio.loop_thread import LoopThread
from kvflow.errors import LocalProtocolError
from kvflow.trust import Trust

__all__ = ["Registry"]


class Registry:
    """`kvflow.Registry` in a thread, for programs without an event loop. Use it as a context manager.

    Args:
        bind: "tcp://host:port"; port 0 takes a free one.
        advertise: Host name or address given to others, if different from the bound one; required if `bind` is a
            wildcard.
        loop: The thread to run on; by default the registry starts its own.
        trust: This registry's keys and those of the instances that may register and look up, as in
            `kvflow.PrefillConfig`.

    Attributes:
        endpoint: Address to use as the `registry` setting of ranks.

    Raises:
        ConfigError: The address is malformed or cannot be reached by others. On entry: it cannot be bound.
        LocalProtocolError: On entry: the registry is already open.
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

    def reload_trust(self, trust: Trust | None = None) -> None:
        """Replace the keys; see `kvflow.Registry.reload_trust`. Waits for the event loop.

        Args:
            trust: The new keys; by default they are reread from the directory they were loaded from.

        Raises:
            ConfigError: They cannot be read or used; nothing has changed.
            LocalProtocolError: The registry is not open.
        """
        if self._portal is None:
            raise LocalProtocolError("registry is not open")
        self._portal.call(self._registry.reload_trust, trust)

    def statistics(self) -> directory.RegistryStatistics:
        """Return the number of registered ranks and of ignored messages. Waits for the event loop.

        Raises:
            LocalProtocolError: The registry is not open.
        """
        if self._portal is None:
            raise LocalProtocolError("registry is not open")
        return self._portal.call(self._registry.statistics)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._portal = None
        if self._running.is_running:  # not in a forked process: the thread belongs to the parent
            self._stack.close()
