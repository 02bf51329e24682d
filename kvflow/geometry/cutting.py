"""Where a chunk is cut, so that several writes share it and none of them keeps the others waiting for long.

A chunk whose layers get ready one after another is cut between layers: groups of layers that get ready together are
joined until a piece is worth a write of its own. Each piece waits for its last group only.

Any other large chunk is cut along its tokens. Its components follow each other: a piece takes of the first one as many
pages as fit, then of the next one what still fits, and so on. Cuts fall on page boundaries, and a component that is
addressed by request (a slot) is never cut. So a piece is larger than the limit only if it is a single page, over all
layers, or a single slot.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvflow.geometry.debts import Debt, bytes_owed
from kvflow.geometry.layers import ALL_LAYERS, LayerRange
from kvflow.geometry.layout import Component, KVLayout
from kvflow.geometry.routes import BoundRoute
from kvflow.geometry.tokens import TokenRange, closes

__all__ = ["Cutting", "LayerPiece", "cutting_of"]


class LayerPiece(NamedTuple):
    """Layers of a chunk that go together.

    Attributes:
        layers: Those before `layers[0]` go with earlier pieces.
        group: The number of the group of layers that is ready last.
    """

    layers: LayerRange
    group: int


class Cutting(NamedTuple):
    """How chunks for one peer are cut.

    Attributes:
        debts: What it is owed, by component.
        page_tokens: For each component that can be cut, the tokens of a page, of the side whose pages have more.
        piece_bytes: Most bytes of a piece that is cut along the tokens.
        layer_piece_bytes: Fewest bytes of a piece that is cut between layers, but for the last; None if the peer knows
            no such pieces.
        is_packed: Pieces go through staging slots of `piece_bytes`: a chunk whose layers would not fit is cut along its
            tokens instead.
        direct: How a chunk is cut instead whose pages lie together in long runs; none is if None.
        direct_run_bytes: From so many bytes of the chunk for each run on, they are long.
    """

    debts: Mapping[str, Debt]
    page_tokens: Mapping[str, int]
    piece_bytes: int
    layer_piece_bytes: int | None = None
    is_packed: bool = False
    direct: "Cutting | None" = None
    direct_run_bytes: float = 0.0

    def suiting(
        self, ranges: Mapping[str, TokenRange], wanted: Mapping[str, TokenRange], num_runs: Callable[[], float]
    ) -> "Cutting":
        """Say how a chunk is cut, by how its pages lie.

        Args:
            ranges: By component, the tokens of the chunk.
            wanted: For the same components, all tokens of the transfer.
            num_runs: Counts runs of pages that follow each other on both sides; infinite if that is not known.
        """
        if self.direct is None:
            return self
        num_bytes = self._owed(ranges, wanted, ALL_LAYERS)
        is_small = num_bytes <= self.piece_bytes  # it stays whole either way
        return self if is_small or num_bytes < num_runs() * self.direct_run_bytes else self.direct

    def join(
        self, stops: Sequence[int], ranges: Mapping[str, TokenRange], wanted: Mapping[str, TokenRange]
    ) -> list[LayerPiece]:
        """Join groups of layers into pieces; groups that hold nothing for the peer are not waited for.

        Args:
            stops: For each group, in ascending order, where its layers end; the last one takes all that remain.
            ranges: By component, the tokens of the chunk.
            wanted: For the same components, all tokens of the transfer.

        Returns:
            Pieces, in order, which together cover all layers.
        """
        highest = max((self.debts[name].highest_layer for name in ranges), default=0)
        last = min(bisect_right(stops, highest), len(stops) - 1)
        pieces: list[LayerPiece] = []
        start = at = 0
        while self.layer_piece_bytes is not None:
            at = bisect_left(
                stops, self.layer_piece_bytes, at, last, key=lambda stop: self._owed(ranges, wanted, (start, stop))
            )
            if at == last:
                break
            pieces.append(LayerPiece((start, stops[at]), at))
            start, at = stops[at], at + 1
        pieces.append(LayerPiece((start, None), last))
        if self.is_packed and any(self._owed(ranges, wanted, piece.layers) > self.piece_bytes for piece in pieces):
            return [LayerPiece(ALL_LAYERS, last)]
        return pieces

    def cut(self, ranges: Mapping[str, TokenRange], wanted: Mapping[str, TokenRange]) -> list[dict[str, TokenRange]]:
        """Cut a chunk.

        Args:
            ranges: By component, its tokens.
            wanted: For the same components, all tokens of the transfer.

        Returns:
            Pieces, which together cover what the chunk covers; for each component in order of its tokens.
        """
        if self._owed(ranges, wanted, ALL_LAYERS) <= self.piece_bytes:
            return [dict(ranges)]
        pieces: list[dict[str, TokenRange]] = [{}]
        room = self.piece_bytes
        for name, (start, stop) in ranges.items():
            at = start
            while at < stop:
                end = self._end(name, (at, stop), wanted[name], room)
                if end == at and pieces[-1]:
                    pieces.append({})
                    room = self.piece_bytes
                    continue
                end = max(end, self._least(name, (at, stop)))
                pieces[-1][name] = (at, end)
                room = max(0, room - self._num_bytes(name, (at, end), wanted[name]))
                at = end
                if at < stop:
                    pieces.append({})
                    room = self.piece_bytes
        return pieces

    def within_pages(self, num_bytes: int) -> "Cutting":
        """The same, but cut within pages that are larger than so many bytes: for pieces that are packed."""
        return self._replace(page_tokens={name: self._fitting(name, num_bytes) for name in self.page_tokens})

    def _fitting(self, name: str, num_bytes: int) -> int:
        """Tokens of a page, halved until they fit."""
        debt, size = self.debts[name], self.page_tokens[name]
        grain = math.lcm(*debt.cell_bytes)
        while debt.num_bytes((0, size), closing=True) > num_bytes and size % (2 * grain) == 0:
            size //= 2
        return size

    def _end(self, name: str, tokens: TokenRange, wanted: TokenRange, room: int) -> int:
        """The last place to cut of what fits; the start if not even a page does."""
        start, stop = tokens
        if self._num_bytes(name, tokens, wanted) <= room:
            return stop
        cuts = range(self._least(name, tokens), stop, self.page_tokens[name]) if name in self.page_tokens else range(0)
        num_fitting = bisect_right(cuts, room, key=lambda end: self._num_bytes(name, (start, end), wanted))
        return cuts[num_fitting - 1] if num_fitting else start

    def _least(self, name: str, tokens: TokenRange) -> int:
        """The first place to cut, or the end if there is none."""
        start, stop = tokens
        size = self.page_tokens.get(name, stop)
        return min(start - start % size + size, stop)

    def _owed(self, ranges: Mapping[str, TokenRange], wanted: Mapping[str, TokenRange], layers: LayerRange) -> int:
        return bytes_owed(self.debts, ranges, wanted, layers)

    def _num_bytes(self, name: str, tokens: TokenRange, wanted: TokenRange) -> int:
        return self.debts[name].num_bytes(tokens, closing=closes(tokens, wanted))


def cutting_of(
    route: BoundRoute, src: KVLayout, dst: KVLayout, piece_bytes: int, layer_piece_bytes: int | None = None
) -> Cutting:
    """Say how chunks are cut that go along a route.

    Args:
        route: Bound to both layouts.
        src: Layout of the sending side.
        dst: Layout of the receiving side.
        piece_bytes: Most bytes of a piece that is cut along the tokens.
        layer_piece_bytes: Fewest bytes of one that is cut between layers; None to cut none so.
    """
    sides = {name: (src.component(name), dst.component(name)) for name in route.debts}
    page_tokens = {
        name: max(_page_tokens(side) for side in pair) for name, pair in sides.items() if pair[0].kind == "paged"
    }
    return Cutting(route.debts, page_tokens, piece_bytes, layer_piece_bytes)


def _page_tokens(component: Component) -> int:
    """Tokens of the request that pass until a page is full; a rank that holds a shard of them fills it more slowly."""
    return component.tokens_per_slot * component.shard.size
