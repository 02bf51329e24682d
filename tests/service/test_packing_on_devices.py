"""Packed pieces of device tensors in the whole service.

The CPU is a torch device, too: it runs the code for GPUs on memory that the layout declares as device memory. The tests
also run on a GPU where there is one.
"""

import dataclasses
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import kvflow
from kvflow.backends import nixl
from kvflow.backends.memory import MemoryBackend
from kvflow.bounds import Bounds
from kvflow.errors import FailureReason, Shortage
from kvflow.geometry.memory import MemoryKind, MemoryRange
from kvflow.geometry.pack import PackedRuns
from kvflow.packing import device
from kvflow.packing.device import DeviceCopier
from kvflow.testing.buffers import HostBuffer
from kvflow.testing.device import on_fake_device
from tests.device.devices import DEVICE
from tests.service.test_any_layout import posts, put_on_devices, small_worlds, stops_of_layers, transfer
from tests.support import instances
from tests.support.device import let_torch_copy
from tests.support.examples import examples
from tests.support.failures import receive_failure, undisturbed
from tests.support.instances import deploy, prefill_config
from tests.support.pools import Pool
from tests.support.waiting import until
from tests.support.worlds import Rank, World

pytestmark = pytest.mark.anyio

CPU = torch.device("cpu")

Kinds = tuple[MemoryKind, MemoryKind]

kinds = st.sampled_from([("VRAM", "VRAM"), ("VRAM", "DRAM"), ("DRAM", "VRAM")])
"""Memory kinds of the prefill ranks and of the decode ranks."""


class Copies:
    """Record of the copies of device copiers: direction and thread."""

    def __init__(self) -> None:
        self.ways: list[bool] = []
        self.threads: list[threading.Thread] = []

    def note(self, *, gather: bool) -> None:
        self.ways.append(gather)
        self.threads.append(threading.current_thread())


@contextmanager
def processor_as_device() -> Iterator[Copies]:
    """Make the memory transport accept device memory, with the CPU as its device."""
    copies = Copies()
    copy = DeviceCopier.copy
    both: frozenset[MemoryKind] = frozenset({"DRAM", "VRAM"})

    def noted(copier: DeviceCopier, runs: Sequence[PackedRuns], slot: MemoryRange, *, gather: bool) -> None:
        copies.note(gather=gather)
        copy(copier, runs, slot, gather=gather)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryBackend, "capabilities", dataclasses.replace(MemoryBackend.capabilities, memory_kinds=both))
        patch.setattr(device, "find_device", lambda _: CPU)
        patch.setattr(DeviceCopier, "copy", noted)
        yield copies


def sides(world: World, of: Kinds) -> Iterator[tuple[Rank, MemoryKind]]:
    for side, kind in zip((world.prefill, world.decode), of, strict=True):
        for rank in side.values():
            yield rank, kind


@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(world=small_worlds, of=kinds, post=posts, stops=stops_of_layers)
async def test_any_layout_is_packed_by_torch(world: World, of: Kinds, post: int, stops: tuple[int, ...]) -> None:
    world.compute()
    for rank, kind in sides(world, of):
        rank.move(rank.memory.ctypes.data)
        rank.layout = replace(rank.layout, memory_kind=kind)
    with processor_as_device() as copies:
        found = await transfer(world, "memory", bytes_per_post=post, stops=stops, packing="always")
    for rank in world.decode.values():
        np.testing.assert_array_equal(rank.memory, world.expected(rank, world.held()))
    assert found.direct_posts == 0
    expected = {way: found.packed_posts * (kind == "VRAM") for way, kind in zip((True, False), of, strict=True)}
    assert {way: copies.ways.count(way) for way in (True, False)} == expected
    assert threading.current_thread() not in copies.threads


@pytest.mark.device
@pytest.mark.skipif(DEVICE is None or not DEVICE.can_pack, reason="no device on which torch packs")
@pytest.mark.timeout(600)
@settings(max_examples=examples(8), deadline=None, suppress_health_check=list(HealthCheck))
@given(world=small_worlds, of=kinds, post=posts)
async def test_any_layout_is_packed_on_a_device(world: World, of: Kinds, post: int) -> None:
    assert DEVICE is not None
    world.compute()
    buffers = []
    for rank, kind in sides(world, of):
        buffer = (DEVICE.allocate if kind == "VRAM" else HostBuffer)(len(rank.memory))
        buffer.write(0, rank.memory)
        rank.move(buffer.address)
        rank.layout = replace(rank.layout, memory_kind=kind, device_id=buffer.device_id)
        buffers.append((rank, buffer))
    found = await transfer(world, "nixl", bytes_per_post=post, packing="always")
    for rank, buffer in buffers:
        rank.memory[:] = buffer.read()
    for rank in world.decode.values():
        np.testing.assert_array_equal(rank.memory, world.expected(rank, world.held()))
    assert found.direct_posts == 0


@settings(max_examples=examples(12), suppress_health_check=list(HealthCheck))
@given(world=small_worlds, post=posts)
async def test_any_layout_is_packed_from_one_device_to_another(world: World, post: int) -> None:
    """The numbers of the devices differ, and their addresses may have bit 63."""
    for side, ordinal in ((world.prefill, 0), (world.decode, 3)):
        for rank in side.values():
            put_on_devices(rank, [ordinal] * 3)
    world.compute()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nixl, "NixlBackend", on_fake_device(nixl.NixlBackend))
        let_torch_copy(patch.setattr)
        found = await transfer(world, "nixl", bytes_per_post=post, packing="always")
    world.assert_arrived()
    assert found.direct_posts == 0


STAGING = {"staging_bytes": 2**23, "staging_slot_bytes": 2**16}
"""Explicit staging: kvflow takes no device memory by default."""
SENDING = {**STAGING, "packing": "always"}
RECEIVING = {**STAGING, "staging_slots": 4}


@pytest.fixture
def device_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declare the memory of every pool of a deployment as device memory."""
    make_pool = instances.make_pool

    def on_device(tp_size: int = 1, tp_rank: int = 0) -> Pool:
        pool = make_pool(tp_size, tp_rank)
        pool.layout = replace(pool.layout, memory_kind="VRAM")
        return pool

    monkeypatch.setattr(instances, "make_pool", on_device)


@pytest.mark.usefixtures("device_pools")
@pytest.mark.parametrize("missing", ["device", "torch"])
async def test_without_a_device_or_torch_everything_goes_direct(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    with processor_as_device():
        if missing == "device":
            monkeypatch.setattr(device, "find_device", lambda _: None)
        else:
            monkeypatch.setitem(sys.modules, "kvflow.packing.device", None)
        async with deploy(sending=SENDING, receiving=RECEIVING) as deployment:
            await undisturbed(deployment)
            sent = deployment.prefill[0].statistics().staging
            assert (sent.packed_posts, sent.direct_posts > 0) == (0, True)
            assert deployment.decode[0].statistics().staging.windows_free == 0


@pytest.mark.usefixtures("device_pools")
@pytest.mark.parametrize("gather", [True, False])
async def test_a_device_without_memory_left_fails_the_transfer_and_the_slots_come_back(
    monkeypatch: pytest.MonkeyPatch, gather: bool
) -> None:
    copy_runs = device.copy_runs

    def fail(
        runs: Sequence[PackedRuns], slot: MemoryRange, on: torch.device, *, gather: bool, failing: bool = gather
    ) -> None:
        if gather == failing:
            raise torch.cuda.OutOfMemoryError("no memory left")
        copy_runs(runs, slot, on, gather=gather)

    with processor_as_device():
        limits = Bounds(bytes_per_post=1)
        async with deploy(sending=SENDING, receiving=RECEIVING, limits=limits) as deployment:
            with monkeypatch.context() as patch:
                patch.setattr(device, "copy_runs", fail)
                failure = await receive_failure(deployment.request(1, 4))
            assert failure.reason is (FailureReason.INVALID_PAGES if gather else FailureReason.PROTOCOL)
            assert "no memory left" in failure.detail
            await deployment.settle()
            await until(lambda: not len(deployment.prefill[0]._core.slots))
            assert deployment.prefill[0].statistics().staging.slots_taken == 0
            await undisturbed(deployment)


@pytest.mark.usefixtures("device_pools")
def test_staging_memory_that_does_not_fit_is_refused_with_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError

    with processor_as_device():
        monkeypatch.setattr(torch, "zeros", fail)
        layout = instances.make_pool().layout
        with pytest.raises(Shortage, match="staging_bytes"):
            kvflow.PrefillRank(prefill_config("tcp://127.0.0.1:1", staging_bytes=2**25), layout)
        kvflow.PrefillRank(prefill_config("tcp://127.0.0.1:1"), layout)
