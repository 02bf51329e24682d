"""A registry for tests without an event loop."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvflow.blocking import Registry

__all__ = ["registry_in_thread"]


@contextmanager
def registry_in_thread() -> Iterator[str]:
    """Run a registry in a thread of its own; yield its endpoint."""
    with Registry() as registry:
        yield registry.endpoint
