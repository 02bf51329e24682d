"""Probes of a port: only a refusal proves that no process listens."""

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import anyio
import pytest

from kvflow import addresses
from kvflow.control.channel import ZmqControl
from kvflow.errors import ConfigError
from tests.control.ends import LOCAL, Server
from tests.support.machine import has_ipv6
from tests.support.ports import unused_port

pytestmark = pytest.mark.anyio

ANSWERS_S = 5.0
"""Time limit for a host that answers; no test waits this long."""


is_refused = ZmqControl().is_refused

needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")


@contextmanager
def listening(host: str = "127.0.0.1", family: int = socket.AF_INET, backlog: int = 16) -> Iterator[int]:
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen(backlog)
        port: int = listener.getsockname()[1]
        yield port


@contextmanager
def full(port: int) -> Iterator[None]:
    """Fill the accept queue of a port: the host then no longer answers, like one that is cut off."""
    waiting: list[socket.socket] = []
    try:
        while True:
            line = socket.socket()
            waiting.append(line)
            line.settimeout(0.2)
            line.connect(("127.0.0.1", port))
    except TimeoutError:
        yield
    finally:
        for line in waiting:
            line.close()


async def test_a_port_without_a_listener_is_refused() -> None:
    assert await is_refused(f"tcp://127.0.0.1:{unused_port()}", ANSWERS_S)


async def test_a_port_that_was_closed_just_now_is_refused() -> None:
    with listening() as port:
        assert not await is_refused(f"tcp://127.0.0.1:{port}", ANSWERS_S)
    assert await is_refused(f"tcp://127.0.0.1:{port}", ANSWERS_S)


async def test_a_bound_port_on_which_nobody_listens_is_refused(free_port: int) -> None:
    assert await is_refused(f"tcp://127.0.0.1:{free_port}", ANSWERS_S)


async def test_a_control_socket_is_not_refused_and_works_on() -> None:
    with closing(Server(LOCAL)) as server:
        for _ in range(3):
            assert not await is_refused(server.endpoint, ANSWERS_S)


async def test_a_process_that_accepts_nothing_is_not_refused() -> None:
    """A stopped process looks like this: its host still completes connections."""
    with listening() as port:
        assert not await is_refused(f"tcp://127.0.0.1:{port}", ANSWERS_S)


async def test_silence_says_nothing() -> None:
    with listening(backlog=0) as port, full(port):
        assert not await is_refused(f"tcp://127.0.0.1:{port}", 0.1)


@needs_ipv6
async def test_addresses_of_both_kinds() -> None:
    with listening("::1", socket.AF_INET6) as port:
        assert not await is_refused(f"tcp://[::1]:{port}", ANSWERS_S)
    assert await is_refused(f"tcp://[::1]:{port}", ANSWERS_S)


@needs_ipv6
async def test_a_name_is_refused_only_if_every_address_of_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def both(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        ends = [(socket.AF_INET6, ("::1", port)), (socket.AF_INET, ("127.0.0.1", port))]
        return [(family, socket.SOCK_STREAM, 6, "", address) for family, address in ends]

    monkeypatch.setattr("anyio._core._sockets.getaddrinfo", both)
    with listening("::1", socket.AF_INET6) as port:
        assert not await is_refused(f"tcp://prefill-host:{port}", ANSWERS_S)
    assert await is_refused(f"tcp://prefill-host:{port}", ANSWERS_S)


@pytest.mark.parametrize("serving", ["127.0.0.1", "127.0.0.2", "127.0.0.3"])
async def test_several_hosts_are_refused_only_if_each_of_them_is(serving: str) -> None:
    with listening(serving) as port:
        assert not await is_refused(f"tcp://127.0.0.1,127.0.0.2,127.0.0.3:{port}", ANSWERS_S)
    assert await is_refused(f"tcp://127.0.0.1,127.0.0.2,127.0.0.3:{port}", ANSWERS_S)


async def test_several_hosts_of_which_one_is_silent_or_unknown_are_not_refused() -> None:
    with listening(backlog=0) as port, full(port):
        assert not await is_refused(f"tcp://127.0.0.2,127.0.0.1:{port}", 0.2)
    assert not await is_refused(f"tcp://127.0.0.1,nobody.invalid:{port}", ANSWERS_S)


@needs_ipv6
async def test_several_hosts_of_both_kinds() -> None:
    with listening("::1", socket.AF_INET6) as port:
        assert not await is_refused(f"tcp://127.0.0.1,[::1]:{port}", ANSWERS_S)
    assert await is_refused(f"tcp://127.0.0.1,[::1]:{port}", ANSWERS_S)


async def test_a_host_that_has_no_address_is_not_refused() -> None:
    assert not await is_refused("tcp://nobody.invalid:7100", ANSWERS_S)


@pytest.mark.parametrize("host", ["-", "a" * 64, "a" * 300, "x..y", "xn--a", "255.255.255.255", "[fe80::1%nosuch]"])
async def test_a_host_that_none_can_be_is_not_refused(host: str) -> None:
    assert not await is_refused(f"tcp://{host}:1", ANSWERS_S)


async def test_a_zone_that_is_too_long_is_not_even_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises a UnicodeError for it, in a group. Addresses come from peers, and must not break a rank."""
    with pytest.raises(ConfigError):
        await is_refused(f"tcp://[fe80::1%{'a' * 64}]:1", ANSWERS_S)
    monkeypatch.setattr(addresses, "MAX_ZONE", 64)
    assert not await is_refused(f"tcp://[fe80::1%{'b' * 64}]:1", ANSWERS_S)  # what is known of the other one is kept


async def test_an_address_that_cannot_be_reached_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise OSError("all connection attempts failed") from OSError("no route to host")

    monkeypatch.setattr(anyio, "connect_tcp", fail)
    assert not await is_refused("tcp://127.0.0.1:7100", ANSWERS_S)
