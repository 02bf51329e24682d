"""Splitting the wanted part of a chunk into pieces, each with its own number, write and notice. Pure.

The last piece of the last chunk ends the transfer. The pieces of a delivery are sent in order, so only the first needs
to wait for an event that all of them depend on.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from kvflow.geometry.expected import expected_bytes
from kvflow.geometry.pages import PageTable, count_runs
from kvflow.geometry.ranges import ALL_LAYERS, LayerRange, TokenRange
from kvflow.state.effects import Cost
from kvflow.state.events import Chunk, PeerRoute, ReadyEvent

__all__ = ["ChunkPart", "cost_of", "resume_at", "split_chunk"]


class ChunkPart(NamedTuple):
    """A part of a chunk that is written separately, once its event, if any, has fired; `last` ends the transfer."""

    ranges: Mapping[str, TokenRange]
    ready: ReadyEvent | None
    num_bytes: int
    layers: LayerRange = ALL_LAYERS
    last: bool = False


def split_chunk(
    chunk: Chunk,
    ranges: Mapping[str, TokenRange],
    wanted: Mapping[str, TokenRange],
    granted: Mapping[str, PageTable],
    link: PeerRoute,
) -> list[ChunkPart]:
    """Split a chunk by layers if they become ready separately and are large enough, else by tokens if it is large.

    Components in different memory (states on the host, pages on a device) are split separately, because a write has one
    location at each end.

    `ranges` are the tokens of the chunk that the decode rank wants; none is empty, and without any there is one part,
    which takes nothing. `wanted` are all such tokens of the transfer that this rank holds, and `granted` their pages.
    """
    parts = [ChunkPart(ranges, None, 0)] if not ranges else []
    for names in link.route.in_one_write:
        group = {name: ranges[name] for name in names if name in ranges}
        if group:
            parts += _split_group(chunk, group, wanted, granted, link)
    if chunk.last:
        parts[-1] = parts[-1]._replace(last=True)
    return parts


def cost_of(part: ChunkPart, link: PeerRoute, max_descriptor_bytes: int | None) -> Cost:
    """Return the credit that a part takes from its peer's window, without planning it."""
    num_descriptors = part.num_bytes // max_descriptor_bytes if max_descriptor_bytes else 0
    for group in link.route.copy_groups:
        start, stop = part.ranges.get(group.component, (0, 0))
        if start < stop:
            num_descriptors += group.max_descriptors(stop - start, part.layers)
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
    chunk: Chunk,
    ranges: Mapping[str, TokenRange],
    wanted: Mapping[str, TokenRange],
    granted: Mapping[str, PageTable],
    link: PeerRoute,
) -> list[ChunkPart]:
    """Split the components of a chunk in one location on each side."""
    expected = link.route.expected
    num_bytes = expected_bytes(expected, ranges, wanted)
    policy = link.split_policy
    if policy.direct is not None and num_bytes > policy.piece_bytes:  # else it is not split by either policy
        policy = policy.choose(num_bytes, _count_runs(chunk, ranges, wanted, granted))
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


def _count_runs(
    chunk: Chunk,
    ranges: Mapping[str, TokenRange],
    wanted: Mapping[str, TokenRange],
    granted: Mapping[str, PageTable],
) -> float:
    """Estimate the number of runs of pages that hold some tokens on both sides, as if all pages held equally many."""
    num_runs = 0
    for name, tokens in ranges.items():
        start, stop = wanted[name]
        pages = granted[name].pages
        first, last = (len(pages) * (token - start) / (stop - start) for token in tokens)
        num_runs += count_runs(chunk.pages[name].pages) + count_runs(pages[math.floor(first) : math.ceil(last)])
    return num_runs
