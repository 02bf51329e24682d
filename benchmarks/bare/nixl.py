"""NIXL without kvflow: a similar agent, with descriptor lists prepared when it connects to its peer."""

import struct
import time
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from benchmarks.bare.endpoint import BareEndpoint
from benchmarks.bare.natives import CLOSING_ROUNDS, start_nixl
from benchmarks.pair.loads import Tables
from benchmarks.pools import PagePool

__all__ = ["BareNixl"]

ROOM: Final = struct.Struct("<Q")

CLOSING_PAUSE_S: Final = 1e-3

Words = NDArray[np.uint64]
Indices = NDArray[np.int32]


class _Address(msgspec.Struct):
    agent: bytes
    pool: int


class _Work(NamedTuple):
    """Indices into the prepared lists, int32[tensors * pages]."""

    src: Indices
    dst: Indices


class BareNixl(BareEndpoint):
    """A NIXL agent with UCX, configured like kvflow's own.

    Args:
        name: Name of the agent.
        pool: Memory to write from or to.
    """

    def __init__(self, name: str, pool: PagePool) -> None:
        self._pool = pool
        self._agent: Any = start_nixl(name)
        self._address, (self._kind, self._device) = pool.place.native
        rows = [(self._address, pool.range.length, self._device, "")]
        self._registered = self._agent.register_memory(rows, self._kind)

    @override
    def address(self) -> bytes:
        return msgspec.msgpack.encode(_Address(bytes(self._agent.get_agent_metadata()), self._address))

    @override
    def connect(self, address: bytes) -> None:
        theirs = msgspec.msgpack.decode(address, type=_Address)
        name = self._agent.add_remote_agent(theirs.agent)
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._src = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._strided(self._address), self._kind)
        self._dst = self._agent.prep_xfer_dlist(self._peer, self._strided(theirs.pool), self._kind)

    @override
    def prepare(self, tables: Tables) -> _Work:
        firsts = np.arange(self._pool.shape.num_tensors) * self._pool.num_pages
        src, dst = (np.add.outer(firsts, pages).astype(np.int32).ravel() for pages in tables)
        return _Work(src, dst)

    @override
    def start(self, work: _Work, room: int) -> Any:
        handle = self._agent.make_prepped_xfer("WRITE", self._src, work.src, self._dst, work.dst, ROOM.pack(room))
        self._agent.transfer(handle)
        return handle

    @override
    def is_done(self, started: Any) -> bool:
        if self._agent.check_xfer_state(started) != "DONE":
            return False
        self._agent.release_xfer_handle(started)
        return True

    @override
    def announce(self, room: int) -> None:
        self._agent.send_notif(self._peer, ROOM.pack(room))

    @override
    def poll(self) -> list[int]:
        notices = self._agent.get_new_notifs()
        return [int(ROOM.unpack(notice)[0]) for payloads in notices.values() for notice in payloads]

    @override
    def close(self) -> None:
        self._agent.release_dlist_handle(self._src)
        self._agent.release_dlist_handle(self._dst)
        self._agent.remove_remote_agent(self._peer)
        for _ in range(CLOSING_ROUNDS):
            self._agent.get_new_notifs()
            time.sleep(CLOSING_PAUSE_S)
        self._agent.deregister_memory(self._registered)
        self._agent = None

    def _strided(self, base: int) -> Words:
        """Return one run of pages for each tensor: (address, length, device, stride, count)."""
        size, count, step = self._pool.shape.page_bytes, self._pool.num_pages, self._pool.tensor_bytes
        rows = [
            (base + number * step, size, self._device, size, count) for number in range(self._pool.shape.num_tensors)
        ]
        return np.array(rows, np.uint64)
