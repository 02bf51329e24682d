"""Asks ranks over their sockets."""

import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

from kvflow.admin.messages import MAX_ANSWER_BYTES, ErrorAnswer, Request
from kvflow.admin.places import ENDING, list_directories, list_sockets

__all__ = ["RankReply", "ask", "ask_all", "find_sockets"]

MAX_AT_ONCE: Final = 32
CHUNK_BYTES: Final = 65_536

AnyAnswer = TypeVar("AnyAnswer", bound=msgspec.Struct)


class RankReply(NamedTuple):
    """What came back from one socket.

    Attributes:
        path: The socket.
        line: The answer as JSON; empty if there is none.
        problem: Why there is none; empty if nobody listens there any more.
    """

    path: Path
    line: bytes
    problem: str

    @property
    def pid(self) -> str:
        """The process that made the socket, as it counts processes."""
        return self.path.name.removesuffix(ENDING).partition("-")[0]

    def parse(self, kind: type[AnyAnswer]) -> AnyAnswer | str:
        """Return the answer, or why there is none of this kind."""
        if not self.line:
            return self.problem or "nobody listens"
        try:
            return msgspec.json.decode(self.line, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return _refusal_in(self.line) or f"the answer is malformed: {error}"


def _refusal_in(line: bytes) -> str:
    try:
        return msgspec.json.decode(line, type=ErrorAnswer).error
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""


def find_sockets(place: str | os.PathLike[str] | None = None) -> list[Path]:
    """Return the sockets of ranks on this host, some of which may be stale.

    Args:
        place: A socket, or a directory of them; by default, all directories that ranks use by themselves.
    """
    if place is None:
        return [path for directory in list_directories() for path in list_sockets(directory)]
    chosen = Path(place)
    return list_sockets(chosen) if chosen.is_dir() else [chosen]


def ask_all(paths: Sequence[Path], request: Request, timeout_s: float) -> list[RankReply]:
    """Send a request to several ranks at the same time."""
    if not paths:
        return []
    with ThreadPoolExecutor(min(len(paths), MAX_AT_ONCE)) as threads:
        return list(threads.map(lambda path: ask(path, request, timeout_s), paths))


def ask(path: Path, request: Request, timeout_s: float) -> RankReply:
    """Send a request to a rank, and wait for the answer, which is at most `MAX_ANSWER_BYTES` long."""
    ends_at = time.monotonic() + timeout_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(msgspec.json.encode(request) + b"\n")
            line = b""
            while b"\n" not in line:
                connection.settimeout(max(ends_at - time.monotonic(), 1e-3))
                received = connection.recv(CHUNK_BYTES)
                if not received:
                    return RankReply(path, b"", "it has closed the connection; too many clients may be connected")
                line += received
                if len(line) > 2 * MAX_ANSWER_BYTES:
                    return RankReply(path, b"", "the answer is too long")
    except (ConnectionRefusedError, FileNotFoundError):
        return RankReply(path, b"", "")
    except TimeoutError:
        return RankReply(path, b"", f"it does not answer within {timeout_s:g} s: stopped, or its event loop is blocked")
    except OSError as error:
        return RankReply(path, b"", error.strerror or str(error))
    return RankReply(path, line.partition(b"\n")[0], "")
