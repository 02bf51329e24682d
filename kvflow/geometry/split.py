"""Split large chunks into pieces, so that several writes run at once and no peer waits long for another.

A chunk whose layers become ready one after another is split between layers. Groups of layers that become ready together
are joined until the piece is worth a write of its own; each piece waits only for its last group.

Any other large chunk is split along its tokens, component by component: a piece takes as many pages of the first
component as fit, then of the next one, and so on. Splits fall on page boundaries. A component of kind "slot" is never
split. A piece exceeds the limit only if it is a single page over all layers, or a single slot.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvflow.geometry.binding import BoundRoute
from kvflow.geometry.expected import ExpectedBytes, expected_bytes
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.ranges import ALL_LAYERS, LayerRange, TokenRange, is_final

__all__ = ["LayerPiece", "SplitPolicy", "split_policy_for"]


class LayerPiece(NamedTuple):
    """Layers of a chunk that are sent together.

    Attributes:
        layers: Global layers of the piece; earlier pieces have those before `layers[0]`.
        group: Index of the group of layers that the piece has to wait for.
    """

    layers: LayerRange
    group: int


class SplitPolicy(NamedTuple):
    """How chunks for one peer are split.

    Attributes:
        expected: What the peer expects, by component.
        page_tokens: For each component that may be split, the page size in tokens, of the side with the larger pages.
        piece_bytes: Upper bound for a piece that is split along the tokens, in bytes.
        layer_piece_bytes: Lower bound for a piece that is split between layers, in bytes; the last piece may be
            smaller. None if the peer's protocol version has no such pieces.
        is_packed: Pieces are packed into staging slots of `piece_bytes`. A chunk with a layer piece that would not fit
            is split along its tokens instead.
        direct: The policy for chunks whose pages form long runs, which need no packing; None if there is no other
            policy.
        direct_run_bytes: Mean run length, in bytes, from which `direct` applies.
    """

    expected: Mapping[str, ExpectedBytes]
    page_tokens: Mapping[str, int]
    piece_bytes: int
    layer_piece_bytes: int | None = None
    is_packed: bool = False
    direct: "SplitPolicy | None" = None
    direct_run_bytes: float = 0.0

    def choose(self, num_bytes: int, num_runs: float) -> "SplitPolicy":
        """Return `direct`, if there is one and the runs of pages are long enough for it; otherwise this policy.

        Args:
            num_bytes: Bytes that a chunk takes.
            num_runs: Number of runs of pages that are consecutive on both sides.
        """
        is_direct = num_bytes >= num_runs * self.direct_run_bytes
        return self.direct if self.direct is not None and is_direct else self

    def split_layers(
        self, stops: Sequence[int], ranges: Mapping[str, TokenRange], wanted: Mapping[str, TokenRange]
    ) -> list[LayerPiece]:
        """Split a chunk between layers, without waiting for groups of layers that the peer does not want.

        Args:
            stops: End layer of each group, in ascending order; the last group takes all remaining layers.
            ranges: Tokens of the chunk, by component.
            wanted: All tokens of the transfer, for the same components.
        """
        highest = max((self.expected[name].highest_layer for name in ranges), default=0)
        last = min(bisect_right(stops, highest), len(stops) - 1)
        pieces: list[LayerPiece] = []
        start = at = 0
        while self.layer_piece_bytes is not None:
            at = bisect_left(
                stops,
                self.layer_piece_bytes,
                at,
                last,
                key=lambda stop: expected_bytes(self.expected, ranges, wanted, (start, stop)),
            )
            if at == last:
                break
            pieces.append(LayerPiece((start, stops[at]), at))
            start, at = stops[at], at + 1
        pieces.append(LayerPiece((start, None), last))
        sizes = (expected_bytes(self.expected, ranges, wanted, piece.layers) for piece in pieces)
        if self.is_packed and any(num_bytes > self.piece_bytes for num_bytes in sizes):
            return [LayerPiece(ALL_LAYERS, last)]
        return pieces

    def split_tokens(
        self, ranges: Mapping[str, TokenRange], wanted: Mapping[str, TokenRange]
    ) -> list[dict[str, TokenRange]]:
        """Split a chunk along its tokens; return the token ranges of each piece, in order; arguments as above."""
        pieces: list[dict[str, TokenRange]] = [{}]
        capacity = self.piece_bytes
        for name, (start, stop) in ranges.items():
            at = start
            while at < stop:
                end = self._find_split(name, (at, stop), wanted[name], capacity)
                if end == at and pieces[-1]:
                    pieces.append({})
                    capacity = self.piece_bytes
                    continue
                end = max(end, self._first_split(name, (at, stop)))
                pieces[-1][name] = (at, end)
                capacity = max(0, capacity - self._num_bytes(name, (at, end), wanted[name]))
                at = end
                if at < stop:
                    pieces.append({})
                    capacity = self.piece_bytes
        return pieces

    def allow_partial_pages(self, num_bytes: int) -> "SplitPolicy":
        """Return a policy that also splits pages larger than `num_bytes`. Packed pieces need not be whole pages."""
        return self._replace(page_tokens={name: self._fitting(name, num_bytes) for name in self.page_tokens})

    def limit_pieces(self, num_bytes: int) -> "SplitPolicy":
        """Return a policy whose pieces along the tokens are no larger than `num_bytes`."""
        direct = None if self.direct is None else self.direct.limit_pieces(num_bytes)
        return self._replace(piece_bytes=min(self.piece_bytes, num_bytes), direct=direct)

    def _fitting(self, name: str, num_bytes: int) -> int:
        """Halve the page size until a page fits, as long as it holds whole cells."""
        expected, size = self.expected[name], self.page_tokens[name]
        cell_tokens = math.lcm(*expected.cell_bytes)
        while expected.num_bytes((0, size), final=True) > num_bytes and size % (2 * cell_tokens) == 0:
            size //= 2
        return size

    def _find_split(self, name: str, tokens: TokenRange, wanted: TokenRange, capacity: int) -> int:
        """Return the last place to split at that fits the capacity; the start if not even one page fits."""
        start, stop = tokens
        if self._num_bytes(name, tokens, wanted) <= capacity:
            return stop
        cuts = (
            range(self._first_split(name, tokens), stop, self.page_tokens[name])
            if name in self.page_tokens
            else range(0)
        )
        num_fitting = bisect_right(cuts, capacity, key=lambda end: self._num_bytes(name, (start, end), wanted))
        return cuts[num_fitting - 1] if num_fitting else start

    def _first_split(self, name: str, tokens: TokenRange) -> int:
        """Return the first place to split at, or the end if there is none."""
        start, stop = tokens
        size = self.page_tokens.get(name, stop)
        return min(start - start % size + size, stop)

    def _num_bytes(self, name: str, tokens: TokenRange, wanted: TokenRange) -> int:
        return self.expected[name].num_bytes(tokens, final=is_final(tokens, wanted))


def split_policy_for(
    route: BoundRoute, src: KVLayout, dst: KVLayout, piece_bytes: int, layer_piece_bytes: int | None = None
) -> SplitPolicy:
    """Return the policy for chunks that go along a route; sizes as in `SplitPolicy`."""
    page_tokens = {}
    for name in route.expected:
        sides = src.component(name), dst.component(name)
        if sides[0].kind == "paged":  # of a request, more tokens fill a page if the rank holds only a shard of them
            page_tokens[name] = max(side.tokens_per_slot * side.shard.size for side in sides)
    return SplitPolicy(route.expected, page_tokens, piece_bytes, layer_piece_bytes)
