"""Who sends what to whom in a drawn world, as kvflow works it out."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from kvflow.geometry import BoundRoute, Part, Route, Share, bind_route, check_part, compile_routes
from tests.support.worlds import Rank, World

__all__ = ["Link", "chunk_shares", "links"]


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


def chunk_shares(world: World, bound: BoundRoute, source: Rank, target: Rank) -> Iterator[tuple[str, Share]]:
    """Each chunk of each component that goes from one rank to another, and the component."""
    for name in bound.debts:
        start, stop = world.wanted[name]
        dst = check_part(target.layout.component(name), Part((start, stop), target.pages(name, (start, stop))))
        for chunk in pairwise([start, *world.cuts[name], stop]):
            src = check_part(source.layout.component(name), Part(chunk, source.pages(name, chunk)))
            yield name, Share(chunk, src, dst, closing=chunk[1] == stop)
