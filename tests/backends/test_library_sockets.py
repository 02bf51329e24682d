"""The connections of a library, found through its epoll instances."""

import asyncio
import ctypes
import os
import select
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

from kvflow.backends.library_sockets import LibrarySockets, find_epolls

EPOLL_CTL_ADD: Final = 1


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


def register_as_library(epoll: select.epoll, watched: socket.socket) -> None:
    """Register a socket as a library in C does: under a pointer, not under its number."""
    event = struct.pack("=IQ", select.EPOLLIN, id(watched))
    assert ctypes.CDLL(None).epoll_ctl(epoll.fileno(), EPOLL_CTL_ADD, watched.fileno(), event) == 0


def inodes(*sockets: socket.socket) -> list[int]:
    return [os.fstat(it.fileno()).st_ino for it in sockets]


def test_only_epolls_for_the_sockets_of_a_library_are_found() -> None:
    """Not the one of the library's thread, those of other threads' event loops, or empty ones that nobody watches."""
    with ExitStack() as stack:
        one, _ = (stack.enter_context(it) for it in socket.socketpair())

        def make() -> None:
            empty, filled, thread, _ = [stack.enter_context(select.epoll()) for _ in range(4)]
            register_as_library(filled, one)
            thread.register(empty)
            stack.callback(asyncio.new_event_loop().close)

        _, found = find_epolls(make)
        for fd in found:
            stack.callback(os.close, fd)
        assert [list(LibrarySockets([fd]).listed()) for fd in found] == [[], inodes(one)]


def test_two_threads_do_not_find_each_others_epolls() -> None:
    """Neither the instances, nor the duplicates that the other one makes."""
    with ExitStack() as stack:
        ready = threading.Semaphore(0)

        def make() -> socket.socket:
            own, _ = (stack.enter_context(it) for it in socket.socketpair())
            register_as_library(stack.enter_context(select.epoll()), own)
            ready.acquire(timeout=0.01)  # another thread has its turn
            return own

        with ThreadPoolExecutor(4) as threads:
            made = list(threads.map(lambda _: find_epolls(make), range(8)))
        for own, found in made:
            for fd in found:
                stack.callback(os.close, fd)
            assert [list(LibrarySockets([fd]).listed()) for fd in found] == [inodes(own)]
