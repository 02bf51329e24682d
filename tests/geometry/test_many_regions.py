"""What layouts of many separately allocated regions cost when two ranks meet, counted without a clock."""

import math

import msgspec

from kvflow.geometry.binding import bind_route
from kvflow.geometry.blocks import RouteBlocks
from kvflow.geometry.layout import MAX_REGIONS, Component, KVLayout, Region
from kvflow.geometry.memory import MemoryRange
from kvflow.geometry.routes import compile_routes
from kvflow.packing.copier import HostCopier
from kvflow.packing.staging import StagingMemory
from tests.support.steps import num_steps

STAGING = StagingMemory(4_096, HostCopier())


def many(num_regions: int, first: int) -> KVLayout:
    regions = [
        Region("k", layer, first + 8_192 * layer, 1, 64, 1, 64, (0, 1), 64, 64, "uint8") for layer in range(num_regions)
    ]
    allocations = tuple(MemoryRange(region.address, 64) for region in regions)
    return KVLayout((Component("kv", tuple(regions)),), "many", allocations)


def handshake(num_regions: int) -> None:
    """Do what both ranks do with each other's layouts, except for what their transport does."""
    prefill, decode = (many(num_regions, first) for first in (2**40, 2**41))
    decode = STAGING.added_to(decode)
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(decode), type=KVLayout)
    (route,) = compile_routes({0: prefill}, decode, decode_rank=0)
    assert bind_route(route, prefill, decode).expected
    bound = bind_route(route, prefill, told)
    RouteBlocks.from_route(bound)


def test_the_cost_of_a_handshake_does_not_grow_faster_than_its_regions() -> None:
    most, fewer = MAX_REGIONS, MAX_REGIONS // 4
    growth = num_steps(lambda: handshake(most)) / num_steps(lambda: handshake(fewer))
    assert growth <= most * math.log(most) / (fewer * math.log(fewer))
