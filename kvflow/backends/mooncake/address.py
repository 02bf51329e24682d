"""Addresses of Mooncake endpoints, and how peers distinguish endpoints that share an address."""

import secrets
import threading
from collections import deque
from typing import Annotated, Final

import msgspec
import numpy as np

from kvflow.errors import BackendError

__all__ = ["CELL_BYTES", "INCARNATION_BYTES", "EndpointAddress", "IncarnationCell", "host_of"]

INCARNATION_BYTES: Final = 16
NUM_SLOTS: Final = 256
CELL_BYTES: Final = NUM_SLOTS * INCARNATION_BYTES

Word = Annotated[int, msgspec.Meta(ge=0)]
Incarnation = Annotated[bytes, msgspec.Meta(min_length=INCARNATION_BYTES, max_length=INCARNATION_BYTES)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class EndpointAddress(msgspec.Struct, frozen=True):
    """Mooncake's part of a peer's metadata.

    Attributes:
        agent: The peer's agent name.
        protocol: "tcp" or "rdma".
        session: Mooncake's segment name. With P2PHANDSHAKE it is `host:port`, which does not identify a process:
            another one may listen there by now.
        incarnation: Random bytes stored at `incarnation_address` while this endpoint is open, and nowhere else.
        incarnation_address: Their address in the peer's memory; 0 if they cannot be read.
    """

    agent: str
    protocol: str
    session: Name
    incarnation: Incarnation
    incarnation_address: Word

    def pack(self) -> bytes:
        """Encode the address for the metadata."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, data: bytes, *, agent: str, protocol: str) -> "EndpointAddress":
        """Decode a peer's address; raise BackendError if it is malformed, or of another agent or protocol."""
        try:
            address = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BackendError("peer metadata is malformed", detail=str(error)) from error
        if address.agent != agent:
            raise BackendError("peer's metadata belongs to another agent", peer=agent, agent=address.agent)
        if address.protocol != protocol:
            raise BackendError("peer uses a different protocol", mine=protocol, theirs=address.protocol)
        return address


class IncarnationCell:
    """Memory with the incarnation that peers read to identify this process, and slots to read theirs into.

    Can be used from any thread. A failed read may still land late, so its slot is the last to be reused.
    """

    def __init__(self) -> None:
        self._memory = np.zeros((NUM_SLOTS, INCARNATION_BYTES), np.uint8)
        self.incarnation = secrets.token_bytes(INCARNATION_BYTES)
        self._memory[0] = np.frombuffer(self.incarnation, np.uint8)
        self._free = deque(range(1, NUM_SLOTS))
        self._lock = threading.Lock()
        self.address = int(self._memory.ctypes.data)
        self.num_bytes = int(self._memory.nbytes)

    def take_slot(self) -> int:
        """Reserve `INCARNATION_BYTES` bytes to read into, and return their address; raise BackendError if all are."""
        with self._lock:
            if not self._free:
                raise BackendError("too many peers are connecting at the same time", at_once=NUM_SLOTS - 1)
            return self.address + INCARNATION_BYTES * self._free.popleft()

    def give_back(self, slot: int) -> bytes:
        """Release a slot, and return the bytes that were read into it."""
        index = (slot - self.address) // INCARNATION_BYTES
        found = bytes(self._memory[index])
        with self._lock:
            self._memory[index] = 0
            self._free.append(index)
        return found


def host_of(session: str) -> str:
    """Return the host in a session."""
    return session.rpartition(":")[0]
