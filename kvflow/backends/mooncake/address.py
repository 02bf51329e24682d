"""How a Mooncake endpoint is found, and how it is known again."""

import secrets
import threading
from collections import deque
from typing import Annotated, Final

import msgspec
import numpy as np

from kvflow.errors import BackendError

__all__ = ["LIFE_BYTES", "EndpointAddress", "LifeCell"]

LIFE_BYTES: Final = 16
NUM_SLOTS: Final = 256

Word = Annotated[int, msgspec.Meta(ge=0)]
Life = Annotated[bytes, msgspec.Meta(min_length=LIFE_BYTES, max_length=LIFE_BYTES)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class EndpointAddress(msgspec.Struct, frozen=True):
    """Mooncake's part of a peer's metadata.

    Attributes:
        agent: The peer's agent name.
        protocol: "tcp" or "rdma".
        session: What Mooncake calls the segment name. With P2PHANDSHAKE it is `host:port`, which does not name a
            process: another one may listen there by now.
        life: What stands at `life_address` for as long as this endpoint lives, and in no other process.
        life_address: Address of `life` in the peer's memory; 0 if it cannot be read.
    """

    agent: str
    protocol: str
    session: Name
    life: Life
    life_address: Word

    def pack(self) -> bytes:
        """Give the bytes that go into the metadata."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, data: bytes, *, agent: str, protocol: str) -> "EndpointAddress":
        """Read a peer's address.

        Raises:
            BackendError: Malformed, of another agent, or of another protocol.
        """
        try:
            address = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BackendError("peer metadata is malformed", detail=str(error)) from error
        if address.agent != agent:
            raise BackendError("peer's metadata belongs to another agent", peer=agent, agent=address.agent)
        if address.protocol != protocol:
            raise BackendError("peer uses another protocol", mine=protocol, theirs=address.protocol)
        return address


class LifeCell:
    """A few bytes that peers read to see who is there, and room for what is read of theirs.

    Callable from any thread. A read that fails may still land late, so its place is the last to be used again.
    """

    def __init__(self) -> None:
        self._memory = np.zeros((NUM_SLOTS, LIFE_BYTES), np.uint8)
        self.life = secrets.token_bytes(LIFE_BYTES)
        self._memory[0] = np.frombuffer(self.life, np.uint8)
        self._free = deque(range(1, NUM_SLOTS))
        self._lock = threading.Lock()
        self.address = int(self._memory.ctypes.data)
        self.num_bytes = int(self._memory.nbytes)

    def take_slot(self) -> int:
        """Give the address of `LIFE_BYTES` bytes to read into.

        Raises:
            BackendError: All are in use.
        """
        with self._lock:
            if not self._free:
                raise BackendError("too many peers are being connected at once", at_once=NUM_SLOTS - 1)
            return self.address + LIFE_BYTES * self._free.popleft()

    def give_back(self, slot: int) -> bytes:
        """Give the slot back, and what was read into it."""
        index = (slot - self.address) // LIFE_BYTES
        found = bytes(self._memory[index])
        with self._lock:
            self._memory[index] = 0
            self._free.append(index)
        return found
