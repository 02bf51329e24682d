"""Runs are copied in device memory as in host memory; the CPU counts as a device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvflow.errors import PlanError
from kvflow.geometry.memory import MemoryRange
from kvflow.geometry.pack import PackedRuns
from kvflow.packing import device
from kvflow.packing.copier import HostCopier
from kvflow.packing.device import DeviceCopier, Rows, bytes_at, find_device, word_bytes
from tests.support.torch_buffers import device_of_cuda

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(device_of_cuda(), marks=[pytest.mark.device])] if device_of_cuda() else [CPU]

Bytes = NDArray[np.uint8]


class Copy(NamedTuple):
    """Runs to copy, as offsets in two buffers.

    Attributes:
        lengths: Length of the runs of each group.
        places: By group, the offsets of the runs in memory and in the payload.
        shifts: Offset of each buffer behind a multiple of 8.
        slot_at: Offset of the slot in its buffer.
    """

    lengths: list[int]
    places: list[tuple[list[int], list[int]]]
    shifts: tuple[int, int]
    slot_at: int
    seed: int

    def sizes(self) -> tuple[int, int]:
        """Return the sizes of both buffers in bytes, with a margin behind the last run."""
        ends = [
            [place + length for length, places in zip(self.lengths, self.places, strict=True) for place in places[side]]
            for side in (0, 1)
        ]
        return max(ends[0]) + 9, self.slot_at + max(ends[1]) + 9


@st.composite
def spread(draw: st.DrawFn, lengths: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Draw offsets of disjoint runs in any order, on a grid of their length, of a word, or on none."""
    unit = draw(st.sampled_from([0, 1, 2, 4, 8]))
    at = unit * draw(st.integers(0, 3))
    found = []
    for length, count in zip(lengths, counts, strict=True):
        step = unit or length
        at = -(-at // step) * step
        places = []
        for _ in range(count):
            at += step * draw(st.integers(0, 2))
            places.append(at)
            at += -(-length // step) * step
        found.append(draw(st.permutations(places)))
    return found


@st.composite
def copies(draw: st.DrawFn) -> Copy:
    some_length = st.integers(1, 40) | st.integers(1, 10).map(lambda words: 8 * words)
    lengths = draw(st.lists(some_length, min_size=1, max_size=3))
    counts = [draw(st.integers(1, 12)) for _ in lengths]
    memory, payload = draw(spread(lengths, counts)), draw(spread(lengths, counts))
    shifts = draw(st.sampled_from([(0, 0), (0, 4), (6, 0), (1, 3)]))
    slot_at = draw(st.sampled_from([0, 8, 4, 5]))
    return Copy(lengths, list(zip(memory, payload, strict=True)), shifts, slot_at, draw(st.integers(0, 2**32 - 1)))


class Buffers:
    """Two buffers of random bytes, at an offset from a multiple of 8, and the runs between them at real addresses."""

    def __init__(self, copy: Copy, on: torch.device) -> None:
        rng = np.random.default_rng(copy.seed)
        self.before = [rng.integers(0, 256, size, np.uint8) for size in copy.sizes()]
        whole = [torch.zeros(len(data) + 16, dtype=torch.uint8, device=on) for data in self.before]
        self.tensors = [
            buffer[shift + -buffer.data_ptr() % 8 :][: len(data)]
            for buffer, shift, data in zip(whole, copy.shifts, self.before, strict=True)
        ]
        for tensor, data in zip(self.tensors, self.before, strict=True):
            tensor.copy_(torch.from_numpy(data))
        memory, payload = (np.uint64(tensor.data_ptr()) for tensor in self.tensors)
        self.slot = MemoryRange(int(payload) + copy.slot_at, len(self.before[1]) - copy.slot_at)
        self.runs = [
            PackedRuns(length, np.array(places[0], np.uint64) + memory, np.array(places[1], np.uint64))
            for length, places in zip(copy.lengths, copy.places, strict=True)
        ]

    def bytes(self) -> list[Bytes]:
        return [tensor.cpu().numpy().copy() for tensor in self.tensors]


def one_by_one(copy: Copy, before: list[Bytes], *, gather: bool) -> list[Bytes]:
    """Return the expected content of both buffers, copied run by run."""
    memory, payload = (data.copy() for data in before)
    for length, places in zip(copy.lengths, copy.places, strict=True):
        for at, place in zip(*places, strict=True):
            ours, theirs = slice(at, at + length), slice(copy.slot_at + place, copy.slot_at + place + length)
            if gather:
                payload[theirs] = before[0][ours]
            else:
                memory[ours] = before[1][theirs]
    return [memory, payload]


@pytest.mark.parametrize("on", DEVICES, ids=str)
@pytest.mark.parametrize("gather", [True, False])
@given(copies(), st.sampled_from([1, 2, 3, 5, 16, 100, 2**20]))
def test_runs_are_copied_and_no_other_byte_is(on: torch.device, gather: bool, copy: Copy, block_words: int) -> None:
    expected = one_by_one(copy, Buffers(copy, on).before, gather=gather)
    buffers, in_host_memory = Buffers(copy, on), Buffers(copy, CPU)
    device.copy_runs(buffers.runs, buffers.slot, on, gather=gather, block_words=block_words)
    HostCopier().copy(in_host_memory.runs, in_host_memory.slot, gather=gather)
    for found, twin, oracle in zip(buffers.bytes(), in_host_memory.bytes(), expected, strict=True):
        np.testing.assert_array_equal(found, oracle)
        np.testing.assert_array_equal(twin, oracle)


@given(copies())
def test_words_are_aligned_and_rows_lie_within_the_runs(copy: Copy) -> None:
    """Unaligned access faults on a device, and is merely slow on a processor."""
    for group in Buffers(copy, CPU).runs:
        word = word_bytes(group.length, group.memory)
        rows = Rows.from_addresses(group.memory, group.length, word, CPU)
        assert rows.table.data_ptr() == group.memory.min()
        assert rows.table.data_ptr() % rows.table.element_size() == 0
        assert rows.table.is_contiguous()
        assert rows.table.nbytes == group.memory.max() - group.memory.min() + group.length
        assert rows.steps.tolist() == list(range(group.length // (word * rows.table.shape[1])))
        begin = rows.firsts * rows.table[0].nbytes + rows.table.data_ptr()
        assert begin.tolist() == group.memory.tolist()


@pytest.mark.parametrize(
    ("length", "addresses", "expected"),
    [
        (512, [4096, 8192], 8),
        (16, [4096, 8200], 8),
        (12, [4096, 8192], 4),
        (512, [4096, 8196], 4),
        (6, [4096], 2),
        (512, [4098, 4096], 2),
        (512, [4096, 4097], 1),
        (3, [4096], 1),
        (512, [0xFFFF81AB54E01000], 8),
    ],
)
def test_words_are_as_wide_as_length_and_addresses_allow(length: int, addresses: list[int], expected: int) -> None:
    assert word_bytes(length, np.array(addresses, np.uint64)) == expected
    assert word_bytes(length, np.array([64], np.uint64), np.array(addresses, np.uint64)) == expected


@pytest.mark.parametrize(
    ("length", "places", "word", "words_per_row", "per_run"),
    [
        (64, [128, 0, 640], 8, 8, 1),  # on a grid of their length
        (64, [96, 0, 640], 8, 4, 2),  # on a grid of half their length
        (64, [72, 0, 640], 8, 1, 8),  # on a grid of a word
        (12, [24, 0], 4, 3, 1),
        (12, [20, 0], 4, 1, 3),
        (6, [8, 0], 2, 1, 3),
        (5, [10, 25], 1, 5, 1),
        (5, [10, 26], 1, 1, 5),
        (24, [80], 8, 3, 1),  # a single run always is
    ],
)
def test_rows_are_as_long_as_distances_allow(
    length: int, places: list[int], word: int, words_per_row: int, per_run: int
) -> None:
    buffer = np.zeros(1024, np.uint64)
    addresses = np.array(places, np.uint64) + np.uint64(buffer.ctypes.data)
    assert word_bytes(length, addresses) == word
    rows = Rows.from_addresses(addresses, length, word, CPU)
    assert (rows.table.element_size(), rows.table.shape[1], len(rows.steps)) == (word, words_per_row, per_run)


@pytest.mark.parametrize(("length", "block_words"), [(8, 3), (16, 3), (16, 2), (24, 2), (256, 5)])
def test_blocks_are_no_larger_than_they_may_be(monkeypatch: pytest.MonkeyPatch, length: int, block_words: int) -> None:
    sizes: list[int] = []
    fetch = Rows.fetch

    def noted(rows: Rows, block: slice) -> torch.Tensor:
        sizes.append(len(fetch(rows, block)))
        return fetch(rows, block)

    monkeypatch.setattr(Rows, "fetch", noted)
    places = [start * (length + 8) for start in range(10)]
    copy = Copy([length], [(places, places[::-1])], (0, 0), 0, 1)
    buffers = Buffers(copy, CPU)
    device.copy_runs(buffers.runs, buffers.slot, CPU, gather=True, block_words=block_words)
    for found, oracle in zip(buffers.bytes(), one_by_one(copy, buffers.before, gather=True), strict=True):
        np.testing.assert_array_equal(found, oracle)
    is_alone = length > 8 * block_words
    assert sum(sizes) == (0 if is_alone else 10 * length // 8)
    assert max(sizes, default=0) <= block_words


@pytest.mark.parametrize("on", DEVICES, ids=str)
def test_memory_is_seen_where_it_is(on: torch.device) -> None:
    buffer = torch.arange(100, dtype=torch.uint8, device=on)
    seen = bytes_at(buffer.data_ptr() + 10, 20, on)
    assert seen.device == on
    assert seen.tolist() == list(range(10, 30))
    buffer[15] = 200
    seen[1] = 201
    assert (int(seen[5]), int(buffer[11])) == (200, 201)


def test_memory_of_another_device_is_refused_and_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, gpu = np.arange(8, dtype=np.uint8), torch.device("cuda", 0)

    def seen(raw: object, *, device: torch.device) -> torch.Tensor:
        assert device == gpu
        return torch.from_numpy(np.asarray(raw))

    monkeypatch.setattr(torch, "as_tensor", seen)
    assert bytes_at(buffer.ctypes.data, 8, gpu).tolist() == list(range(8))
    monkeypatch.setattr(torch, "as_tensor", lambda raw, *, device: seen(raw, device=device).clone())
    with pytest.raises(PlanError, match="device of the layout"):
        bytes_at(buffer.ctypes.data, 8, gpu)


class Stream:
    """A fake stream of a device that records the calls around it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        patch.setattr(torch.cuda, "stream", self.current)
        patch.setattr(device, "copy_runs", lambda *_, **__: self.log.append("begun"))

    @contextmanager
    def current(self, stream: object) -> Iterator[None]:
        assert stream is self
        self.log.append("current")
        try:
            yield
        finally:
            self.log.append("not current")

    def synchronize(self) -> None:
        self.log.append("done")


def test_a_copy_is_begun_on_a_stream_of_its_own_and_done_when_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    copier, stream = DeviceCopier(CPU), Stream(monkeypatch)
    monkeypatch.setattr(copier, "_stream", stream)
    copier.copy([], MemoryRange(0, 0), gather=True)
    assert stream.log == ["current", "begun", "not current", "done"]
    copier.allocate(8)
    assert stream.log[4:] == ["current", "not current", "done"]


def test_a_copy_that_fails_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    copier, stream = DeviceCopier(CPU), Stream(monkeypatch)
    monkeypatch.setattr(copier, "_stream", stream)

    def fail(*_: object, **__: object) -> None:
        raise torch.cuda.OutOfMemoryError("no memory left")

    monkeypatch.setattr(device, "copy_runs", fail)
    with pytest.raises(MemoryError, match="no memory left"):
        copier.copy([], MemoryRange(0, 0), gather=True)
    assert stream.log == ["current", "not current", "done"]


def test_memory_that_torch_cannot_copy_in_belongs_to_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device(0) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [find_device(number) for number in range(3)] == [torch.device("cuda", 0), torch.device("cuda", 1), None]


@pytest.mark.device
@pytest.mark.skipif(device_of_cuda() is None, reason="no GPU")
def test_what_a_gpu_has_scattered_is_there_for_every_stream() -> None:
    """The copier's stream is busy for long before the copy starts."""
    on = device_of_cuda()
    assert on is not None
    copier = DeviceCopier(on)
    pages = torch.zeros(2**24, dtype=torch.uint8, device=on)
    slot = copier.allocate(2**22)
    staged = bytes_at(slot.address, 2**22, on)
    staged.copy_(torch.arange(2**22, device=on) % 251)
    torch.cuda.synchronize(on)
    at = np.arange(0, 2**22, 512, dtype=np.uint64)
    runs = [PackedRuns(512, at * np.uint64(4) + np.uint64(pages.data_ptr()), at)]
    with torch.cuda.stream(copier._stream):
        torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call]
    copier.copy(runs, MemoryRange(slot.address, 2**22), gather=False)
    with torch.cuda.stream(torch.cuda.Stream(on)):  # type: ignore[no-untyped-call]
        found = pages.view(-1, 4, 512)[:, 0].reshape(-1).cpu()
    assert torch.equal(found, staged.cpu())
    assert not pages.view(-1, 4, 512)[:, 1:].any()
