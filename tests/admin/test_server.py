"""The socket of a rank, and clients that behave as badly as they can."""

import os
import socket
import stat
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import pytest

from kvflow.admin import places, server
from kvflow.admin.messages import MAX_REQUEST_BYTES
from kvflow.admin.server import MAX_CLIENTS, AdminSocket
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

NOBODY: Final = 65_534
MANY: Final = 1_000
LONG: Final = b"x" * 2**21 + b"\n"


def echo(line: bytes) -> bytes:
    return LONG if line == b"long" else b"<" + line + b">\n"


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@asynccontextmanager
async def opened(directory: Path, answer: Callable[[bytes], bytes] = echo) -> AsyncIterator[AdminSocket]:
    admin = AdminSocket(directory, "name", answer)
    try:
        yield admin
    finally:
        admin.close()


@contextmanager
def connected(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.settimeout(30.0)
        yield client


def read_all(client: socket.socket) -> bytes:
    received = b""
    try:
        while part := client.recv(65_536):
            received += part
    except ConnectionResetError:  # it has left what was sent unread
        pass
    return received


def talk(path: Path, *parts: bytes) -> bytes:
    with connected(path) as client:
        for part in parts:
            client.sendall(part)
        return read_all(client)


async def ask(path: Path, *parts: bytes) -> bytes:
    return await anyio.to_thread.run_sync(talk, path, *parts)


async def test_each_connection_gets_the_answer_to_its_first_line(tmp_path: Path) -> None:
    async with opened(tmp_path) as admin:
        assert await ask(admin.path, b"one\n") == b"<one>\n"
        assert await ask(admin.path, b"o", b"ne", b"\n") == b"<one>\n"
        assert await ask(admin.path, b"one\ntwo\nthree") == b"<one>\n"
        assert await ask(admin.path, b"long\n") == LONG
    assert names_in(tmp_path) == set()


async def test_only_its_user_can_open_it(tmp_path: Path) -> None:
    place = tmp_path / "made"
    previous = os.umask(0)  # the most that files may ever be open to others
    try:
        async with opened(place) as admin:
            assert stat.S_IMODE(place.stat().st_mode) == 0o700
            assert stat.S_IMODE(admin.path.stat().st_mode) == 0o600
    finally:
        os.umask(previous)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
async def test_another_user_cannot_connect() -> None:
    place = Path("/run") / f"kvflow-test-{os.getpid()}"
    try:
        async with opened(place) as admin:
            place.chmod(0o711)  # so that only the mode of the socket protects it
            assert in_child(lambda: connect_as(NOBODY, admin.path)) == "PermissionError"
            assert in_child(lambda: connect_as(0, admin.path)) == "connected"
    finally:
        place.rmdir()


def connect_as(user: int, path: Path) -> str:
    """Connect in a child with another user."""
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    socket.socket(socket.AF_UNIX).connect(str(path))
    return "connected"


async def test_lines_that_are_half_or_too_long_do_no_harm(tmp_path: Path) -> None:
    asked: list[bytes] = []

    def note(line: bytes) -> bytes:
        asked.append(line)
        return b"noted\n"

    async with opened(tmp_path, note) as admin:
        with connected(admin.path) as client:
            client.sendall(b"half")
        too_long = b"x" * (MAX_REQUEST_BYTES + 1)
        assert await ask(admin.path, too_long) == server.TOO_LONG
        assert await ask(admin.path, too_long + b"\n") == server.TOO_LONG
        assert asked == []
        assert await ask(admin.path, b"x" * MAX_REQUEST_BYTES + b"\n") == b"noted\n"


async def test_a_thousand_connections_take_sixteen_places_and_leave_the_loop_running(tmp_path: Path) -> None:
    async with opened(tmp_path) as admin:
        with ExitStack() as stack:

            def connect() -> list[socket.socket]:
                return [stack.enter_context(connected(admin.path)) for _ in range(MANY)]

            clients = await anyio.to_thread.run_sync(connect)
            assert len(admin._clients) == MAX_CLIENTS
            refused = await anyio.to_thread.run_sync(lambda: [read_all(client) for client in clients[MAX_CLIENTS:]])
            assert set(refused) == {b""}
            clients[0].sendall(b"one\n")
            assert await anyio.to_thread.run_sync(read_all, clients[0]) == b"<one>\n"
        await until(lambda: not admin._clients)
        assert await ask(admin.path, b"one\n") == b"<one>\n"


async def test_a_client_that_says_nothing_or_does_not_read_loses_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CLIENT_S", 0.05)
    async with opened(tmp_path) as admin:
        with connected(admin.path) as silent, connected(admin.path) as reader:
            reader.sendall(b"long\n")
            await until(lambda: len(admin._clients) == 2)
            await until(lambda: not admin._clients)
            assert read_all(silent) == b""
            assert len(read_all(reader)) < len(LONG)


async def test_a_process_without_descriptors_accepts_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "RETRY_S", 0.0)
    async with opened(tmp_path) as admin:
        refusals = [OSError(24, "Too many open files")] * 3
        listener = admin._listener

        class Short:
            def accept(self) -> tuple[socket.socket, object]:
                if refusals:
                    raise refusals.pop()
                return listener.accept()

            def fileno(self) -> int:
                return listener.fileno()

            close = listener.close

        admin._loop.remove_reader(listener)
        admin._listener = Short()  # type: ignore[assignment]
        admin._loop.add_reader(admin._listener, admin._accept)
        assert await ask(admin.path, b"one\n") == b"<one>\n"
        assert not refusals


async def test_an_answer_that_fails_ends_its_connection_alone(tmp_path: Path) -> None:
    reported: list[object] = []

    def answer(line: bytes) -> bytes:
        if line == b"bad":
            raise RuntimeError("a bug")
        return echo(line)

    async with opened(tmp_path, answer) as admin:
        admin._loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
        assert await ask(admin.path, b"bad\n") == b""
        assert await ask(admin.path, b"good\n") == b"<good>\n"
        admin._loop.set_exception_handler(None)
    assert [str(error) for error in reported] == ["a bug"]


async def test_sockets_of_dead_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys\n"
        "from kvflow.admin.server import AdminSocket\n"
        "async def main(): AdminSocket(sys.argv[1], 'dead', bytes)\n"
        "asyncio.run(main())\n"
    )
    await anyio.run_process([sys.executable, "-W", "ignore", "-c", script, str(tmp_path)])
    (dead,) = names_in(tmp_path)
    (tmp_path / "file.sock").write_text("not a socket")
    with socket.socket(socket.AF_UNIX) as unready:  # bound, not yet listening, as between the two calls
        unready.bind(str(tmp_path / ".1-unready.sock"))
        async with opened(tmp_path) as first:
            assert dead not in names_in(tmp_path)
            second = AdminSocket(tmp_path, "second", echo)
            second.close()
            assert names_in(tmp_path) == {first.path.name, "file.sock", ".1-unready.sock"}


async def test_sockets_of_the_same_process_are_not_asked(tmp_path: Path) -> None:
    """To accept takes a descriptor, which a first contact may need."""
    async with opened(tmp_path) as first:
        second = AdminSocket(tmp_path, "second", echo)
        with pytest.raises(BlockingIOError):
            first._listener.accept()
        second.close()


async def test_a_forked_child_holds_no_copy_of_the_socket_and_does_not_remove_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as admin:
        assert in_child(lambda: close_in_child(admin)) == "-1"
        assert await ask(admin.path, b"one\n") == b"<one>\n"


def close_in_child(admin: AdminSocket) -> str:
    admin.close()
    return str(admin._listener.fileno())


def in_child(function: Callable[[], str]) -> str:
    """Return what a function returns in a forked child, or the name of the OSError that it raises."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(write, function().encode())
        except OSError as error:
            os.write(write, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    result = os.read(read, 100).decode()
    os.close(read)
    os.close(write)
    return result


def test_the_first_directory_that_is_safe_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, shared, last = tmp_path / "file", tmp_path / "shared", tmp_path / "last"
    file.write_text("")
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr(places, "_own_places", lambda: [tmp_path / "missing/kvflow", file, shared, last])
    assert places.choose_directory(None) == last
    for place, problem in ((shared, "other users can write"), (file, "not a directory")):
        with pytest.raises(OSError, match=problem):
            places.choose_directory(place)
    shared.chmod(0o1777)
    assert places.choose_directory(shared) == shared


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match="belongs to another user"):
        places.choose_directory(tmp_path)
    assert places.list_sockets(tmp_path) == []


def test_the_directory_of_the_session_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert places.choose_directory(None) == tmp_path / "kvflow"
    assert places.list_directories()[0] == tmp_path / "kvflow"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")  # which the specification says to ignore
    assert str(places.list_directories()[0]).startswith("/run/")
