"""What becomes of a chunk that a decode rank wants: pieces, each with a number, a write and a notice of its own. Pure.

What is said of the chunk as a whole is said of one of its pieces: the last one ends the transfer and carries the
metadata. The pieces of a delivery go in order, so that what all of them wait for is waited for by the first.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from kvflow.geometry.cutting import Cutting
from kvflow.geometry.layers import ALL_LAYERS, LayerRange
from kvflow.geometry.pages import WIRE_PAGES, count_runs
from kvflow.geometry.tokens import TokenRange
from kvflow.state.events import Chunk, ReadyEvent
from kvflow.wire.messages import Grant

__all__ = ["Piece", "pieces_of", "runs_of_part"]


class Piece(NamedTuple):
    """A part of a chunk that is written by itself.

    Attributes:
        ranges: By component, its tokens.
        chunk: What it was cut from, with all of its pages; `ready`, `last` and `metadata` are those of the piece.
        layers: Its layers.
    """

    ranges: Mapping[str, TokenRange]
    chunk: Chunk
    layers: LayerRange = ALL_LAYERS


def pieces_of(
    chunk: Chunk, ranges: Mapping[str, TokenRange], wanted: Mapping[str, TokenRange], cutting: Cutting | None
) -> list[Piece]:
    """Cut a chunk between its layers if they get ready apart and are worth it, else along its tokens if it is large.

    Args:
        chunk: From the engine.
        ranges: By component, what of it the decode rank wants.
        wanted: By component, all that the decode rank wants of the transfer.
        cutting: How chunks for it are cut; they go whole if None.
    """
    ready = chunk.layers[-1].ready if chunk.layers else chunk.ready
    if cutting is None or not ranges:
        return [Piece(ranges, _at(chunk, ready))]
    if chunk.layers:
        groups = cutting.join([group.stop for group in chunk.layers], ranges, wanted)
        if len(groups) > 1:
            parts = [_at(chunk, chunk.layers[group].ready, last=layers[1] is None) for layers, group in groups]
            return [Piece(ranges, part, layers) for part, (layers, _) in zip(parts, groups, strict=True)]
        ready = chunk.layers[groups[0].group].ready
    cuts = cutting.cut(ranges, wanted)
    ends = len(cuts) - 1
    return [Piece(cut, _at(chunk, None if number else ready, last=number == ends)) for number, cut in enumerate(cuts)]


def runs_of_part(chunk: Chunk, name: str, tokens: TokenRange, grant: Grant) -> float:
    """Estimate the runs of pages in which tokens of one component lie on both sides; infinite if that is not known.

    The granted pages are not checked yet. Their runs are taken to lie evenly over the tokens.
    """
    table, granted = chunk.pages.get(name), grant.pages.get(name, b"")
    start, stop = grant.ranges[name]
    if table is None or not granted or len(granted) % WIRE_PAGES.itemsize:
        return math.inf
    there = count_runs(np.frombuffer(granted, WIRE_PAGES)) * (tokens[1] - tokens[0]) / (stop - start)
    return count_runs(table.pages) + there


def _at(chunk: Chunk, ready: ReadyEvent | None, *, last: bool = True) -> Chunk:
    """Say of a piece what is said of its chunk."""
    if last and ready is chunk.ready and not chunk.layers:
        return chunk
    is_last = chunk.last and last
    metadata = chunk.metadata if is_last else b""
    return replace(chunk, ready=ready, layers=(), last=is_last, metadata=metadata)
