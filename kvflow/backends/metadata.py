"""Metadata exchanged by backends, and checks of memory ranges against it.

The libraries crash or write to the wrong place if given an unregistered range, so every range is checked here first, on
both sides. A damaged blob makes a peer's name unusable inside NIXL, so the metadata has a checksum.
"""

import ctypes
import functools
import zlib
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Self

import msgspec
import numpy as np
import numpy.ctypeslib  # numpy would load it at the first use, when no descriptor may be left
from numpy.typing import NDArray

from kvflow.errors import BackendError, RegistrationError
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.memory import ADDRESS_LIMIT, Location, MemoryKind, MemoryRange

__all__ = ["PeerMetadata", "RegisteredMemory", "check_memory_kinds", "check_unregistered"]

Words = NDArray[np.uint64]


class RegisteredMemory(msgspec.Struct, frozen=True, dict=True):
    """The ranges that one side has registered; sorted and disjoint.

    Attributes:
        ranges: Each may have its own location.
        memory_kind: Memory kind of ranges without a location.
        device_id: Device of ranges without a location.
    """

    ranges: tuple[MemoryRange, ...]
    memory_kind: MemoryKind
    device_id: int

    @classmethod
    def from_layout(cls, layout: KVLayout) -> Self:
        """Return the memory that a layout needs registered."""
        return cls(layout.allocations, layout.memory_kind, layout.device_id)

    def without(self, other: "RegisteredMemory") -> tuple[MemoryRange, ...]:
        """Return the parts of these ranges that are not in `other`, each with its location.

        A part that is in both with different locations raises RegistrationError.
        """
        left = []
        for item in self.ranges:
            location, start = self.location_of(item), item.address
            for index in range(other._first_ending_after(start), len(other.ranges)):
                taken = other.ranges[index]
                if item.end <= taken.address:
                    break
                if other.location_of(taken) != location:
                    raise RegistrationError(
                        "memory is already registered in a different location", address=taken.address, found=location
                    )
                if start < taken.address:
                    left.append(MemoryRange(start, taken.address - start, location))
                start = taken.end
            if start < item.end:
                left.append(MemoryRange(start, item.end - start, location))
        return tuple(left)

    def also(self, ranges: tuple[MemoryRange, ...]) -> "RegisteredMemory":
        """Return this memory plus further ranges, which must not overlap it."""
        every = sorted((*self.ranges, *ranges), key=attrgetter("address"))
        return RegisteredMemory(tuple(every), self.memory_kind, self.device_id)

    @functools.cached_property
    def by_kind(self) -> Mapping[MemoryKind, Sequence[tuple[MemoryRange, int]]]:
        """The ranges and their device ordinals, by memory kind."""
        found: dict[MemoryKind, list[tuple[MemoryRange, int]]] = {}
        for item in self.ranges:
            kind, device = self.location_of(item)
            found.setdefault(kind, []).append((item, device))
        return found

    def location_of(self, item: MemoryRange) -> Location:
        """Return the location of one of the ranges."""
        return item.location or Location(self.memory_kind, self.device_id)

    def has(self, other: "RegisteredMemory") -> bool:
        """Return whether all of `other` is registered here, in the same locations."""
        claimed = [(item.address, item.length, other.location_of(item).device_id) for item in other.ranges]
        try:
            self.check(np.array(claimed, np.uint64).reshape(-1, 3), side="claimed")
        except BackendError:
            return False
        return True

    def find(self, memory: MemoryRange) -> Location | None:
        """Return the location of some memory; None if it is empty, or not inside one of the ranges."""
        index = self._first_ending_after(memory.address)
        if index == len(self.ranges):
            return None
        item = self.ranges[index]
        is_inside = item.address <= memory.address < memory.end <= item.end
        return self.location_of(item) if is_inside else None

    def view(self, memory: MemoryRange, real_address: int) -> NDArray[np.uint8]:
        """Return registered host memory, which really begins at another address, as an array, see `Backend.view`."""
        location = self.find(memory)
        if location is None:
            raise BackendError(
                "memory range is not registered", side="local", address=hex(memory.address), length=memory.length
            )
        if location.memory_kind != "DRAM":
            raise BackendError("only host memory can be read", memory_kind=location.memory_kind)
        return np.ctypeslib.as_array((ctypes.c_uint8 * memory.length).from_address(real_address))

    def _first_ending_after(self, address: int) -> int:
        """Return the index of the first range that ends after an address."""
        return bisect_right(self.ranges, address, key=attrgetter("end"))

    def kind_of(self, descriptors: Words) -> MemoryKind:
        """Return the memory kind of descriptors that have passed `check`.

        A transport cannot move several kinds in one write, so they raise BackendError.
        """
        if len(self.by_kind) == 1 or not len(descriptors):
            return next(iter(self.by_kind), self.memory_kind)
        owners = np.unique(self._owners(descriptors[:, 0]))
        kinds = {self.location_of(self.ranges[owner - 1]).memory_kind for owner in owners.tolist()}
        if len(kinds) > 1:
            raise BackendError("all memory at one end of a write must be of the same kind", found=sorted(kinds))
        return kinds.pop()

    def __post_init__(self) -> None:
        """Raise BackendError for a range or device that would overflow in native code."""
        end = 0
        for device in {self.device_id, *(self.location_of(item).device_id for item in self.ranges)}:
            if not 0 <= device < ADDRESS_LIMIT:
                raise BackendError("device number is out of range", device_id=device)
        for item in self.ranges:
            if item.length <= 0 or item.address < end or item.end > ADDRESS_LIMIT:
                raise BackendError("memory range is invalid", address=item.address, length=item.length)
            end = item.end

    def check(self, descriptors: Words, *, side: str) -> None:
        """Raise BackendError, with the first one, unless descriptors each lie inside one registered range.

        Args:
            descriptors: uint64[n, 3], (address, length, device id).
            side: "source", "destination" or "local", for the error.
        """
        starts, lengths, devices = self._bounds
        address, length, device = descriptors[:, 0], descriptors[:, 1], descriptors[:, 2]
        owner = self._owners(address)
        offset, left = address - starts[owner], lengths[owner]
        inside = (offset <= left) & (length - np.uint64(1) < left - offset) & (device == devices[owner])
        if not np.logical_and.reduce(inside):
            first = [int(word) for word in descriptors[np.flatnonzero(~inside)[0]]]
            raise BackendError(
                "memory range is not registered", side=side, address=hex(first[0]), length=first[1], device=first[2]
            )

    def _owners(self, addresses: Words) -> NDArray[np.intp]:
        """Return the index into `_bounds` of the last range that starts at or before each address."""
        owners: NDArray[np.intp] = self._bounds[0].searchsorted(addresses, side="right") - 1
        return owners

    @functools.cached_property
    def _bounds(self) -> tuple[Words, Words, Words]:
        """Starts, lengths and devices, preceded by an empty range at 0 that owns all addresses before the first."""
        starts = np.array([0, *(memory.address for memory in self.ranges)], np.uint64)
        lengths = np.array([0, *(memory.length for memory in self.ranges)], np.uint64)
        return starts, lengths, np.array([0, *(self.location_of(one).device_id for one in self.ranges)], np.uint64)


class PeerMetadata(msgspec.Struct, frozen=True):
    """What a peer needs to write here.

    Attributes:
        agent: The library's own blob, opaque.
        memory: The registered memory.
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
        """Decode a peer's metadata; raise BackendError if it is damaged or of another transport."""
        if zlib.crc32(data[4:]).to_bytes(4, "little") != data[:4]:
            raise BackendError("peer metadata is damaged", num_bytes=len(data))
        try:
            metadata = msgspec.msgpack.decode(data[4:], type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BackendError("peer metadata is malformed", detail=str(error)) from error
        if metadata.backend != backend:
            raise BackendError("peer uses a different transport", mine=backend, theirs=metadata.backend)
        if not metadata.memory.ranges:
            raise BackendError("peer has registered no memory", backend=backend)
        return metadata


def check_memory_kinds(layout: KVLayout, memory_kinds: Collection[MemoryKind], backend: str) -> None:
    """Raise RegistrationError, with one of them, if there are memory kinds that a backend cannot register."""
    unknown = {location.memory_kind for location in layout.registered_locations} - set(memory_kinds)
    if unknown:
        raise RegistrationError(
            "backend cannot register this kind of memory", backend=backend, memory_kind=min(unknown)
        )


def check_unregistered(memory: RegisteredMemory | None, backend: str) -> None:
    """Raise RegistrationError at a second registration, which peers would never learn about."""
    if memory is not None:
        raise RegistrationError("memory is already registered", backend=backend)
