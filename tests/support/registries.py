"""A registry for tests that have no event loop."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvflow.blocking import Registry

__all__ = ["registry_in_thread"]


@contextmanager
def registry_in_thread() -> Iterator[str]:
    """Serve in a thread of its own; gives the endpoint."""
    with Registry() as registry:
        yield registry.endpoint
