"""A registry for tests that have no event loop."""

from collections.abc import Iterator
from contextlib import contextmanager

import kvflow
from kvflow.blocking import LoopThread

__all__ = ["registry_in_thread"]


@contextmanager
def registry_in_thread() -> Iterator[str]:
    """Serve in a thread of its own; gives the endpoint."""
    with LoopThread() as loop:
        registry = kvflow.Registry()
        with loop.portal.wrap_async_context_manager(registry):
            yield registry.endpoint
