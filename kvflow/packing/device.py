"""Copying the runs of a packed payload in device memory, with torch. Loaded only for layouts in such memory.

It does what `host` does in host memory. A device copies rows of a table quickly but starts slowly, so all runs of one
length are copied at once: memory is viewed as a table whose rows are as long as the runs and their distances allow, in
words as wide as their addresses allow. Where runs lie on a grid of their own length, each run is one row; elsewhere it
is several consecutive rows.

Copies are ordered with the engine's kernels: a chunk's event has fired before its pages are gathered, copies run on a
stream of their own, and the caller waits for that stream. So scattered data is visible to every stream that uses it
afterwards.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from kvflow.errors import PlanError, Shortage
from kvflow.geometry.digest import View
from kvflow.geometry.layout import KVLayout, RegionKey
from kvflow.geometry.memory import MemoryRange
from kvflow.geometry.pack import PackedRuns
from kvflow.packing.copier import Allocation, Copier

__all__ = ["DeviceCopier", "Rows", "bytes_at", "copy_runs", "find_device", "word_bytes"]

BLOCK_WORDS: Final = 2**20
"""Words copied at once: 8 MiB, and as much for each of the two lists of rows. A slot has the same size."""

WORDS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
WIDEST: Final = max(WORDS)

Addresses = NDArray[np.uint64]


class _Raw:
    """Memory at an address, for libraries that accept foreign memory."""

    def __init__(self, address: int, num_bytes: int) -> None:
        described = {"version": 3, "data": (address, False), "shape": (num_bytes,), "typestr": "|u1"}
        self.__array_interface__ = described
        self.__cuda_array_interface__ = described


def bytes_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return a uint8 tensor that views raw memory, without a copy or ownership. Only indexed bytes have to exist.

    It is valid as long as the memory is allocated. The device has an index unless it is the CPU.

    Raises:
        PlanError: The memory is not on that device.
    """
    raw = _Raw(address, num_bytes)
    if device.type == "cpu":
        return torch.from_numpy(np.asarray(raw))
    seen = torch.as_tensor(raw, device=device)
    if seen.data_ptr() != address:  # torch copies memory of other devices
        raise PlanError("memory is not on the device of the layout", address=hex(address), device=str(device))
    return seen


def word_bytes(length: int, *addresses: Addresses) -> int:
    """Return the widest word that divides a length and all addresses: 8, 4, 2 or 1 bytes."""
    bits = length | WIDEST
    for array in addresses:
        bits |= int(np.bitwise_or.reduce(array))
    return bits & -bits


class Rows(NamedTuple):
    """Runs of one length as rows of a table.

    Attributes:
        table: Words [num_rows, words_per_row], a view of all memory from the first run to the last.
        firsts: int64[num_runs], first row of each run.
        steps: int64[rows_per_run], 0, 1, and so on; only 0 if the runs lie on a grid of their own length.
    """

    table: torch.Tensor
    firsts: torch.Tensor
    steps: torch.Tensor

    @classmethod
    def from_addresses(cls, addresses: Addresses, length: int, word: int, device: torch.device) -> Self:
        """View runs, at least one, as rows. The bytes of a word divide their length and addresses.

        Raises:
            PlanError: The memory is not on that device.
        """
        start = addresses.min()
        offsets = addresses - start
        row = int(np.gcd.reduce(offsets, initial=np.uint64(length)))
        memory = bytes_at(int(start), int(offsets.max()) + length, device)
        firsts = torch.from_numpy((offsets // np.uint64(row)).astype(np.int64))
        return cls(
            memory.view(WORDS[word]).view(-1, row // word),
            firsts.to(device),
            torch.arange(length // row, device=device),
        )

    def fetch(self, block: slice) -> torch.Tensor:
        """Return the words of some runs, one run after another."""
        return self.table.index_select(0, self._numbers(block)).view(-1)

    def store(self, block: slice, words: torch.Tensor) -> None:
        """Write the words of some runs."""
        self.table.index_copy_(0, self._numbers(block), words.view(-1, self.table.shape[1]))

    def _numbers(self, block: slice) -> torch.Tensor:
        return (self.firsts[block, None] + self.steps).view(-1)


def copy_runs(
    runs: Sequence[PackedRuns],
    slot: MemoryRange,
    device: torch.device,
    *,
    gather: bool,
    block_words: int = BLOCK_WORDS,
) -> None:
    """Copy runs between the memory that they name and a staging slot, all of it on one device.

    The copy is asynchronous: it is complete when the current stream of the device is. May be called in any thread;
    temporary memory comes from that stream. Arguments as for `Copier.copy`, and the device of memory and slot. At most
    `block_words` are copied at once; a longer run is copied alone, without temporary memory.

    Raises:
        PlanError: The memory is not on that device.
    """
    for group in runs:
        payload = group.payload + np.uint64(slot.address)
        ends = (group.memory, payload) if gather else (payload, group.memory)
        word = word_bytes(group.length, *ends)
        if group.length // word > block_words:
            _copy_each(ends, group.length, device)
            continue
        source, target = (Rows.from_addresses(addresses, group.length, word, device) for addresses in ends)
        step = block_words // (group.length // word)
        for start in range(0, len(payload), step):
            block = slice(start, start + step)
            target.store(block, source.fetch(block))


def _copy_each(ends: tuple[Addresses, Addresses], length: int, device: torch.device) -> None:
    for source, target in zip(*(addresses.tolist() for addresses in ends), strict=True):
        bytes_at(target, length, device).copy_(bytes_at(source, length, device))


def find_device(device_id: int) -> torch.device | None:
    """Return the CUDA device that a layout names; None if torch cannot use it."""
    is_there = torch.cuda.is_available() and device_id < torch.cuda.device_count()
    return torch.device("cuda", device_id) if is_there else None


class DeviceCopier(Copier):
    """A copier for one device, with torch, which allocates temporary memory, a few times a block, and caches it.

    The device has an index unless it is the CPU.
    """

    waits_for_device = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @override
    def allocate(self, num_bytes: int) -> Allocation:
        try:
            with self._own_stream():  # torch may reuse memory that the stream still uses
                memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        except torch.cuda.OutOfMemoryError as error:
            facts = {"device": str(self._device), "num_bytes": num_bytes, "detail": str(error)}
            raise Shortage("device has not enough memory for staging_bytes", **facts) from error
        return Allocation(memory.data_ptr(), memory)

    @override
    def bases(self, layout: KVLayout, view: View) -> Mapping[RegionKey, int]:
        return {key: region.address for key, region in layout.regions().items()}

    @override
    def copy(self, runs: Sequence[PackedRuns], slot: MemoryRange, *, gather: bool) -> None:
        try:
            with self._own_stream():
                copy_runs(runs, slot, self._device, gather=gather)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Run the body on the copier's stream, and synchronise that stream on every exit."""
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            if self._stream is not None:
                self._stream.synchronize()
