"""The number of bytes that a transfer writes. Both sides compute it from the route, to check each notice."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from kvflow.geometry.ranges import ALL_LAYERS, LayerRange, TokenRange, TokenShard, cell_range, count_shared, is_final

__all__ = ["ExpectedBytes", "LayerBytes", "expected_bytes"]


class LayerBytes(NamedTuple):
    """Bytes of one cell in each layer, as prefix sums, so that the total of any range of layers is a lookup.

    Attributes:
        layers: Global layers, in ascending order.
        sums: `sums[i]` is the total of all layers before `layers[i]`; the last entry is the total of all.
    """

    layers: tuple[int, ...]
    sums: tuple[int, ...]

    @classmethod
    def from_costs(cls, costs: Mapping[int, int]) -> "LayerBytes":
        """Build the prefix sums from the bytes of each layer."""
        layers = tuple(sorted(costs))
        return cls(layers, tuple(accumulate((costs[layer] for layer in layers), initial=0)))

    def between(self, layers: LayerRange) -> int:
        """Return the bytes of a cell over a range of layers."""
        start, stop = layers
        last = len(self.layers) if stop is None else bisect_left(self.layers, stop)
        return self.sums[last] - self.sums[min(bisect_left(self.layers, start), last)]


@dataclass(frozen=True)
class ExpectedBytes:
    """The number of bytes that one component of a route takes, for any range of tokens and layers.

    Attributes:
        src: Tokens that the sending side holds.
        dst: Tokens that the receiving side holds.
        cell_bytes: Bytes of each cell that both sides hold, by the number of tokens that share a cell.
        layer_bytes: The same, split by layer; needed only to ask for a range of layers.
    """

    src: TokenShard
    dst: TokenShard
    cell_bytes: Mapping[int, int]
    layer_bytes: Mapping[int, LayerBytes] = field(default_factory=dict)

    @classmethod
    def from_costs(cls, src: TokenShard, dst: TokenShard, costs: Mapping[int, Mapping[int, int]]) -> "ExpectedBytes":
        """Sum up the bytes of a cell, by the number of tokens that share it and by layer."""
        totals = {tokens_per_cell: sum(by_layer.values()) for tokens_per_cell, by_layer in costs.items()}
        layers = {tokens_per_cell: LayerBytes.from_costs(by_layer) for tokens_per_cell, by_layer in costs.items()}
        return cls(src, dst, totals, layers)

    @cached_property
    def is_whole(self) -> bool:
        """Whether both sides hold every token."""
        return self.src.size == self.dst.size == 1

    @cached_property
    def highest_layer(self) -> int:
        """Last expected layer; 0 if `layer_bytes` is unknown."""
        return max((costs.layers[-1] for costs in self.layer_bytes.values()), default=0)

    @cached_property
    def max_layers(self) -> int:
        """Upper bound for the number of expected layers, at least 1."""
        return sum(len(costs.layers) for costs in self.layer_bytes.values()) or 1

    def of_layers(self, layers: LayerRange) -> "ExpectedBytes":
        """Return the expected bytes restricted to a range of layers."""
        if layers == ALL_LAYERS:
            return self
        costs = {tokens_per_cell: costs.between(layers) for tokens_per_cell, costs in self.layer_bytes.items()}
        return replace(self, cell_bytes=costs)

    def num_bytes(self, tokens: TokenRange, *, final: bool) -> int:
        """Return the bytes that a token range takes; if it is `final`, no token follows, and the last cell counts."""
        total = 0
        for tokens_per_cell, cost in self.cell_bytes.items():
            start, stop = cell_range(tokens, tokens_per_cell, final=final)
            if self.is_whole:
                total += cost * (stop - start)
            else:
                shards = self.src.in_cells(tokens_per_cell), self.dst.in_cells(tokens_per_cell)
                total += cost * count_shared((start, stop), *shards)
        return total


def expected_bytes(
    expected: Mapping[str, ExpectedBytes],
    ranges: Mapping[str, TokenRange],
    wanted: Mapping[str, TokenRange],
    layers: LayerRange = ALL_LAYERS,
) -> int:
    """Return the bytes that part of a transfer takes: the sender's notice contains them, and the receiver checks them.

    Args:
        expected: Expected bytes by component.
        ranges: Tokens of the part, for some of these components.
        wanted: All tokens of the transfer, for the same components.
        layers: Layers of the part.
    """
    total = 0
    for name, tokens in ranges.items():
        one = expected[name] if layers == ALL_LAYERS else expected[name].of_layers(layers)
        total += one.num_bytes(tokens, final=is_final(tokens, wanted[name]))
    return total
