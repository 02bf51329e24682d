"""Who sends what to whom in a drawn world, as kvflow works it out."""

from collections.abc import Iterator
from typing import NamedTuple

from kvflow.geometry import BoundRoute, Route, bind_route, compile_routes
from tests.support.worlds import Rank, World

__all__ = ["Link", "links"]


class Link(NamedTuple):
    """A prefill rank and a decode rank, and what goes from one to the other."""

    route: Route
    bound: BoundRoute
    source: Rank
    target: Rank


def links(world: World) -> Iterator[Link]:
    """Every pair of ranks, one decode rank after another."""
    layouts = {engine_rank: rank.layout for engine_rank, rank in world.prefill.items()}
    for decode_rank, target in world.decode.items():
        for route in compile_routes(layouts, target.layout, decode_rank=decode_rank):
            source = world.prefill[route.engine_rank]
            yield Link(route, bind_route(route, source.layout, target.layout), source, target)
