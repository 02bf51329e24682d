"""One rank's memory in several places: pages on a device, states on the host."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray

from kvflow.errors import LayoutError
from kvflow.geometry import (
    Axes,
    BufferLists,
    Component,
    ComponentSlice,
    KVLayout,
    Location,
    MemoryRange,
    OpaqueItem,
    PagePart,
    PageTable,
    Region,
    RouteBlocks,
    bind_route,
    compile_routes,
    layout_from_pointers,
    plan,
    regions_from_pointers,
    tensors,
)
from kvflow.geometry.memory import merge_ranges
from kvflow.geometry.strided import Strided, strided
from tests.support.links import chunk_slices, links
from tests.support.worlds import World, execute, worlds

HOST, GPU, OTHER_GPU = Location("DRAM", 0), Location("VRAM", 1), Location("VRAM", 2)

every_location = st.sampled_from([HOST, GPU, OTHER_GPU])


def region(tensor: str, address: int) -> Region:
    return Region(tensor, 0, address, 4, 16, 4, 4, (0, 1), 4, 4, "uint8")


def two_places() -> KVLayout:
    """Return a layout with pages at 4096 on a GPU and states at 8192 on the host."""
    components = (
        Component("kv", (region("k", 4096),)),
        Component("state", (region("ssm", 8192),), kind="slot"),
    )
    allocations = (MemoryRange(4096, 64), MemoryRange(8192, 64, HOST))
    return KVLayout(components, "m", allocations, memory_kind="VRAM", device_id=1)


def test_allocations_say_where_they_are_if_not_where_the_layout_says() -> None:
    layout = two_places()
    assert layout.locations == {"kv": GPU, "state": HOST}
    assert layout.registered_locations == {GPU, HOST}
    assert not layout.is_on_host
    assert replace(layout, memory_kind="DRAM").is_on_host


def test_locations_survive_the_wire() -> None:
    layout = two_places()
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=KVLayout)
    assert (decoded, decoded.locations) == (layout, layout.locations)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([4096, 64]), type=MemoryRange) == MemoryRange(4096, 64)


def test_a_component_is_in_one_location() -> None:
    component = Component("kv", (region("k", 4096), region("v", 8192)))
    with pytest.raises(LayoutError, match="in the same kind of memory") as error:
        KVLayout((component,), "m", (MemoryRange(4096, 64, GPU), MemoryRange(8192, 64, HOST)))
    assert error.value.values == {"component": "kv", "found": [HOST, GPU]}


@pytest.mark.parametrize("location", [Location("TAPE", 0), Location("VRAM", -1)])
def test_impossible_locations_are_refused(location: Location) -> None:
    with pytest.raises(LayoutError):
        KVLayout((Component("kv", (region("k", 4096),)),), "m", (MemoryRange(4096, 64, location),))


def test_memory_of_two_locations_cannot_overlap() -> None:
    with pytest.raises(LayoutError, match="memory ranges in different locations overlap"):
        merge_ranges([MemoryRange(0, 10, GPU), MemoryRange(5, 10, HOST)])
    joined = [MemoryRange(0, 10, GPU), MemoryRange(5, 10, GPU), MemoryRange(20, 1, HOST), MemoryRange(20, 1, HOST)]
    assert merge_ranges(joined) == (MemoryRange(0, 15, GPU), MemoryRange(20, 1, HOST))


def test_pointer_lists_say_where_their_buffers_are() -> None:
    pages, states = BufferLists([4096], [64], [16]), BufferLists([8192, 0], [64, 0], [16, 0], HOST)
    components = [
        Component("kv", regions_from_pointers(pages, [[PagePart("k", 4, "uint8")]], page_size=4, layers=[0])),
        Component("s", regions_from_pointers(states, [OpaqueItem("s")], page_size=1, layers=[0, 1]), kind="slot"),
    ]
    layout = layout_from_pointers(components, "m", buffers=[pages, states], memory_kind="VRAM", device_id=1)
    assert layout.locations == {"kv": GPU, "s": HOST}
    assert [part.location for part in states.split(1)] == [HOST, HOST]


def test_tensors_say_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host pool stands in for one on a GPU."""
    pages, states = np.zeros((4, 4, 2), np.float32), np.zeros((3, 5), np.float32)

    def pretend(pool: Any) -> Strided:
        found = strided(pool)
        return found._replace(device=("cuda", 1)) if pool is pages else found

    monkeypatch.setattr(tensors, "strided", pretend)
    components = [
        Component("kv", tensors.regions_from_tensors("k", [pages], Axes("page token dim"))),
        Component("state", tensors.regions_from_tensors("ssm", [states], Axes("slot dim")), kind="slot"),
    ]
    for pools in ([pages, states], [states, pages]):
        layout = tensors.layout_from_components(components, "m", tensors=pools)
        assert layout.locations == {"kv": GPU, "state": HOST}
    two_devices: dict[str, list[NDArray[Any]]] = {"k": [pages], "v": [states]}
    with pytest.raises(LayoutError, match="on the same device"):
        tensors.layout_from_tensors(two_devices, axes="page dim", heads=(0, 1), fingerprint="m", page_size=1)
    with pytest.raises(LayoutError, match="tensors must not be empty"):
        tensors.layout_from_components(components, "m", tensors=[])


@pytest.mark.timeout(0)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(worlds(), st.data())
def test_each_write_has_one_location_at_each_end(world: World, data: st.DataObject) -> None:
    """For any layouts and locations, everything arrives, and each descriptor names the right device."""
    for rank in (*world.prefill.values(), *world.decode.values()):
        rank.scatter(data.draw(st.tuples(*[every_location] * 3)))
    world.compute()
    for _, bound, source, target in links(world):
        blocks = RouteBlocks.from_route(bound)
        for name, component in chunk_slices(world, bound, source, target):
            ends = (source.layout.locations[name], target.layout.locations[name])
            descriptors = plan(bound, {name: component})
            found = None if blocks is None else blocks.plan({name: component})
            for moves in [descriptors] if found is None else [found.descriptors(), descriptors]:
                for rows, end in zip(moves, ends, strict=True):
                    assert set(rows[:, 2].tolist()) <= {end.device_id}
                execute(moves, source, target)
        assert sorted(name for part in bound.in_one_write for name in part) == sorted(bound.expected)
        for part in bound.in_one_write:
            assert len({(source.layout.locations[name], target.layout.locations[name]) for name in part}) == 1
    world.assert_arrived()


def test_blocks_of_several_locations_are_not_one_plan() -> None:
    layout = two_places()
    target = replace(layout, allocations=(MemoryRange(4096, 64), MemoryRange(8192, 64)))
    (route,) = compile_routes({0: layout}, target, decode_rank=0)
    blocks = RouteBlocks.from_route(bind_route(route, layout, target))
    assert blocks is not None
    pages = PageTable(np.array([1], np.uint32), 0, 4)
    kv, state = ({name: ComponentSlice((0, 4), pages, pages)} for name in ("kv", "state"))
    assert blocks.plan({**kv, **state}) is None
    plans = [blocks.plan(part) for part in (kv, state)]
    assert [one and (one.lists.src[0, 2], one.lists.dst[0, 2]) for one in plans] == [(1, 1), (0, 1)]
