"""NIXL without kvflow: an agent of the same kind, with descriptor lists that were prepared when it met its peer."""

import os
import struct
import time
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvflow.backends.nixl import ENGINE_CONFIG, QUIET_ENVIRONMENT
from kvflow.backends.nixl_agent import PARTING_ROUNDS, import_api
from kvflow.cli.bench.bare.endpoint import BareEndpoint
from kvflow.cli.bench.pair.pool import PairPool, Tables

__all__ = ["BareNixl"]

ROOM: Final = struct.Struct("<Q")

PARTING_PAUSE_S: Final = 1e-3

Words = NDArray[np.uint64]
Indices = NDArray[np.int32]


class _Address(msgspec.Struct):
    agent: bytes
    pool: int


class _Paged(NamedTuple):
    """Indices into the prepared lists, int32[tensors * pages]."""

    src: Indices
    dst: Indices


class _Whole(NamedTuple):
    """One descriptor on each side, uint64[1, 3]."""

    src: Words
    dst: Words


class BareNixl(BareEndpoint):
    """A NIXL agent with UCX, set up as kvflow sets up its own.

    Args:
        name: Of the agent.
        pool: Memory to write from or to.
    """

    def __init__(self, name: str, pool: PairPool) -> None:
        for variable, value in QUIET_ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        api = import_api()
        self._pool = pool
        self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        self._agent.create_backend("UCX", {"engine_config": ENGINE_CONFIG})
        self._registered = self._agent.register_memory([(pool.address, pool.bytes.nbytes, 0, "")], "DRAM")

    @override
    def address(self) -> bytes:
        return msgspec.msgpack.encode(_Address(bytes(self._agent.get_agent_metadata()), self._pool.address))

    @override
    def connect(self, address: bytes) -> None:
        theirs = msgspec.msgpack.decode(address, type=_Address)
        name = self._agent.add_remote_agent(theirs.agent)
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._their_pool = theirs.pool
        self._src = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._strided(self._pool.address), "DRAM")
        self._dst = self._agent.prep_xfer_dlist(self._peer, self._strided(theirs.pool), "DRAM")

    @override
    def prepare(self, tables: Tables) -> _Paged:
        firsts = np.arange(self._pool.shape.num_tensors, dtype=np.int32) * np.int32(self._pool.slots)
        src, dst = (np.add.outer(firsts, pages.astype(np.int32)).ravel() for pages in tables)
        return _Paged(src, dst)

    @override
    def prepare_whole(self, start: int, num_bytes: int) -> _Whole:
        bases = (self._pool.address, self._their_pool)
        src, dst = (np.array([(base + start, num_bytes, 0)], np.uint64) for base in bases)
        return _Whole(src, dst)

    @override
    def start(self, work: _Paged | _Whole, room: int) -> Any:
        notice = ROOM.pack(room)
        if isinstance(work, _Paged):
            handle = self._agent.make_prepped_xfer("WRITE", self._src, work.src, self._dst, work.dst, notice)
        else:
            src, dst = (self._agent.get_xfer_descs(rows, "DRAM") for rows in work)
            handle = self._agent.initialize_xfer("WRITE", src, dst, self._peer, notice)
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
        for _ in range(PARTING_ROUNDS):
            self._agent.get_new_notifs()
            time.sleep(PARTING_PAUSE_S)
        self._agent.deregister_memory(self._registered)
        self._agent = None

    def _strided(self, base: int) -> Words:
        """One run of pages for each tensor: (address, length, device, stride, count)."""
        size, slots = self._pool.shape.page_bytes, self._pool.slots
        starts = [base + number * slots * size for number in range(self._pool.shape.num_tensors)]
        return np.array([(start, size, 0, size, slots) for start in starts], np.uint64)
