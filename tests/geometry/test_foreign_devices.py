"""Tensors of devices that this machine does not have, and of devices without memory."""

from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kvflow import layout_from_tensors
from kvflow.errors import LayoutError
from kvflow.geometry import Axes, Component, KVLayout, Location, MemoryRange
from kvflow.geometry.tensors import layout_from_components, regions_from_tensors, split_tensors
from tests.support.foreign_tensors import tensor_at

SHAPE = (4, 4, 2, 8)
NUM_BYTES = 4 * 4 * 2 * 8 * 4
ORDER = "page token head dim"
NHD = Axes(ORDER, (0, 2))

LOW, HIGH = 0x7F00_1234_0000, 0xFFFF_81AB_54E0_1000


def from_tensors(*pools: torch.Tensor) -> KVLayout:
    return layout_from_tensors({"k": pools}, axes=ORDER, heads=(0, 2), fingerprint="m")


def from_components(*pools: torch.Tensor) -> KVLayout:
    """Describe each pool as a component."""
    components = [Component(f"kv{number}", regions_from_tensors("k", [pool], NHD)) for number, pool in enumerate(pools)]
    return layout_from_components(components, "m", tensors=pools)


@pytest.mark.parametrize("build", [from_tensors, from_components])
@pytest.mark.parametrize("address", [LOW, HIGH], ids=["low", "high"])
def test_a_device_of_an_extension_is_device_memory(build: Callable[..., KVLayout], address: int) -> None:
    pool = tensor_at(address, SHAPE, ordinal=3)
    assert str(pool.device) == "privateuseone:3"
    layout = build(pool)
    assert layout.location == Location("VRAM", 3)
    assert layout.allocations == (MemoryRange(address, NUM_BYTES),)
    assert [region.address for region in layout.regions().values()] == [address]
    assert not layout.is_on_host


@pytest.mark.parametrize("address", [LOW, HIGH], ids=["low", "high"])
def test_layers_and_tensors_of_one_pool_are_found_at_their_addresses(address: int) -> None:
    pool = tensor_at(address, (3, 2, *SHAPE), ordinal=0)
    regions = regions_from_tensors(("k", "v"), [pool], Axes(f"layer kv {ORDER}", (0, 2)))
    assert [region.address for region in regions] == [address + number * NUM_BYTES for number in range(6)]
    assert layout_from_components([Component("kv", regions)], "m", tensors=[pool]).allocations == (
        MemoryRange(address, 6 * NUM_BYTES),
    )


def test_a_component_on_two_devices_is_refused_with_both() -> None:
    pools = [tensor_at(LOW + number * 2**20, SHAPE, ordinal=ordinal) for number, ordinal in enumerate((0, 3))]
    with pytest.raises(LayoutError, match="on the same device") as caught:
        from_tensors(*pools)
    assert caught.value.values["found"] == [("privateuseone", 0), ("privateuseone", 3)]
    regions = regions_from_tensors("k", pools, NHD)
    with pytest.raises(LayoutError, match="on the same device") as caught:
        layout_from_components([Component("kv", regions)], "m", tensors=pools)
    assert caught.value.values["found"] == [Location("VRAM", 0), Location("VRAM", 3)]


def test_each_component_has_its_device() -> None:
    pools = [tensor_at(LOW + number * 2**20, SHAPE, ordinal=ordinal) for number, ordinal in enumerate((3, 0))]
    assert from_components(*pools).locations == {"kv0": Location("VRAM", 3), "kv1": Location("VRAM", 0)}


def on_meta(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, device="meta")


def fake(shape: tuple[int, ...]) -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(shape)


def sparse(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape).to_sparse()


BUILDS: dict[str, Callable[[torch.Tensor], object]] = {
    "tensors": from_tensors,
    "components": from_components,
    "regions": lambda pool: regions_from_tensors("k", [pool], NHD),
    "tensors of a layout": lambda pool: layout_from_components(
        from_tensors(torch.zeros(SHAPE)).components, "m", tensors=[pool]
    ),
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("make", [on_meta, fake, sparse])
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
def test_tensors_without_memory_are_refused(
    build: Callable[[torch.Tensor], object], make: Callable[[tuple[int, ...]], torch.Tensor]
) -> None:
    with pytest.raises(LayoutError, match="memory"):
        build(make(SHAPE))


@pytest.mark.parametrize("part", [0, 1])
def test_views_of_tensors_without_memory_are_refused(part: int) -> None:
    """The address of such a view is its offset, and not 0."""
    view = split_tensors([on_meta((4, 8, 2, 8))], (4, 4), dimension=1)[part][0]
    for build in BUILDS.values():
        with pytest.raises(LayoutError, match="no memory"):
            build(view)
