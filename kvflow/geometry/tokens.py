"""Token ranges of a request, and which of its tokens a rank holds."""

import functools
import math
import operator
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.errors import LayoutError, PlanError

__all__ = [
    "MAX_TOKENS",
    "WHOLE",
    "SharedRuns",
    "TokenRange",
    "TokenShard",
    "cell_range",
    "check_range",
    "closes",
    "count_shared",
    "held_range",
    "overlap_pattern",
    "shared_runs",
]

TokenRange = tuple[int, int]
"""Token positions `[start, stop)` of one request."""

MAX_TOKENS = 2**40
"""Far above any context length; keeps every product of a token position well inside 64 bits."""

MAX_SHARDS = 256
MAX_INTERLEAVE = 2**16
MAX_PATTERN = 2**17
"""Pieces in which two shards may overlap before they overlap in the same way again; layouts come from the network."""

Words = NDArray[np.uint64]


class TokenShard(msgspec.Struct, frozen=True, array_like=True):
    """Which tokens of a request a rank holds: `t` if `t // interleave % size == rank` (decode context parallelism).

    The tokens that it holds lie in its pages one after another, without gaps.

    Attributes:
        size: Ranks that share the tokens; 1 if each holds all of them.
        rank: Which of them this is.
        interleave: Neighbouring tokens on one rank: 1, or a page.

    Raises:
        LayoutError: Not `0 <= rank < size`, or `interleave` is not positive.
    """

    size: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size <= MAX_SHARDS or not 1 <= self.interleave <= MAX_INTERLEAVE:
            raise LayoutError("token shard is impossible", size=self.size, rank=self.rank, interleave=self.interleave)

    @property
    def turn(self) -> int:
        """Tokens after which the pattern repeats."""
        return self.size * self.interleave

    def held_before(self, position: int) -> int:
        """Count the tokens below `position` that are held."""
        turns, rest = divmod(position, self.turn)
        return turns * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)

    def in_cells(self, tokens_per_cell: int) -> "TokenShard":
        """The same shard where several tokens share a cell and cells take the place of tokens."""
        return self if self.size == 1 else TokenShard(self.size, self.rank, self.interleave // tokens_per_cell)

    def holds(self, positions: Words) -> NDArray[np.bool_]:
        """Say for each token whether it is held."""
        turns = positions // np.uint64(self.interleave) % np.uint64(self.size)
        return np.asarray(turns == np.uint64(self.rank))

    def locate(self, positions: Words) -> Words:
        """Give the place of held tokens among all that are held."""
        within = positions % np.uint64(self.interleave)
        places: Words = positions // np.uint64(self.turn) * np.uint64(self.interleave) + within
        return places


WHOLE = TokenShard()
"""Every token."""


class SharedRuns(NamedTuple):
    """Runs of tokens that two sides hold and that lie in one page on both; uint64[num_runs] each."""

    starts: Words
    lengths: Words


def check_range(tokens: TokenRange) -> TokenRange:
    """Turn a pair of any kind of integers into a range.

    Raises:
        PlanError: It is no pair of integers, reversed, negative or absurdly large.
    """
    try:
        start, stop = map(operator.index, tokens)
    except (TypeError, ValueError):
        raise PlanError("token range is not a pair of integers", tokens=tokens) from None
    if not 0 <= start <= stop <= MAX_TOKENS:
        raise PlanError("token range is not 0 <= start <= stop", tokens=tokens, limit=MAX_TOKENS)
    return start, stop


def held_range(tokens: TokenRange, shard: TokenShard) -> TokenRange:
    """Give the places that a token range takes among the tokens that are held."""
    if shard.size == 1:
        return tokens
    return shard.held_before(tokens[0]), shard.held_before(tokens[1])


def shared_runs(
    tokens: TokenRange, src: TokenShard, dst: TokenShard, src_page_size: int, dst_page_size: int
) -> SharedRuns:
    """Cut a token range into runs that both sides hold and that stay inside one page of each.

    Without shards these are cut at page boundaries only; with shards into equal pieces that fit every boundary.
    """
    start, stop = tokens
    if src.size == dst.size == 1:
        starts = _cuts(start, stop, src_page_size)
        if dst_page_size != src_page_size:
            starts = np.union1d(starts, _cuts(start, stop, dst_page_size))
    else:
        step = math.gcd(src_page_size, dst_page_size, _step(src), _step(dst))
        starts = _cuts(start, stop, step)
    lengths = np.diff(np.append(starts, np.uint64(stop)))
    if src.size == dst.size == 1:
        return SharedRuns(starts, lengths)
    held = src.holds(starts) & dst.holds(starts)
    return SharedRuns(starts[held], lengths[held])


def closes(tokens: TokenRange, wanted: TokenRange) -> bool:
    """Say whether a part of what is wanted reaches its end, so that no token follows; both sides go by this."""
    return tokens[1] == wanted[1]


def cell_range(tokens: TokenRange, tokens_per_cell: int, *, closing: bool) -> TokenRange:
    """Give the cells that go with a token range where several tokens share a cell.

    A cell that two chunks share goes with the later one, when its content is final.

    Args:
        tokens: `[start, stop)`.
        tokens_per_cell: Tokens that share one cell.
        closing: No token follows, so a cell that is not full goes now.
    """
    start = tokens[0] // tokens_per_cell
    stop = -(-tokens[1] // tokens_per_cell) if closing else tokens[1] // tokens_per_cell
    return (start, max(start, stop)) if tokens[0] < tokens[1] else (start, start)


def overlap_pattern(src: TokenShard, dst: TokenShard) -> tuple[int, int]:
    """Give the step and the length of the pattern in which two shards overlap.

    Raises:
        LayoutError: The pattern is too long to be anything but a mistake.
    """
    step, turn = math.gcd(src.interleave, dst.interleave), math.lcm(src.turn, dst.turn)
    if turn // step > MAX_PATTERN:
        raise LayoutError("token shards do not fit each other", prefill=src, decode=dst)
    return step, turn


def count_shared(tokens: TokenRange, src: TokenShard, dst: TokenShard) -> int:
    """Count the tokens of a range that both sides hold."""
    if dst.size == 1:
        start, stop = held_range(tokens, src)
        return stop - start
    if src.size == 1:
        return count_shared(tokens, dst, src)
    step, turn, held = _overlap(src, dst)

    def below(position: int) -> int:
        turns, rest = divmod(position, turn)
        partial = np.clip(rest - held, 0, step).sum()
        return turns * len(held) * step + int(partial)

    return below(tokens[1]) - below(tokens[0])


@functools.lru_cache(maxsize=256)
def _overlap(src: TokenShard, dst: TokenShard) -> tuple[int, int, NDArray[np.int64]]:
    """The pattern in which two shards overlap: its step, its length, and where the shared pieces begin."""
    step, turn = overlap_pattern(src, dst)
    starts = np.arange(0, turn, step, dtype=np.uint64)
    return step, turn, starts[src.holds(starts) & dst.holds(starts)].astype(np.int64)


def _step(shard: TokenShard) -> int:
    """The largest step at which a shard may change; 0, which every number divides, if it never does."""
    return 0 if shard.size == 1 else shard.interleave


def _cuts(start: int, stop: int, step: int) -> Words:
    """Where the pieces of `[start, stop)` begin that are cut at multiples of `step`."""
    if start == stop:
        return np.empty(0, np.uint64)
    boundaries = np.arange(start - start % step + step, stop, step, dtype=np.uint64)
    return np.insert(boundaries, 0, np.uint64(start))
