"""What memory looks like, and which bytes go where. Pure: no I/O, no clock, no torch (but for `tensors`)."""

from kvflow.geometry.axes import Axes
from kvflow.geometry.blocks import BlockLists, Blocks, RouteBlocks
from kvflow.geometry.digest import Written, digest
from kvflow.geometry.indices import group_concurrent_contiguous, kv_to_page_indices, prompt_tokens, window_tokens
from kvflow.geometry.layout import Component, KVLayout, MemoryRange, Region, RegionKey
from kvflow.geometry.pages import PageTable, Part, check_part, pages_spanned
from kvflow.geometry.plan import Descriptors, Share, plan
from kvflow.geometry.pointers import BufferLists, PagePart, buffers_of, layout_from_pointers, regions_from_pointers
from kvflow.geometry.routes import BoundRoute, Route, RoutePiece, bind_route, compile_routes
from kvflow.geometry.shards import HeadSlice, head_range, head_slice, stage_slices, total_heads
from kvflow.geometry.tokens import TokenRange, TokenShard

__all__ = [
    "Axes",
    "BlockLists",
    "Blocks",
    "BoundRoute",
    "BufferLists",
    "Component",
    "Descriptors",
    "HeadSlice",
    "KVLayout",
    "MemoryRange",
    "PagePart",
    "PageTable",
    "Part",
    "Region",
    "RegionKey",
    "Route",
    "RouteBlocks",
    "RoutePiece",
    "Share",
    "TokenRange",
    "TokenShard",
    "Written",
    "bind_route",
    "buffers_of",
    "check_part",
    "compile_routes",
    "digest",
    "group_concurrent_contiguous",
    "head_range",
    "head_slice",
    "kv_to_page_indices",
    "layout_from_pointers",
    "pages_spanned",
    "plan",
    "prompt_tokens",
    "regions_from_pointers",
    "stage_slices",
    "total_heads",
    "window_tokens",
]
