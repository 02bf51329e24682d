"""Ranks with memory in several locations, in the whole service. Host memory stands in for device memory."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvflow.backends.memory import MemoryBackend
from kvflow.backends.nixl.library import load
from kvflow.geometry import Location
from tests.service.test_any_layout import posts, small_worlds, stops_of_layers, transfer
from tests.service.test_components import WANTED, bench
from tests.support.examples import examples
from tests.support.worlds import World

pytestmark = pytest.mark.anyio

HOST, GPU, OTHER_GPU = Location("DRAM", 0), Location("VRAM", 1), Location("VRAM", 2)

locations = st.permutations([HOST, GPU, OTHER_GPU]) | st.tuples(*[st.sampled_from([HOST, GPU])] * 3)
"""Locations of the successive components of a rank."""


def scatter(world: World, data: st.DataObject) -> None:
    for rank in (*world.prefill.values(), *world.decode.values()):
        rank.move(rank.memory.ctypes.data)
        rank.scatter(data.draw(locations))
    world.compute()


def assert_arrived(world: World) -> None:
    for rank in world.decode.values():
        np.testing.assert_array_equal(rank.memory, world.expected(rank, world.held()))


@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(world=small_worlds, post=posts, stops=stops_of_layers, data=st.data())
async def test_over_memory(world: World, post: int, stops: tuple[int, ...], data: st.DataObject) -> None:
    scatter(world, data)
    both = dataclasses.replace(MemoryBackend.capabilities, memory_kinds=frozenset({"DRAM", "VRAM"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryBackend, "capabilities", both)
        await transfer(world, "memory", bytes_per_post=post, stops=stops)
    assert_arrived(world)


@settings(max_examples=examples(20), suppress_health_check=list(HealthCheck))
@given(world=small_worlds, post=posts)
async def test_what_is_all_in_one_place_is_packed_there(world: World, post: int) -> None:
    """This also holds if the allocations give the location, and not the layout."""
    for number, rank in enumerate((*world.prefill.values(), *world.decode.values())):
        rank.move(rank.memory.ctypes.data)
        rank.scatter([Location("DRAM", number)] * 3)
    world.compute()
    found = await transfer(world, "memory", bytes_per_post=post, packing="always")
    assert found.direct_posts == 0
    assert_arrived(world)


class Calls(NamedTuple):
    """Calls of NIXL: registered memory and writes, with the memory kind of each.

    Attributes:
        registered: Address, length and device of each range, by kind.
        written: Rows and kind of each end of each write by addresses.
        prepared: Rows and kind of each prepared list.
    """

    registered: dict[str, list[tuple[int, int, int]]]
    written: list[tuple[Any, str]]
    prepared: list[tuple[Any, str]]

    def check(self) -> None:
        """Check that all writes use memory with the kind and device with which it was registered."""
        for rows, kind in (*self.written, *self.prepared):
            for address, length, device, *_ in rows.tolist():
                assert any(
                    start <= address and address + length <= start + size and device == owner
                    for start, size, owner in self.registered[kind]
                )


@contextmanager
def host_memory_of_any_kind() -> Iterator[Calls]:
    """Make NIXL treat all memory as host memory, and record the kinds that it was called with."""
    agent = load(None).nixl_agent
    calls = Calls({"DRAM": [], "VRAM": []}, [], [])
    register, describe, prepare = agent.register_memory, agent.get_xfer_descs, agent.prep_xfer_dlist

    def registered(self: Any, rows: Any, kind: str) -> Any:
        calls.registered[kind] += [row[:3] for row in rows]
        return register(self, rows, "DRAM")

    def described(self: Any, rows: Any, kind: str) -> Any:
        calls.written.append((rows, kind))
        return describe(self, rows, "DRAM")

    def prepared(self: Any, peer: str, rows: Any, kind: str) -> Any:
        calls.prepared.append((rows, kind))
        return prepare(self, peer, rows, "DRAM")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent, "register_memory", registered)
        patch.setattr(agent, "get_xfer_descs", described)
        patch.setattr(agent, "prep_xfer_dlist", prepared)
        yield calls


PLACES = {
    "states on the host": ((GPU, GPU, HOST), (GPU, GPU, HOST)),
    "decode all on the host": ((GPU, GPU, HOST), (HOST, HOST, HOST)),
    "nothing alike": ((GPU, HOST, OTHER_GPU), (HOST, GPU, GPU)),
}


@pytest.mark.host_memory
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES.keys())
async def test_last_chunk_is_a_write_for_each_location(places: tuple[list[Location], list[Location]]) -> None:
    """Pages, window and state in the same location share one write."""
    with host_memory_of_any_kind() as calls:
        async with bench("nixl", *places) as ranks, anyio.create_task_group() as tasks:
            tasks.start_soon(ranks.send, WANTED)
            await ranks.receive(WANTED)
            ranks.assert_arrived(WANTED)
    calls.check()
    ends = {(source.memory_kind, target.memory_kind) for source, target in zip(*places, strict=True)}
    told = [kind for _, kind in (*calls.prepared, *calls.written)]
    assert set(zip(told[::2], told[1::2], strict=True)) == ends


@settings(max_examples=examples(12), suppress_health_check=list(HealthCheck))
@given(world=small_worlds, post=posts, stops=stops_of_layers, data=st.data())
async def test_over_nixl(world: World, post: int, stops: tuple[int, ...], data: st.DataObject) -> None:
    """Each kind is registered by itself, and no write mixes two kinds at one end."""
    scatter(world, data)
    with host_memory_of_any_kind() as calls:
        await transfer(world, "nixl", bytes_per_post=post, stops=stops)
    assert_arrived(world)
    calls.check()
    ranks = (*world.prefill.values(), *world.decode.values())
    kinds = {location.memory_kind for rank in ranks for location in rank.layout.registered_locations}
    assert {kind for kind, ranges in calls.registered.items() if ranges} == kinds
