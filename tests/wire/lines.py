"""A listener and a dialer that talk."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

from kvflow.wire.channel import Dialer, Listener

__all__ = ["LOCAL", "connected", "meet"]

LOCAL = "tcp://127.0.0.1:0"


@contextmanager
def connected(bind: str = LOCAL) -> Iterator[tuple[Listener, Dialer]]:
    with closing(Listener(bind)) as listener, closing(Dialer(listener.endpoint)) as dialer:
        yield listener, dialer


async def meet(listener: Listener, dialer: Dialer) -> bytes:
    """Exchange a message each way; gives the dialer's name."""
    dialer.send(b"hello")
    name, frames = await listener.receive()
    assert frames == [b"hello"]
    listener.send(name, b"welcome")
    assert await dialer.receive() == [b"welcome"]
    return name
