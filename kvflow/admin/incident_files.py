"""Where files about incidents are, and how one is written. Only their owner can read them; old ones are removed."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["ENDING", "MAX_FILES", "find_directory", "save_incident"]

ENDING: Final = ".kvflow"

MAX_FILES: Final = 32
MAX_BYTES: Final = 256 * 2**20
"""Maximum size of all files in a directory together; the oldest are removed first."""


def find_directory(setting: str | os.PathLike[str] | None) -> Path:
    """Return the directory for files about incidents, which need not exist.

    Args:
        setting: A directory; by default, `kvflow/incidents` in `$XDG_STATE_HOME`, or in `~/.local/state`.

    Raises:
        OSError: There is no default, because this user has no home directory.
    """
    if setting is not None:
        return Path(setting)
    state = os.environ.get("XDG_STATE_HOME", "")
    if state.startswith("/"):
        return Path(state, "kvflow", "incidents")
    try:
        return Path.home() / ".local" / "state" / "kvflow" / "incidents"
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from error


def save_incident(path: Path, frames: Iterable[bytes]) -> None:
    """Write a file that appears under its name once it is complete, and remove old ones of its directory.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    before = path.with_name(f".{path.name}")
    descriptor = os.open(before, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for frame in frames:
                file.write(frame)
                file.flush()  # lets other threads run, which the frames may come faster than
        before.rename(path)
    except BaseException:
        with suppress(OSError):
            before.unlink()
        raise
    _remove_old(path.parent)


def _remove_old(directory: Path) -> None:
    """Keep the newest files, as many as are allowed, but at least one. Others may do the same at this time."""
    found = []
    for path in directory.glob(f"*{ENDING}"):
        with suppress(OSError):
            status = path.lstat()
            found.append((status.st_mtime_ns, status.st_size, path))
    left = MAX_BYTES
    for number, (_, size, path) in enumerate(sorted(found, reverse=True)):
        left -= size
        if number and (number >= MAX_FILES or left < 0):
            with suppress(OSError):
                path.unlink()
