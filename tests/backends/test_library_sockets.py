"""The connections of a library, found through its epoll instances."""

import select
import socket

from kvflow.backends.library_sockets import LibrarySockets


def end(of: tuple[str, int]) -> bytes:
    return socket.inet_aton(of[0]) + of[1].to_bytes(2, "big")


def test_ends_are_those_of_established_connections_with_one_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.2", 0)) as other:
        opened = socket.create_connection(listener.getsockname())
        elsewhere = socket.create_connection(other.getsockname())
        accepted, _ = listener.accept()
        with select.epoll() as epoll, opened, elsewhere, accepted:
            for watched in (listener, opened, elsewhere, accepted):
                epoll.register(watched.fileno())
            found = LibrarySockets((epoll.fileno(),))
            assert found.close_silent() == []
            ends = {end(opened.getsockname()), end(accepted.getsockname())}
            assert set(found.ends_at("127.0.0.1")) == ends
            assert set(found.ends_at("a-name")) == ends | {end(elsewhere.getsockname())}
            found.abort_to("127.0.0.1")
            assert end(opened.getsockname()) not in found.ends_at("127.0.0.1"), "it was aborted"
            assert found.ends_at("127.0.0.2") == (end(elsewhere.getsockname()),)


def test_a_listener_is_not_shut_down_with_the_connections_to_a_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, select.epoll() as epoll:
        epoll.register(listener.fileno())
        LibrarySockets((epoll.fileno(),)).abort_to("a-name")
        socket.create_connection(listener.getsockname()).close()
