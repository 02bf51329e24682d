"""What becomes of a chunk that a decode rank wants: pieces, each with a number, a write and a notice of its own. Pure.

What is said of the chunk as a whole is said of one of its pieces: the last one ends the transfer and carries the
metadata. The pieces of a delivery go in order, so that what all of them wait for is waited for by the first.
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
    """A part of a chunk that is written by itself.

    Attributes:
        ranges: By component, its tokens.
        ready: What to wait for before its pages may be read, or None.
        last: Nothing follows.
        metadata: To be delivered with the last one.
        layers: Its layers.
    """

    ranges: Mapping[str, TokenRange]
    ready: ReadyEvent | None
    last: bool
    metadata: bytes
    layers: LayerRange = ALL_LAYERS


def split_chunk(
    chunk: Chunk, ranges: Mapping[str, TokenRange], grant: Grant, wanted: Mapping[str, TokenRange], link: PeerRoute
) -> list[ChunkPart]:
    """Split a chunk between its layers if they get ready apart and are worth it, else along its tokens if it is large.

    What lies in other memory (states on the host, pages on a device) is split by itself: a write has one location at
    each end.

    Args:
        chunk: From the engine.
        ranges: By component, what of it the decode rank wants; none is empty.
        grant: Of the decode rank.
        wanted: By component, all that it wants of the transfer and this rank has.
        link: The route to it.
    """
    if not ranges:
        return [_part(chunk, ranges, _ready(chunk))]
    groups = link.route.by_location(ranges)
    end = len(groups) - 1
    return [
        part
        for number, group in enumerate(groups)
        for part in _split_group(chunk, group, grant, wanted, link, is_end=number == end)
    ]


def cost_of(
    part: ChunkPart, wanted: Mapping[str, TokenRange], link: PeerRoute, max_descriptor_bytes: int | None
) -> Cost:
    """Return what a part takes of its peer's window, without planning it.

    Args:
        part: Of a chunk.
        wanted: By component, all that the decode rank wants of the transfer and this rank has.
        link: The route to it.
        max_descriptor_bytes: Longest descriptor that the transport takes; no limit if None.
    """
    num_bytes = expected_bytes(link.route.expected, part.ranges, wanted, part.layers)
    num_descriptors = sum(
        link.route.max_descriptors(name, stop - start, part.layers) for name, (start, stop) in part.ranges.items()
    )
    num_splits = num_bytes // max_descriptor_bytes if max_descriptor_bytes else 0
    return Cost(num_bytes, num_descriptors + num_splits)


def resume_at(chunk: Chunk, ranges: Mapping[str, TokenRange]) -> int:
    """Say from which token chunks must come again for some ranges of one to come with them.

    That is the first of them, unless it is counted otherwise than the tokens of the chunk, as those of a window or a
    slot are: then the whole chunk must come again.
    """
    start, _ = chunk.tokens
    firsts = [first for name, (first, _) in ranges.items() if chunk.ranges[name] == chunk.tokens]
    return min(firsts) if firsts and len(firsts) == len(ranges) else start


def _split_group(
    chunk: Chunk,
    ranges: dict[str, TokenRange],
    grant: Grant,
    wanted: Mapping[str, TokenRange],
    link: PeerRoute,
    *,
    is_end: bool,
) -> list[ChunkPart]:
    """Split the part of a chunk that is in one location on both sides; `is_end` if nothing of the chunk follows."""
    policy = link.split_policy.choose(
        ranges, wanted, lambda: sum(_count_runs(chunk, name, tokens, grant) for name, tokens in ranges.items())
    )
    ready = chunk.ready
    if chunk.layers:
        groups = policy.split_layers([group.stop for group in chunk.layers], ranges, wanted)
        if len(groups) > 1:
            return [
                _part(chunk, ranges, chunk.layers[group].ready, layers, is_end=is_end and layers[1] is None)
                for layers, group in groups
            ]
        ready = chunk.layers[groups[0].group].ready
    splits = policy.split_tokens(ranges, wanted)
    last = len(splits) - 1
    return [
        _part(chunk, split, None if number else ready, is_end=is_end and number == last)
        for number, split in enumerate(splits)
    ]


def _ready(chunk: Chunk) -> ReadyEvent | None:
    return chunk.layers[-1].ready if chunk.layers else chunk.ready


def _part(
    chunk: Chunk,
    ranges: Mapping[str, TokenRange],
    ready: ReadyEvent | None,
    layers: LayerRange = ALL_LAYERS,
    *,
    is_end: bool = True,
) -> ChunkPart:
    """Describe one part of a chunk; only the last part of the last chunk ends the request and has its metadata."""
    is_last = chunk.last and is_end
    return ChunkPart(ranges, ready, is_last, chunk.metadata if is_last else b"", layers)


def _count_runs(chunk: Chunk, name: str, tokens: TokenRange, grant: Grant) -> float:
    """Estimate the runs of pages in which tokens of one component lie on both sides; infinite if that is not known.

    The granted pages are not checked yet. Their runs are taken to lie evenly over the tokens.
    """
    table, granted = chunk.pages.get(name), grant.pages.get(name, b"")
    start, stop = grant.ranges[name]
    if table is None or not granted or len(granted) % WIRE_PAGES.itemsize:
        return math.inf
    there = count_runs(np.frombuffer(granted, WIRE_PAGES)) * (tokens[1] - tokens[0]) / (stop - start)
    return count_runs(table.pages) + there
