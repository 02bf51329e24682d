"""A device that needs no hardware: memory that the host must not touch at the addresses that a rank is given.

Code that reads or writes device memory from the host works by accident as long as the device is really host memory, and
fails in production. Here it ends the process with SIGSEGV. The bytes also lie at a second address, the alias, which
transports and the tests' own kernels use:

    device = FakeDevice()
    pool = device.allocate(2**20)      # pool.address goes into the layout; pool.array shows the bytes
    backend = on_fake_device(MemoryBackend)()

Ranks get the layout with `memory_kind="VRAM"`. Linux only.
"""

import ctypes
import dataclasses
import functools
import mmap
import os
import random
import weakref
from typing import Any, Final, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvflow.backends.base import Backend
from kvflow.errors import BackendError
from kvflow.geometry.blocks import BlockLists, Blocks
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.memory import ADDRESS_LIMIT, Location, MemoryRange
from kvflow.geometry.plan import Descriptors
from kvflow.testing.buffers import Buffer, Bytes

__all__ = ["DeviceMemory", "FakeDevice", "alias_of", "on_fake_device"]

AnyBackend = TypeVar("AnyBackend", bound=Backend)

FIRST: Final = 2**44
"""Device addresses are in `[FIRST, 2 * FIRST)`, and the alias of each is `FIRST` higher. Neither the heap, libraries
nor stacks of a Linux process are there."""

HIGH: Final = 2**63
"""Added to the address for devices with high addresses, such as Intel XPUs. No processor can use such an address."""

PAGE: Final = mmap.PAGESIZE
MAP_FIXED_NOREPLACE: Final = 0x100000
ATTEMPTS: Final = 64

UInt64Array = NDArray[np.uint64]


class DeviceMemory(Buffer):
    """An allocation. A host access at its address ends the process with SIGSEGV.

    Attributes:
        array: uint8[num_bytes], the same bytes, for the tests' kernels. It owns the memory.
    """

    def __init__(self, address: int, location: Location, array: Bytes) -> None:
        self.address, self.num_bytes = address, len(array)
        self.memory_kind, self.device_id = location
        self.array = array

    @override
    def read(self, start: int = 0, stop: int | None = None) -> Bytes:
        return np.array(self.array[start:stop])

    @override
    def write(self, start: int, data: Bytes) -> None:
        self.array[start : start + len(data)] = data


class _Mapping:
    """A file that is mapped twice, which numpy shows as an array."""

    def __init__(self, address: int, size: int, num_bytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (FIRST + address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
        }
        weakref.finalize(self, _unmap, address, size)


class FakeDevice:
    """Allocates device memory.

    Args:
        ordinal: Number of the device.
        is_high: Addresses have bit 63 set.
    """

    def __init__(self, ordinal: int = 0, *, is_high: bool = False) -> None:
        self.location = Location("VRAM", ordinal)
        self._is_high = is_high

    def allocate(self, num_bytes: int) -> DeviceMemory:
        """Allocate zeroed bytes, which are freed with the array of the result.

        Raises:
            OSError: The system refuses.
        """
        size = -(-num_bytes // PAGE) * PAGE
        file = os.memfd_create("fake device")
        try:
            os.ftruncate(file, size)
            address = _map_twice(file, size)
        finally:
            os.close(file)
        array = np.asarray(_Mapping(address, size, num_bytes))
        return DeviceMemory(HIGH + address if self._is_high else address, self.location, array)


def alias_of(addresses: UInt64Array) -> UInt64Array:
    """Return where the bytes at some addresses really are; host addresses and aliases are returned as they are."""
    low = addresses & np.uint64(HIGH - 1)
    is_device = (low >= FIRST) & (low < 2 * FIRST)
    return np.where(is_device, low + np.uint64(FIRST), low)


def on_fake_device(backend: type[AnyBackend]) -> type[AnyBackend]:
    """Return a transport class that accepts memory of fake devices on both sides, and host memory as before.

    The transport registers aliases, as host memory. `view` refuses device memory, as every transport does.
    """
    if issubclass(backend, _OnFakeDevice):
        return backend
    create = backend.__init__

    @functools.wraps(create)  # so that its options are still known
    def init(self: _OnFakeDevice, *args: Any, **options: Any) -> None:
        create(cast("AnyBackend", self), *args, **options)
        kinds = frozenset({"DRAM", "VRAM"})
        self.capabilities = dataclasses.replace(self.capabilities, memory_kinds=kinds)
        self.lists = weakref.WeakKeyDictionary()

    name = f"{backend.__name__}OnFakeDevice"
    return cast("type[AnyBackend]", type(name, (_OnFakeDevice, backend), {"__init__": init}))


class _OnFakeDevice(Backend):
    """Mixin that shows aliases to the transport behind it.

    Attributes:
        lists: For each list of blocks the one with aliases: a transport prepares what is the same object only once.
    """

    lists: "weakref.WeakKeyDictionary[BlockLists, BlockLists]"

    @override
    async def register(self, layout: KVLayout) -> None:
        await super().register(_on_host(layout))  # type: ignore[safe-super] # the transport's

    @override
    async def extend(self, layout: KVLayout) -> None:
        await super().extend(_on_host(layout))

    @override
    def view(self, memory: MemoryRange) -> Bytes:
        if _alias(memory.address) != memory.address:
            raise BackendError("only host memory can be read", memory_kind="VRAM")
        return super().view(memory)  # type: ignore[safe-super] # the transport's

    @override
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        aliases = Descriptors(_aliases(descriptors.src), _aliases(descriptors.dst))
        super().post(post_id, peer, aliases, notice)  # type: ignore[safe-super] # the transport's

    @override
    def post_blocks(self, post_id: int, peer: str, blocks: Blocks, notice: bytes) -> None:
        lists = self.lists.get(blocks.lists)
        if lists is None:
            lists = self.lists[blocks.lists] = BlockLists(_aliases(blocks.lists.src), _aliases(blocks.lists.dst))
        super().post_blocks(post_id, peer, blocks._replace(lists=lists), notice)


def _on_host(layout: KVLayout) -> KVLayout:
    """Return a layout with the aliases of its addresses, in host memory with the same device numbers."""
    replace = msgspec.structs.replace
    components = tuple(
        replace(one, regions=tuple(replace(region, address=_alias(region.address)) for region in one.regions))
        for one in layout.components
    )
    allocations = [
        MemoryRange(
            _alias(one.address), one.length, None if one.location is None else Location("DRAM", one.location.device_id)
        )
        for one in layout.allocations
    ]
    return replace(layout, components=components, allocations=tuple(sorted(allocations)), memory_kind="DRAM")


def _alias(address: int) -> int:
    return int(alias_of(np.array([address], np.uint64))[0])


def _aliases(rows: UInt64Array) -> UInt64Array:
    """Return descriptors or runs of blocks with aliases in their first column."""
    changed = rows.copy()
    changed[:, 0] = alias_of(rows[:, 0])
    return changed


_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_uint64
_libc.mmap.argtypes = (ctypes.c_uint64, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_uint64, ctypes.c_size_t)


def _map_twice(file: int, size: int) -> int:
    """Map a file without any right at an unused device address, which is returned, and for use at its alias."""
    for _ in range(ATTEMPTS):
        address = FIRST + random.randrange((FIRST - size) // PAGE) * PAGE  # noqa: S311 - not a secret
        if not _map(file, size, address, 0):
            continue
        if _map(file, size, FIRST + address, mmap.PROT_READ | mmap.PROT_WRITE):
            return address
        _libc.munmap(address, size)
    code = ctypes.get_errno()
    raise OSError(code, f"no memory for a fake device: {os.strerror(code)}")


def _map(file: int, size: int, address: int, rights: int) -> bool:
    mapped = _libc.mmap(address, size, rights, mmap.MAP_SHARED | MAP_FIXED_NOREPLACE, file, 0)
    if mapped not in (address, ADDRESS_LIMIT - 1):  # an old kernel that takes the address for a hint
        _libc.munmap(mapped, size)
    return bool(mapped == address)


def _unmap(address: int, size: int) -> None:
    for start in (address, FIRST + address):
        _libc.munmap(start, size)
