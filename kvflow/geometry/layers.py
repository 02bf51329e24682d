"""Ranges of a model's layers, and what the layers of such a range cost."""

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ALL_LAYERS", "LayerBytes", "LayerRange", "layers_within"]

LayerRange = tuple[int, int | None]
"""Global layers `[start, stop)`, or all from `start` on if there is no `stop`."""

ALL_LAYERS: LayerRange = (0, None)


def layers_within(numbers: NDArray[np.int64], layers: LayerRange) -> NDArray[np.bool_]:
    """Say of each layer, int64[n], whether it is in a range."""
    start, stop = layers
    return numbers >= start if stop is None else (numbers >= start) & (numbers < stop)


class LayerBytes(NamedTuple):
    """Bytes of one cell of each layer, added up once so that any range of layers is looked up.

    Attributes:
        layers: In ascending order.
        sums: `sums[i]` is what all layers before `layers[i]` cost; the last one is the total.
    """

    layers: tuple[int, ...]
    sums: tuple[int, ...]

    @classmethod
    def of(cls, costs: Mapping[int, int]) -> "LayerBytes":
        """Add the bytes of single layers up."""
        layers = tuple(sorted(costs))
        return cls(layers, tuple(accumulate((costs[layer] for layer in layers), initial=0)))

    def between(self, layers: LayerRange) -> int:
        """Bytes of a cell over a range of layers."""
        start, stop = layers
        last = len(self.layers) if stop is None else bisect_left(self.layers, stop)
        return self.sums[last] - self.sums[min(bisect_left(self.layers, start), last)]
