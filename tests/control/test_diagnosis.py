"""Each reason why there is no connection has a text of its own; on real sockets."""

import errno
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from kvflow.control import diagnosis
from kvflow.control.channel import ZmqControl
from kvflow.control.diagnosis import diagnose
from kvflow.trust import PLAIN, Trust
from tests.support.http_servers import HTTP_SERVERS
from tests.support.ports import unused_port
from tests.support.trusts import new_trust
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@contextmanager
def listening(backlog: int = 8) -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=backlog) as server:
        server.setblocking(False)
        yield server


def at(server: socket.socket) -> str:
    return f"tcp://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "GREETING_S", 0.2)


async def test_nobody_listens() -> None:
    found = await diagnose(f"tcp://127.0.0.1:{unused_port()}", is_encrypted=False)
    assert found.detail.startswith("connection refused")


async def test_each_of_several_hosts_has_its_reason() -> None:
    with listening() as server:
        several = at(server).replace("127.0.0.1", "127.0.0.2,127.0.0.1,no-such-host.invalid")
        found = await diagnose(several, is_encrypted=False)
    first, second, third = found.detail.split("; ")
    assert first.startswith("connection refused")
    assert second.startswith("127.0.0.1: it accepts TCP connections, but says nothing")
    assert third.startswith("no-such-host.invalid: no TCP connection: ")


async def test_the_host_drops_what_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel drops connections to a listener whose queue is full."""
    monkeypatch.setattr(diagnosis, "CONNECT_S", 0.2)
    with listening(backlog=0) as server, ExitStack() as stack:
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        found = await diagnose(at(server), is_encrypted=False)
    assert found.detail.startswith("no answer to a TCP connection within 0.2 s")


async def test_the_name_is_unknown() -> None:
    found = await diagnose("tcp://no-such-host.invalid:7000", is_encrypted=False)
    assert found.detail.startswith("no TCP connection: ")


async def test_a_program_says_nothing() -> None:
    with listening() as server:
        found = await diagnose(at(server), is_encrypted=False)
    assert "accepts TCP connections, but says nothing" in found.detail


async def test_a_program_speaks_another_protocol() -> None:
    with listening() as server:
        obstacles: list[str] = []
        connection = ZmqControl().connect(
            at(server),
            lambda _: None,
            lambda: None,
            on_refused=obstacles.append,
            on_obstacle=lambda detail, _: obstacles.append(detail),
        )
        answered = []
        with closing(connection):

            def answer() -> bool:
                try:
                    answered.append(server.accept()[0])
                except BlockingIOError:
                    return bool(obstacles)
                answered[-1].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                return bool(obstacles)

            await until(answer)
        for one in answered:
            one.close()
    assert "an HTTP server, which does not speak ZMTP: it answers b'HTTP/1.1 400" in obstacles[0]


@pytest.mark.parametrize("server", HTTP_SERVERS)
async def test_a_connection_to_an_http_server_is_no_refusal(server: str) -> None:
    refusals: list[str] = []
    obstacles: list[str] = []
    async with HTTP_SERVERS[server]() as address:
        connection = ZmqControl().connect(
            address,
            lambda _: None,
            lambda: None,
            on_refused=refusals.append,
            on_obstacle=lambda detail, _: obstacles.append(detail),
        )
        with closing(connection):
            await until(lambda: any("it is an HTTP server" in detail for detail in obstacles))
    assert not refusals


@pytest.mark.parametrize("listener_has_keys", [True, False])
async def test_one_end_has_keys_and_the_other_has_none(*, listener_has_keys: bool) -> None:
    trust: Trust = new_trust() if listener_has_keys else PLAIN
    with closing(ZmqControl().listen("tcp://127.0.0.1:0", None, lambda *_: None, trust=trust)) as listener:
        found = await diagnose(listener.endpoint, is_encrypted=not listener_has_keys)
        assert found.is_refusal
        assert ("requires a key" in found.detail) is listener_has_keys
        same = await diagnose(listener.endpoint, is_encrypted=listener_has_keys)
        assert (same.is_refusal, "speaks ZMTP" in same.detail) == (False, True)


async def test_this_process_has_no_descriptors_left() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with listening() as server:
        resource.setrlimit(resource.RLIMIT_NOFILE, (os.dup(0), hard))  # the lowest free number is beyond the limit
        try:
            found = await diagnose(at(server), is_encrypted=False)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert errno.errorcode[errno.EMFILE] in found.detail
    assert "RLIMIT_NOFILE" in found.detail


async def test_a_connection_that_is_made_at_last_has_no_obstacle_any_more() -> None:
    port = unused_port()
    obstacles: list[str] = []
    connection = ZmqControl().connect(
        f"tcp://127.0.0.1:{port}", lambda _: None, lambda: None, on_obstacle=lambda detail, _: obstacles.append(detail)
    )
    with closing(connection):
        await until(lambda: obstacles)
        with closing(ZmqControl().listen(f"tcp://127.0.0.1:{port}", None, lambda *_: None)):
            await until(lambda: len(obstacles) == 2)
    assert obstacles[0].startswith("connection refused")
    assert obstacles[1] == ""
