"""Routes and plans of kvflow between the ranks of a drawn world."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from kvflow.geometry import (
    BoundRoute,
    ComponentSlice,
    Route,
    TokenPages,
    TokenRange,
    bind_route,
    build_page_table,
    compile_routes,
    plan,
)
from kvflow.geometry.ranges import ALL_LAYERS, LayerRange
from tests.support.worlds import Rank, World, execute

__all__ = ["Link", "bytes_of", "chunk_slices", "links", "max_descriptors", "send"]


class Link(NamedTuple):
    """A prefill rank and a decode rank, with the route between them."""

    route: Route
    bound: BoundRoute
    source: Rank
    target: Rank


def links(world: World) -> Iterator[Link]:
    """Yield every pair of ranks, grouped by decode rank."""
    layouts = {engine_rank: rank.layout for engine_rank, rank in world.prefill.items()}
    for decode_rank, target in world.decode.items():
        for route in compile_routes(layouts, target.layout, decode_rank=decode_rank):
            source = world.prefill[route.engine_rank]
            yield Link(route, bind_route(route, source.layout, target.layout), source, target)


def bytes_of(bound: BoundRoute, component: str, tokens: TokenRange, *, final: bool) -> int:
    """Return the bytes that a token range of a component takes; 0 if the route does not have it."""
    return bound.expected[component].num_bytes(tokens, final=final) if component in bound.expected else 0


def max_descriptors(bound: BoundRoute, ranges: Mapping[str, TokenRange], layers: LayerRange = ALL_LAYERS) -> int:
    """Return the upper bound for the descriptors of some tokens and layers."""
    tokens = {name: stop - start for name, (start, stop) in ranges.items()}
    groups = [group for group in bound.copy_groups if group.component in tokens]
    return sum(group.max_descriptors(tokens[group.component], layers) for group in groups)


def chunk_slices(world: World, bound: BoundRoute, source: Rank, target: Rank) -> Iterator[tuple[str, ComponentSlice]]:
    """Yield each chunk that goes from one rank to another, with the name of its component."""
    for name in bound.expected:
        start, stop = world.wanted[name]
        dst = build_page_table(
            target.layout.component(name), TokenPages((start, stop), target.pages(name, (start, stop)))
        )
        for chunk in pairwise([start, *world.cuts[name], stop]):
            src = build_page_table(source.layout.component(name), TokenPages(chunk, source.pages(name, chunk)))
            yield name, ComponentSlice(chunk, src, dst, final=chunk[1] == stop)


def send(world: World, bound: BoundRoute, source: Rank, target: Rank) -> None:
    """Plan and execute each chunk of each component."""
    for name, component in chunk_slices(world, bound, source, target):
        assert len(plan(bound, {name: component}).src) <= max_descriptors(bound, {name: component.tokens})
        descriptors = plan(bound, {name: component}, max_bytes=7)
        assert descriptors.num_bytes == bytes_of(bound, name, component.tokens, final=component.final)
        assert int(descriptors.src[:, 1].max(initial=0)) <= 7
        execute(descriptors, source, target)
