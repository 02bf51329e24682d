"""Memory layouts, and which bytes go where. Pure: no I/O, no clock, no torch."""

from kvflow.geometry.axes import Axes
from kvflow.geometry.binding import BoundRoute, bind_route
from kvflow.geometry.blocks import BlockLists, Blocks, RouteBlocks
from kvflow.geometry.digest import DigestScope, digest
from kvflow.geometry.engines import (
    HeadSlice,
    group_concurrent_contiguous,
    head_range,
    head_slice,
    prompt_tokens,
    ring_pages,
    shard_pages,
    stage_slices,
    total_heads,
    window_tokens,
)
from kvflow.geometry.layout import Component, KVLayout, Region, RegionKey
from kvflow.geometry.memory import Location, MemoryRange
from kvflow.geometry.pages import PageTable, TokenPages, build_page_table
from kvflow.geometry.parts import OpaqueItem, PagePart, PageRows
from kvflow.geometry.plan import ComponentSlice, Descriptors, plan
from kvflow.geometry.pointers import BufferLists, buffers_of, layout_from_pointers, regions_from_pointers
from kvflow.geometry.ranges import TokenRange, TokenShard
from kvflow.geometry.routes import RegionSlice, Route, compile_routes

__all__ = [
    "Axes",
    "BlockLists",
    "Blocks",
    "BoundRoute",
    "BufferLists",
    "Component",
    "ComponentSlice",
    "Descriptors",
    "DigestScope",
    "HeadSlice",
    "KVLayout",
    "Location",
    "MemoryRange",
    "OpaqueItem",
    "PagePart",
    "PageRows",
    "PageTable",
    "Region",
    "RegionKey",
    "RegionSlice",
    "Route",
    "RouteBlocks",
    "TokenPages",
    "TokenRange",
    "TokenShard",
    "bind_route",
    "buffers_of",
    "build_page_table",
    "compile_routes",
    "digest",
    "group_concurrent_contiguous",
    "head_range",
    "head_slice",
    "layout_from_pointers",
    "plan",
    "prompt_tokens",
    "regions_from_pointers",
    "ring_pages",
    "shard_pages",
    "stage_slices",
    "total_heads",
    "window_tokens",
]
