"""Mooncake without kvflow: submits and polls each descriptor in a busy loop.

Its own notices are not usable, so a room's number is written into a cell of the peer's memory after its last byte.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from benchmarks.bare.endpoint import BareEndpoint
from benchmarks.bare.natives import HOST, NativeMooncake
from benchmarks.pair.loads import Tables
from benchmarks.pools import PagePool
from kvflow.errors import BackendError, RegistrationError

__all__ = ["BareMooncake"]

WINDOW: Final = 64
"""Descriptors of one request in flight at once, as many as in kvflow."""

LOOK_AHEAD: Final = 8
"""Running descriptors found before the remaining ones are not polled; they end nearly in order."""

CELLS: Final = 1024
CELL_BYTES: Final = 8

Row = tuple[int, int, int]


class _Address(msgspec.Struct):
    session: str
    pool: int
    cells: int


class _Write:
    """A request in flight: rows to submit, and ids of running transfers."""

    def __init__(self, rows: Sequence[Row], notice: Row) -> None:
        self.rows = deque(rows)
        self.notice: Row | None = notice
        self.running: deque[int] = deque()


class BareMooncake(BareEndpoint):
    """A TransferEngine over TCP, set up as kvflow sets up its own.

    Args:
        pool: Memory to write from or to.

    Raises:
        BackendUnavailable: The library is missing, or no engine could be started.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._mooncake = NativeMooncake()
        self._native: Any = self._mooncake.engine
        self._session = f"{HOST}:{int(self._native.get_rpc_port())}"
        self._cells, self._out, self._seen = (np.zeros(CELLS, np.uint64) for _ in range(3))
        self._address, _ = pool.place.native
        rows = [(self._address, pool.range.length)]
        rows += [(int(cells.ctypes.data), cells.nbytes) for cells in (self._cells, self._out)]
        code = self._native.batch_register_memory(*(list(column) for column in zip(*rows, strict=True)))
        if code != 0:
            raise RegistrationError("Mooncake refused to register memory", code=code)
        self._addresses = [address for address, _ in rows]

    @override
    def address(self) -> bytes:
        return msgspec.msgpack.encode(_Address(self._session, self._address, int(self._cells.ctypes.data)))

    @override
    def connect(self, address: bytes) -> None:
        self._peer = msgspec.msgpack.decode(address, type=_Address)

    @override
    def prepare(self, tables: Tables) -> list[Row]:
        starts, counts = _runs(tables)
        size = self._pool.shape.page_bytes
        here, there = self._address, self._peer.pool
        return [
            (here + first + int(tables.src[at]) * size, there + first + int(tables.dst[at]) * size, int(count) * size)
            for first in range(0, self._pool.range.length, self._pool.tensor_bytes)
            for at, count in zip(starts, counts, strict=True)
        ]

    @override
    def start(self, work: Sequence[Row], room: int) -> _Write:
        write = _Write(work, self._notice(room))
        self._fill(write)
        return write

    @override
    def is_done(self, started: _Write) -> bool:
        running = started.running
        still_running: list[int] = []
        while running and len(still_running) < LOOK_AHEAD:
            transfer_id = running.popleft()
            status = self._native.transfer_check_status(transfer_id)
            if status == 0:
                still_running.append(transfer_id)
            elif status < 0:
                raise BackendError("bare write failed", status=status)
        running.extendleft(reversed(still_running))
        self._fill(started)
        return not started.running

    @override
    def announce(self, room: int) -> None:
        write = _Write((), self._notice(room))
        self._fill(write)
        while not self.is_done(write):
            pass

    @override
    def poll(self) -> list[int]:
        changed = np.flatnonzero(self._cells != self._seen)
        rooms = self._cells[changed]
        self._seen[changed] = rooms
        return [int(room) for room in rooms]

    @override
    def close(self) -> None:
        with self._mooncake.silence():
            self._native.batch_unregister_memory(self._addresses)
            del self._native, self._mooncake.engine

    def _notice(self, room: int) -> Row:
        self._out[room % CELLS] = room
        offset = room % CELLS * CELL_BYTES
        return int(self._out.ctypes.data) + offset, self._peer.cells + offset, CELL_BYTES

    def _fill(self, write: _Write) -> None:
        while write.rows and len(write.running) < WINDOW:
            write.running.append(self._submit(write.rows.popleft()))
        if write.notice is not None and not write.rows and not write.running:
            write.running.append(self._submit(write.notice))
            write.notice = None

    def _submit(self, row: Row) -> int:
        transfer_id: int = self._native.transfer_submit_write(self._peer.session, *row)
        if not transfer_id:
            raise BackendError("bare write was refused", row=row)
        return transfer_id


def _runs(tables: Tables) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the starts and lengths of runs of pages that are consecutive on both sides."""
    joins = (np.diff(tables.src) == 1) & (np.diff(tables.dst) == 1)
    starts = np.append(0, np.flatnonzero(~joins) + 1)
    return starts, np.diff(np.append(starts, len(tables.src)))
