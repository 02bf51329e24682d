"""Listeners that come late or come back, and a network that breaks."""

import socket
from contextlib import closing
from typing import Final

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream, TaskStatus

from kvflow.errors import ConfigError
from kvflow.wire.channel import Dialer, Listener
from tests.support.waiting import until
from tests.wire.lines import LOCAL, meet

pytestmark = pytest.mark.anyio

APART: Final = "127.7.7.7"
"""An address of this host that no other connection comes from, so that a port stays free between two listeners."""


async def bind_again(endpoint: str) -> Listener:
    """Listen where a closed listener was; its socket is given back in the background."""
    opened: list[Listener] = []

    def bind() -> bool:
        try:
            opened.append(Listener(endpoint))
        except ConfigError:
            return False
        return True

    await until(bind)
    return opened[0]


def free_endpoint() -> str:
    """Where nobody listens, for certain: a closed listener would still take a message or two."""
    with socket.socket() as held:
        held.bind((APART, 0))
        return f"tcp://{APART}:{held.getsockname()[1]}"


async def test_dialer_may_be_first() -> None:
    endpoint = free_endpoint()
    with closing(Dialer(endpoint)) as dialer:
        dialer.send(b"early")
        with closing(Listener(endpoint)) as listener:
            name, frames = await listener.receive()
            assert frames == [b"early"]
            listener.send(name, b"late")
            assert await dialer.receive() == [b"late"]


async def test_dialer_keeps_its_name_when_the_listener_is_restarted() -> None:
    first = Listener(f"tcp://{APART}:0")
    with closing(Dialer(first.endpoint)) as dialer:
        name = await meet(first, dialer)
        first.close()
        with closing(await bind_again(first.endpoint)) as second:
            assert await meet_again(second, dialer) == name


async def meet_again(listener: Listener, dialer: Dialer) -> bytes:
    """Send until something arrives: what was on its way when the connection broke is lost."""
    received: list[bytes] = []

    async def receive() -> None:
        name, _ = await listener.receive()
        received.append(name)

    def try_again() -> bool:
        dialer.send(b"again")
        return bool(received)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive)
        await until(try_again)
    return received[0]


class Cable:
    """A network between a dialer and a listener that can be cut; it is whole again at once."""

    def __init__(self, endpoint: str) -> None:
        self._port = int(endpoint.rpartition(":")[2])
        self._streams: list[SocketStream] = []

    async def run(self, *, task_status: TaskStatus[str]) -> None:
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as plug:
            task_status.started(f"tcp://127.0.0.1:{plug.extra(SocketAttribute.local_port)}")  # noqa: S610 - no Django
            await plug.serve(self._connect)

    async def cut(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            await stream.aclose()

    async def _connect(self, near: SocketStream) -> None:
        async with near, await anyio.connect_tcp("127.0.0.1", self._port) as far, anyio.create_task_group() as tasks:
            self._streams += [near, far]
            tasks.start_soon(copy, near, far)
            tasks.start_soon(copy, far, near)


async def copy(source: SocketStream, target: SocketStream) -> None:
    try:
        async for data in source:
            await target.send(data)
    except (anyio.ClosedResourceError, anyio.BrokenResourceError):
        await target.aclose()


async def test_name_and_line_survive_a_break_of_the_network() -> None:
    async with anyio.create_task_group() as tasks:
        with closing(Listener(LOCAL)) as listener:
            cable = Cable(listener.endpoint)
            endpoint: str = await tasks.start(cable.run)
            with closing(Dialer(endpoint)) as dialer:
                name = await meet(listener, dialer)
                await cable.cut()
                assert await meet_again(listener, dialer) == name
                listener.send(name, b"still you")
                assert await dialer.receive() == [b"still you"]
        tasks.cancel_scope.cancel()
