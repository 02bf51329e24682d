"""Where the sockets of ranks are, and how a stale one is told from a living one.

A socket is in a directory that only its user, or root, can write to. It has its final name only while somebody listens
on it, so one that refuses connections belongs to a process that has ended.
"""

import os
import socket
import stat
import tempfile
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["ENDING", "choose_directory", "list_directories", "list_sockets", "remove_stale_sockets"]

ENDING: Final = ".sock"
NAME: Final = "kvflow"

MAX_SOCKETS: Final = 1_024
"""Maximum number of sockets that are looked at in a directory."""


def choose_directory(setting: str | os.PathLike[str] | None) -> Path:
    """Return the directory for this process's sockets, and create it if it does not exist.

    Args:
        setting: A directory; by default, the first that can be used of `$XDG_RUNTIME_DIR/kvflow`, `/run/kvflow` and
            `kvflow-UID` in the directory for temporary files.

    Raises:
        OSError: It cannot be created or written to, or others could replace what is in it.
    """
    if setting is not None:
        return _prepare(Path(setting).resolve())
    *places, last = _own_places()
    for place in places:
        with suppress(OSError):
            return _prepare(place)
    return _prepare(last)


def _own_places() -> list[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    own = [Path(runtime, NAME)] if runtime.startswith("/") else []
    return [*own, Path("/run", NAME), Path(tempfile.gettempdir(), f"{NAME}-{os.geteuid()}")]


def _prepare(place: Path) -> Path:
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{place} is not a directory")
    if found.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{place} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
        raise PermissionError(f"other users can write to {place}")
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(f"this user cannot write to {place}")
    return place


def list_directories() -> list[Path]:
    """Return the directories in which ranks may have sockets that this user can use; for root, those of all users."""
    places = [*_own_places(), Path("/run/user", str(os.geteuid()), NAME)]
    if os.geteuid() == 0:
        places += sorted(Path("/run/user").glob(f"*/{NAME}"))
        places += sorted(Path(tempfile.gettempdir()).glob(f"{NAME}-[0-9]*"))
    return list(dict.fromkeys(places))


def list_sockets(directory: Path) -> list[Path]:
    """Return the sockets in a directory that belong to this user or root; for root, to anybody."""
    try:
        with os.scandir(directory) as entries:
            found = [Path(entry.path) for entry in entries if _is_socket(entry)]
    except OSError:
        return []
    return sorted(found)[:MAX_SOCKETS]


def _is_socket(entry: "os.DirEntry[str]") -> bool:
    if entry.name.startswith(".") or not entry.name.endswith(ENDING):
        return False
    try:
        found = entry.stat(follow_symlinks=False)
    except OSError:  # it was removed
        return False
    is_trusted = os.geteuid() == 0 or found.st_uid in (os.geteuid(), 0)
    return is_trusted and stat.S_ISSOCK(found.st_mode)


def remove_stale_sockets(directory: Path, living: Container[Path] = ()) -> None:
    """Remove the sockets in a directory on which nobody listens any more, without asking those known to be `living`."""
    for path in list_sockets(directory):
        if path not in living and _is_stale(path):
            with suppress(OSError):  # somebody else has removed it, or it belongs to another user
                path.unlink()


def _is_stale(path: Path) -> bool:
    """Return whether nobody listens on a socket; False if that is not certain."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # BlockingIOError: its queue is full
            return False
    return False
