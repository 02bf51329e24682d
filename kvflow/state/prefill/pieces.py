"""Splitting the wanted part of a chunk into pieces, each with its own number, write and notice. Pure.

The last piece of the last chunk ends the transfer. The pieces of a delivery are sent in order, so only the first needs
to wait for an event that all of them depend on.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvflow.geometry.expected import expected_bytes
from kvflow.geometry.pages import WIRE_PAGES, count_runs
from kvflow.geometry.ranges import ALL_LAYERS, LayerRange, TokenRange
from kvflow.state.effects import Cost
from kvflow.state.events import Chunk, PeerRoute, ReadyEvent
from kvflow.wire.messages import Grant

__all__ = ["ChunkPart", "cost_of", "resume_at", "split_chunk"]


class ChunkPart(NamedTuple):
    """A part of a chunk that is written separately.

    Attributes:
        ranges: Tokens by component.
        ready: Event to wait for before its pages may be read, or None.
        num_bytes: Bytes that the part takes.
        layers: Layers of the part.
        last: Whether this is the last part of the transfer.
    """

    ranges: Mapping[str, TokenRange]
    ready: ReadyEvent | None
    num_bytes: int
    layers: LayerRange = ALL_LAYERS
    last: bool = False


def split_chunk(
    chunk: Chunk, ranges: Mapping[str, TokenRange], grant: Grant, wanted: Mapping[str, TokenRange], link: PeerRoute
) -> list[ChunkPart]:
    """Split a chunk by layers if they become ready separately and are large enough, else by tokens if it is large.

    Components in different memory (states on the host, pages on a device) are split separately, because a write has one
    location at each end.

    Args:
        chunk: Chunk from the engine.
        ranges: Tokens of the chunk that the decode rank wants, by component; none is empty. Without any there is one
            part, which takes nothing.
        grant: Grant of the decode rank.
        wanted: All tokens of the transfer that the decode rank wants and this rank holds, by component.
        link: Route to the decode rank.
    """
    parts = [ChunkPart(ranges, None, 0)] if not ranges else []
    for group in link.route.by_location(ranges):
        parts += _split_group(chunk, group, grant, wanted, link)
    if chunk.last:
        parts[-1] = parts[-1]._replace(last=True)
    return parts


def cost_of(part: ChunkPart, link: PeerRoute, max_descriptor_bytes: int | None) -> Cost:
    """Return the credit that a part takes from its peer's window, without planning it.

    Args:
        part: Part of a chunk.
        link: Route to the decode rank.
        max_descriptor_bytes: Longest descriptor that the transport accepts; None for no limit.
    """
    num_descriptors = part.num_bytes // max_descriptor_bytes if max_descriptor_bytes else 0
    for name, (start, stop) in part.ranges.items():
        num_descriptors += link.route.max_descriptors(name, stop - start, part.layers)
    return Cost(part.num_bytes, num_descriptors)


def resume_at(chunk: Chunk, ranges: Mapping[str, TokenRange]) -> int:
    """Return the token from which chunks must be sent again to include these ranges of a chunk.

    This is the first token of the ranges. If a range is not counted like the chunk's tokens, as for a window or a slot,
    the whole chunk must be sent again.
    """
    start, first = chunk.tokens
    for name, tokens in ranges.items():
        if chunk.ranges[name] != chunk.tokens:
            return start
        first = min(first, tokens[0])
    return first if ranges else start


def _split_group(
    chunk: Chunk, ranges: dict[str, TokenRange], grant: Grant, wanted: Mapping[str, TokenRange], link: PeerRoute
) -> list[ChunkPart]:
    """Split the components of a chunk in one location on each side."""
    expected = link.route.expected
    num_bytes = expected_bytes(expected, ranges, wanted)
    policy = link.split_policy.choose(
        num_bytes, lambda: sum(_count_runs(chunk, name, tokens, grant) for name, tokens in ranges.items())
    )
    ready = chunk.ready
    if chunk.layers:
        groups = policy.split_layers([group.stop for group in chunk.layers], ranges, wanted)
        if len(groups) > 1:
            return [
                ChunkPart(ranges, chunk.layers[group].ready, expected_bytes(expected, ranges, wanted, layers), layers)
                for layers, group in groups
            ]
        ready = chunk.layers[groups[0].group].ready
    if num_bytes <= policy.piece_bytes:
        return [ChunkPart(ranges, ready, num_bytes)]
    return [
        ChunkPart(split, None if number else ready, expected_bytes(expected, split, wanted))
        for number, split in enumerate(policy.split_tokens(ranges, wanted))
    ]


def _count_runs(chunk: Chunk, name: str, tokens: TokenRange, grant: Grant) -> float:
    """Estimate the number of page runs that hold tokens of one component on both sides; infinite if unknown.

    The granted pages are not validated yet, so their pages are assumed to have equal numbers of tokens.
    """
    table, granted = chunk.pages.get(name), grant.pages.get(name, b"")
    start, stop = grant.ranges[name]
    if table is None or not granted or len(granted) % WIRE_PAGES.itemsize:
        return math.inf
    pages = np.frombuffer(granted, WIRE_PAGES)
    first, last = (len(pages) * (token - start) / (stop - start) for token in tokens)
    return count_runs(table.pages) + count_runs(pages[math.floor(first) : math.ceil(last)])
