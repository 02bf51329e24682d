"""Ranges of tokens and layers, and which tokens of a request a rank holds."""

import functools
import math
import operator

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.errors import LayoutError, PlanError

__all__ = [
    "ALL_LAYERS",
    "MAX_TOKENS",
    "WHOLE",
    "LayerRange",
    "TokenRange",
    "TokenShard",
    "cell_range",
    "check_range",
    "count_shared",
    "held_range",
    "hull",
    "is_final",
    "layers_within",
    "overlap_pattern",
    "shared_runs",
]

TokenRange = tuple[int, int]
"""Token positions `[start, stop)` of one request."""

LayerRange = tuple[int, int | None]
"""Global layers `[start, stop)`, or all from `start` on if there is no `stop`."""

ALL_LAYERS: LayerRange = (0, None)

MAX_TOKENS = 2**40
"""Far above any context length, and small enough that products of token positions fit into 64 bits."""

MAX_SHARDS = 256
MAX_INTERLEAVE = 2**16
MAX_OVERLAP_STEPS = 2**17
"""Steps in a period of the overlap of two shards. Layouts come from the network, so it needs a bound."""

UInt64Array = NDArray[np.uint64]


class TokenShard(msgspec.Struct, frozen=True, array_like=True):
    """Which tokens of a request a rank holds: `t` if `t // interleave % size == rank` (decode context parallelism).

    Its pages hold these tokens one after another, without gaps.

    Attributes:
        size: Ranks that share the tokens; 1 if each holds all of them.
        rank: Index of this rank among them.
        interleave: Consecutive tokens on one rank: 1, or a page.

    Raises:
        LayoutError: Not `0 <= rank < size`, or `interleave` is not positive.
    """

    size: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size <= MAX_SHARDS or not 1 <= self.interleave <= MAX_INTERLEAVE:
            raise LayoutError("token shard is invalid", size=self.size, rank=self.rank, interleave=self.interleave)

    @property
    def period(self) -> int:
        """Tokens after which the pattern repeats."""
        return self.size * self.interleave

    @property
    def summary(self) -> str:
        """Which tokens these are, in words for the log; empty if they are all."""
        every = f"{self.interleave} of every {self.period} tokens"
        return f"{every} from {self.rank * self.interleave} on" if self.size > 1 else ""

    def held_before(self, position: int) -> int:
        """Count the held tokens below `position`."""
        periods, rest = divmod(position, self.period)
        return periods * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)

    def in_cells(self, tokens_per_cell: int) -> "TokenShard":
        """Return the same shard counted in cells, where several tokens share a cell."""
        return self if self.size == 1 else TokenShard(self.size, self.rank, self.interleave // tokens_per_cell)

    def holds(self, positions: UInt64Array) -> NDArray[np.bool_]:
        """Return for each token position, uint64[n], whether it is held."""
        owners = positions // np.uint64(self.interleave) % np.uint64(self.size)
        return np.asarray(owners == np.uint64(self.rank))

    def locate(self, positions: UInt64Array) -> UInt64Array:
        """Return the place of each held token among all held tokens; uint64[n] to uint64[n]."""
        within = positions % np.uint64(self.interleave)
        places: UInt64Array = positions // np.uint64(self.period) * np.uint64(self.interleave) + within
        return places


WHOLE = TokenShard()
"""Every token."""


def check_range(tokens: TokenRange) -> TokenRange:
    """Convert a pair of integers to a range; PlanError if it is none, or reversed, negative or above `MAX_TOKENS`."""
    try:
        start, stop = map(operator.index, tokens)
    except (TypeError, ValueError):
        raise PlanError("token range must be a pair of integers", tokens=tokens) from None
    if not 0 <= start <= stop <= MAX_TOKENS:
        raise PlanError("token range must satisfy 0 <= start <= stop", tokens=tokens, limit=MAX_TOKENS)
    return start, stop


def hull(one: TokenRange, other: TokenRange) -> TokenRange:
    """Return the smallest range that contains two ranges; an empty one is ignored, wherever it is."""
    if one[0] == one[1]:
        return other
    if other[0] == other[1]:
        return one
    return min(one[0], other[0]), max(one[1], other[1])


def layers_within(numbers: NDArray[np.int64], layers: LayerRange) -> NDArray[np.bool_]:
    """Return for each layer number, int64[n], whether it is in a range."""
    start, stop = layers
    return numbers >= start if stop is None else (numbers >= start) & (numbers < stop)


def held_range(tokens: TokenRange, shard: TokenShard) -> TokenRange:
    """Convert a token range to places among the tokens that a shard holds."""
    if shard.size == 1:
        return tokens
    return shard.held_before(tokens[0]), shard.held_before(tokens[1])


def shared_runs(
    tokens: TokenRange, src: TokenShard, dst: TokenShard, src_page_size: int, dst_page_size: int
) -> tuple[UInt64Array, UInt64Array]:
    """Split a token range into runs that both sides hold and that stay inside one page of each.

    Without shards it is split at page boundaries only, with shards into equal steps that fit every boundary.

    Returns:
        Start and length of each run, uint64[num_runs], in tokens.
    """
    start, stop = tokens
    if src.size == dst.size == 1:
        starts = _cuts(start, stop, src_page_size)
        if dst_page_size != src_page_size:
            starts = np.union1d(starts, _cuts(start, stop, dst_page_size))
    else:
        steps = (shard.interleave for shard in (src, dst) if shard.size > 1)
        starts = _cuts(start, stop, math.gcd(src_page_size, dst_page_size, *steps))
    lengths = np.append(starts[1:], np.uint64(stop)) - starts
    if src.size == dst.size == 1:
        return starts, lengths
    held = src.holds(starts) & dst.holds(starts)
    return starts[held], lengths[held]


def is_final(tokens: TokenRange, wanted: TokenRange) -> bool:
    """Return whether a part of the wanted tokens reaches their end, which tells both sides which cells are complete."""
    return tokens[1] == wanted[1]


def cell_range(tokens: TokenRange, tokens_per_cell: int, *, final: bool) -> TokenRange:
    """Return the cells that are sent with a token range, where several tokens share a cell.

    A cell whose tokens are in two chunks is sent with the later one, when its content is complete; a partly filled one
    only if the range is `final`, that is, if no token follows.
    """
    start = tokens[0] // tokens_per_cell
    stop = -(-tokens[1] // tokens_per_cell) if final else tokens[1] // tokens_per_cell
    return (start, max(start, stop)) if tokens[0] < tokens[1] else (start, start)


def overlap_pattern(src: TokenShard, dst: TokenShard) -> tuple[int, int]:
    """Return step and period, in tokens, of the overlap of two shards; LayoutError if it is too long to be meant."""
    sharded = [shard for shard in (src, dst) if shard.size > 1]
    step = math.gcd(*(shard.interleave for shard in sharded)) or 1
    period = math.lcm(*(shard.period for shard in sharded))
    if period // step > MAX_OVERLAP_STEPS:
        raise LayoutError("token shards are incompatible", prefill=src, decode=dst)
    return step, period


def count_shared(tokens: TokenRange, src: TokenShard, dst: TokenShard) -> int:
    """Count the tokens of a range that both sides hold."""
    if dst.size == 1:
        start, stop = held_range(tokens, src)
        return stop - start
    if src.size == 1:
        return count_shared(tokens, dst, src)
    step, period, held = _overlap(src, dst)

    def below(position: int) -> int:
        periods, rest = divmod(position, period)
        partial = np.clip(rest - held, 0, step).sum()
        return periods * len(held) * step + int(partial)

    return below(tokens[1]) - below(tokens[0])


@functools.lru_cache(maxsize=256)
def _overlap(src: TokenShard, dst: TokenShard) -> tuple[int, int, NDArray[np.int64]]:
    """Return step and period of the overlap of two shards, and the start of each shared step within a period."""
    step, period = overlap_pattern(src, dst)
    starts = np.arange(0, period, step, dtype=np.uint64)
    return step, period, starts[src.holds(starts) & dst.holds(starts)].astype(np.int64)


def _cuts(start: int, stop: int, step: int) -> UInt64Array:
    """Split `[start, stop)` at multiples of `step`; return the starts."""
    if start == stop:
        return np.empty(0, np.uint64)
    boundaries = np.arange(start - start % step + step, stop, step, dtype=np.uint64)
    return np.insert(boundaries, 0, np.uint64(start))
