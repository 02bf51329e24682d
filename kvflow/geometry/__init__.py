"""What memory looks like, and which bytes go where. Pure: no I/O, no clock, no torch (but for `tensors`)."""

from kvflow.geometry.layout import Component, KVLayout, MemoryRange, Region, RegionKey, TokenShard
from kvflow.geometry.pages import PageTable, TokenRange, check_page_table, pages_spanned
from kvflow.geometry.plan import Descriptors, plan
from kvflow.geometry.routes import BoundRoute, Route, RoutePiece, bind_route, compile_routes
from kvflow.geometry.shards import head_range

__all__ = [
    "BoundRoute",
    "Component",
    "Descriptors",
    "KVLayout",
    "MemoryRange",
    "PageTable",
    "Region",
    "RegionKey",
    "Route",
    "RoutePiece",
    "TokenRange",
    "TokenShard",
    "bind_route",
    "check_page_table",
    "compile_routes",
    "head_range",
    "pages_spanned",
    "plan",
]
