"""What one rank owes to another, in bytes: both count with the same numbers, so that each notice can be checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from kvflow.geometry.layers import ALL_LAYERS, LayerBytes, LayerRange
from kvflow.geometry.tokens import TokenRange, TokenShard, cell_range, closes, count_shared

__all__ = ["Costs", "Debt", "bytes_owed"]


@dataclass(frozen=True)
class Debt:
    """What one component costs on the way along a route.

    Attributes:
        src: Which tokens the sending side holds.
        dst: Which tokens the receiving side holds.
        cell_bytes: For each number of tokens that share a cell: bytes for each cell that both sides hold.
        layer_bytes: The same by layer.
    """

    src: TokenShard
    dst: TokenShard
    cell_bytes: Mapping[int, int]
    layer_bytes: Mapping[int, LayerBytes] = field(default_factory=dict)

    @cached_property
    def is_whole(self) -> bool:
        """Both sides hold every token."""
        return self.src.size == self.dst.size == 1

    @cached_property
    def highest_layer(self) -> int:
        """The last layer that is owed; 0 if that is not known."""
        return max((costs.layers[-1] for costs in self.layer_bytes.values()), default=0)

    @cached_property
    def max_layers(self) -> int:
        """No more layers are owed than this, and at least one."""
        return sum(len(costs.layers) for costs in self.layer_bytes.values()) or 1

    def of_layers(self, layers: LayerRange) -> "Debt":
        """What some layers cost."""
        if layers == ALL_LAYERS:
            return self
        costs = {tokens_per_cell: costs.between(layers) for tokens_per_cell, costs in self.layer_bytes.items()}
        return replace(self, cell_bytes=costs)

    def num_bytes(self, tokens: TokenRange, *, closing: bool) -> int:
        """Bytes that move for a token range.

        Args:
            tokens: `[start, stop)`.
            closing: No token follows.
        """
        total = 0
        for tokens_per_cell, cost in self.cell_bytes.items():
            start, stop = cell_range(tokens, tokens_per_cell, closing=closing)
            if self.is_whole:
                total += cost * (stop - start)
            else:
                shards = self.src.in_cells(tokens_per_cell), self.dst.in_cells(tokens_per_cell)
                total += cost * count_shared((start, stop), *shards)
        return total


def bytes_owed(
    debts: Mapping[str, Debt],
    ranges: Mapping[str, TokenRange],
    wanted: Mapping[str, TokenRange],
    layers: LayerRange = ALL_LAYERS,
) -> int:
    """Add up what a part of a transfer costs; the sender counts with it, and the receiver checks with it.

    Args:
        debts: By component.
        ranges: For some of these components, the tokens of the part.
        wanted: For the same components, all tokens of the transfer.
        layers: Of the part.
    """
    total = 0
    for name, tokens in ranges.items():
        total += debts[name].of_layers(layers).num_bytes(tokens, closing=closes(tokens, wanted[name]))
    return total


class Costs(NamedTuple):
    """A debt in the making: bytes by tokens of a cell and by layer."""

    src: TokenShard
    dst: TokenShard
    by_layer: dict[int, dict[int, int]]

    def add(self, tokens_per_cell: int, layer: int, num_bytes: int) -> None:
        """Add the bytes of a cell of one layer."""
        of_cells = self.by_layer.setdefault(tokens_per_cell, {})
        of_cells[layer] = of_cells.get(layer, 0) + num_bytes

    def debt(self) -> Debt:
        """All together."""
        totals = {tokens_per_cell: sum(costs.values()) for tokens_per_cell, costs in self.by_layer.items()}
        layers = {tokens_per_cell: LayerBytes.of(costs) for tokens_per_cell, costs in self.by_layer.items()}
        return Debt(self.src, self.dst, totals, layers)
