"""What a rank keeps of its last events, and when it writes them to a file, for `kvflow incident`."""

import math
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

import anyio
import msgspec

from kvflow import __version__
from kvflow.admin.incident_files import ENDING, find_directory
from kvflow.config import RankConfig
from kvflow.errors import ConfigError, LocalProtocolError, Shortage
from kvflow.observe.logs import BoundLogger
from kvflow.ports import Ports
from kvflow.room import RoomId
from kvflow.state.recorder import BlackBox, BoxContents, Cause, Header, Veil, encode, frame, make_header
from kvflow.state.settings import DecodeSettings, PrefillSettings
from kvflow.wire.messages import PeerId

__all__ = ["Incidents"]

SETTLE_S: Final = 1.0
"""A file is written this long after something has gone wrong, so that it holds what has followed."""

EVERY_S: Final = 10.0
"""Least time between two files that nobody has asked for."""

MAX_CAUSES: Final = 64
"""Maximum number of causes in a file."""


class Incidents:
    """Keeps the last events of one rank, and writes them to a file once something has gone wrong.

    Args:
        config: Settings of the rank.
        ports: Those of the rank; without `save_incident`, nothing is kept.
        log: Names the files.
        start_task: Starts a task of the rank.
    """

    def __init__(self, config: RankConfig, ports: Ports, log: BoundLogger, start_task: Callable[..., None]) -> None:
        self._config = config
        self._ports = ports
        self._log = log
        self._start_task = start_task
        self._box: BlackBox | None = None
        self._header: Header
        self._causes: list[Cause] = []
        self._is_due = False
        self._last_at = -math.inf
        self._num_files = 0

    @contextmanager
    def open_box(self, me: PeerId, settings: PrefillSettings | DecodeSettings) -> Iterator[BlackBox | None]:
        """Return what keeps the events of a core with these settings, and records them in a file if so configured.

        Raises:
            ConfigError: The file cannot be written.
        """
        is_wanted = self._config.black_box is not False and self._ports.save_incident is not None
        if not is_wanted and self._config.record is None:
            yield None
            return
        self._header = make_header(me, settings, __version__)
        with ExitStack() as stack:
            write = None
            if self._config.record is not None:
                write = _RecordingFile(stack, self._config.record, self._header, self._log).write
            box = BlackBox(write) if is_wanted else BlackBox(write, max_bytes=0)
            self._box = box if is_wanted else None
            yield box

    def note(self, text: str, room: RoomId | None = None, missing: Sequence[str] = ()) -> None:
        """Note that something has gone wrong, and write a file soon, unless one was written just now."""
        if self._box is None:
            return
        self._add_cause(text, room, missing)
        if not self._is_due:
            self._is_due = True
            self._start_task(self._write_later)

    def write_soon(self, text: str, quarantined: Sequence[tuple[RoomId, Sequence[str]]] = ()) -> str:
        """Write a file because somebody has asked for it, and return its path, where it appears once it is complete.

        Raises:
            LocalProtocolError: Nothing is kept, or there is no place for it.
        """
        if self._box is None:
            raise LocalProtocolError("this rank keeps no events: its setting black_box is False")
        self._add_cause(text)
        for room, missing in quarantined:
            self._add_cause("pages in quarantine", room, missing)
        try:
            path = self._next_path()
        except OSError as error:
            raise LocalProtocolError("there is no directory for files about incidents", detail=str(error)) from error
        self._start_task(self._write, path)
        return str(path)

    async def finish(self) -> None:
        """Write what was not written yet, because the rank is closing."""
        if self._causes:
            await self._write()

    def _add_cause(self, text: str, room: RoomId | None = None, missing: Sequence[str] = ()) -> None:
        if len(self._causes) < MAX_CAUSES:
            self._causes.append(Cause(self._ports.now(), text, room, tuple(missing)))

    async def _write_later(self) -> None:
        await anyio.sleep(max(SETTLE_S, self._last_at + EVERY_S - self._ports.now()))
        self._is_due = False
        await self.finish()

    async def _write(self, path: Path | None = None) -> None:
        save, box = self._ports.save_incident, self._box
        if save is None or box is None:
            return
        kept, causes, self._causes, self._last_at = box.kept(), tuple(self._causes), [], self._ports.now()
        num_lasting = None if kept.lasting is None else len(kept.lasting)
        header = msgspec.structs.replace(self._header, first=kept.first, lasting=num_lasting, causes=causes)
        try:
            path = path or self._next_path()
            await self._ports.run_in_thread(partial(save, path, _frames(header, kept)))
        except (OSError, Shortage) as error:
            self._log.warning("incident_unwritten", detail=str(error))
            return
        rooms = list(dict.fromkeys(cause.room for cause in causes if cause.room is not None))
        self._log.info("incident_written", path=str(path), rooms=rooms)

    def _next_path(self) -> Path:
        setting = self._config.black_box
        directory = find_directory(None if isinstance(setting, bool) else setting)
        self._num_files += 1
        return directory / f"{self._header.role}-{self._header.me.incarnation:016x}-{self._num_files:04d}{ENDING}"


def _frames(header: Header, kept: BoxContents) -> Iterator[bytes]:
    veil = Veil()
    yield frame(encode(header))
    for entry in kept.lasting or ():
        yield frame(veil.veil(entry))
    for batch in kept.batches:
        yield b"".join(map(frame, veil.veil_batch(batch)))


class _RecordingFile:
    """Writes every entry to a file. It is unbuffered, so that the recording of a killed process is complete."""

    def __init__(self, stack: ExitStack, path: str | os.PathLike[str], header: Header, log: BoundLogger) -> None:
        self._veil = Veil()
        self._log = log
        try:
            self._file: BinaryIO | None = stack.enter_context(open(path, "wb", 0, opener=_open_for_owner))  # noqa: SIM115 - the stack closes it
            self._put_all(frame(encode(header)))
        except OSError as error:
            raise ConfigError("file cannot be written", record=str(path), detail=str(error)) from error

    def write(self, entry: bytes) -> None:
        """Write an entry without its secrets. If the disk is full, the recording ends, but not the rank."""
        if self._file is None:
            return
        try:
            self._put_all(frame(self._veil.veil(entry)))
        except OSError as error:
            self._file = None
            self._log.error("recording_ended", detail=str(error))

    def _put_all(self, data: bytes) -> None:
        while data and self._file is not None:  # an unbuffered file may take a part
            data = data[self._file.write(data) :]


def _open_for_owner(path: str, flags: int) -> int:
    """Open a file that nobody but its owner may read, even if it already exists."""
    descriptor = os.open(path, flags, 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.fchmod(descriptor, 0o600)
    return descriptor
