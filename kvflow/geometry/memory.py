"""Where memory is: address ranges and their locations."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from kvflow.errors import LayoutError

__all__ = ["ADDRESS_LIMIT", "MEMORY_KINDS", "Location", "MemoryKind", "MemoryRange", "merge_ranges"]


ADDRESS_LIMIT = 2**64
"""One past the last address, in bytes."""

MemoryKind = str
"""Kind of memory: "DRAM" (host) or "VRAM" (device), the terms that transports use."""

MEMORY_KINDS = ("DRAM", "VRAM")


class Location(NamedTuple):
    """Where memory is.

    Attributes:
        memory_kind: "DRAM" or "VRAM".
        device_id: Device ordinal; 0 for host memory.
    """

    memory_kind: MemoryKind
    device_id: int


class MemoryRange(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Bytes to register with a transport: `[address, address + length)`.

    Attributes:
        address: Address of the first byte, uint64.
        length: Length in bytes.
        location: Location of the memory; None to use the default of the owner (for example the layout).
    """

    address: int
    length: int
    location: Location | None = None

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.address + self.length


def merge_ranges(ranges: Iterable[MemoryRange]) -> tuple[MemoryRange, ...]:
    """Sort ranges and merge those that overlap.

    Adjacent ranges are not merged: they may be separate allocations, which a transport cannot register as one.

    Raises:
        LayoutError: Two ranges that overlap are in different locations.
    """
    merged: list[MemoryRange] = []
    for current in sorted(ranges, key=lambda one: (one.address, one.length)):
        if merged and current.address < merged[-1].end:
            last = merged[-1]
            if current.location != last.location:
                raise LayoutError(
                    "memory ranges in different locations overlap", address=current.address, found=(last, current)
                )
            merged[-1] = MemoryRange(last.address, max(last.end, current.end) - last.address, last.location)
        else:
            merged.append(current)
    return tuple(merged)
