"""Metadata that backends exchange, and checks of ranges against it.

The libraries crash or write to the wrong place when they get a range that is not registered, so every range is checked
here first, on both sides. A damaged blob makes a peer's name unusable inside NIXL, so metadata has a checksum.
"""

import functools
import zlib

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.errors import BackendError, RegistrationError
from kvflow.geometry.layout import ADDRESS_LIMIT, MemoryKind, MemoryRange

__all__ = ["PeerMetadata", "RegisteredMemory", "check_unregistered"]

Words = NDArray[np.uint64]


class RegisteredMemory(msgspec.Struct, frozen=True, dict=True):
    """Ranges that one side has registered; sorted, disjoint, all of one kind and device."""

    ranges: tuple[MemoryRange, ...]
    memory_kind: MemoryKind
    device_id: int

    def __post_init__(self) -> None:
        """Refuse ranges that would wrap around in native code.

        Raises:
            BackendError: Naming the range.
        """
        end = 0
        for item in self.ranges:
            if item.length <= 0 or item.address < end or item.end > ADDRESS_LIMIT:
                raise BackendError("range of memory is impossible", address=item.address, length=item.length)
            end = item.end

    def check(self, descriptors: Words, *, side: str) -> None:
        """Refuse descriptors that do not lie inside one registered range each.

        Args:
            descriptors: uint64[n, 3], (address, length, device id).
            side: "source", "destination" or "local", for the error.

        Raises:
            BackendError: Naming the first one that does not fit.
        """
        starts, lengths = self._bounds
        address, length, device = descriptors[:, 0], descriptors[:, 1], descriptors[:, 2]
        owner = starts.searchsorted(address, side="right") - 1
        offset, left = address - starts[owner], lengths[owner]
        inside = (offset <= left) & (length - np.uint64(1) < left - offset) & (device == self.device_id)
        if not np.logical_and.reduce(inside):
            first = [int(word) for word in descriptors[np.flatnonzero(~inside)[0]]]
            raise BackendError(
                "range is not registered", side=side, address=hex(first[0]), length=first[1], device=first[2]
            )

    @functools.cached_property
    def _bounds(self) -> tuple[Words, Words]:
        """Starts and lengths of the ranges, behind an empty range at 0 that owns every address before the first one."""
        starts = np.array([0, *(memory.address for memory in self.ranges)], np.uint64)
        return starts, np.array([0, *(memory.length for memory in self.ranges)], np.uint64)


class PeerMetadata(msgspec.Struct, frozen=True):
    """What a peer needs to write here.

    Attributes:
        agent: The library's own blob, opaque.
        memory: What is registered.
    """

    backend: str
    agent: bytes
    memory: RegisteredMemory

    def pack(self) -> bytes:
        """Encode the metadata for the handshake."""
        body = msgspec.msgpack.encode(self)
        return zlib.crc32(body).to_bytes(4, "little") + body

    @classmethod
    def unpack(cls, data: bytes, *, backend: str) -> "PeerMetadata":
        """Read a peer's metadata.

        Raises:
            BackendError: Damaged, or of another transport.
        """
        if zlib.crc32(data[4:]).to_bytes(4, "little") != data[:4]:
            raise BackendError("peer metadata is damaged", num_bytes=len(data))
        try:
            metadata = msgspec.msgpack.decode(data[4:], type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BackendError("peer metadata is malformed", detail=str(error)) from error
        if metadata.backend != backend:
            raise BackendError("peer uses another transport", mine=backend, theirs=metadata.backend)
        if not metadata.memory.ranges:
            raise BackendError("peer has registered no memory", backend=backend)
        return metadata


def check_unregistered(memory: RegisteredMemory | None, backend: str) -> None:
    """Refuse a second registration, of which peers would never learn.

    Raises:
        RegistrationError: There is memory already.
    """
    if memory is not None:
        raise RegistrationError("memory is registered already, and only once", backend=backend)
