"""Detection of cells of different regions that share memory."""

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.errors import LayoutError

__all__ = ["SpacedRuns", "find_overlap"]

MAX_RUNS: Final = 2**18
"""Maximum runs that are compared one by one, in about 50 ms. Layouts come from the network, so this needs a bound.
Regions that repeat with one period, as in all known pools, are not compared one by one."""


class SpacedRuns(NamedTuple):
    """Runs of bytes at regular distances, none of which overlap each other.

    Attributes:
        address: Address of the first run.
        end: One past the last byte of the last run.
        axes: Stride and count of each axis with more than one entry, largest stride first.
        length: Bytes of a run.
        owner: Identifies them to the caller.
    """

    address: int
    end: int
    axes: tuple[tuple[int, int], ...]
    length: int
    owner: int

    @classmethod
    def from_axes(cls, address: int, axes: Sequence[tuple[int, int]], length: int, owner: int) -> "SpacedRuns":
        """Describe runs, and join those that touch."""
        left = sorted([axis for axis in axes if axis[1] > 1], reverse=True)
        end = address + length
        for stride, count in left:
            end += stride * (count - 1)
        while left and left[-1][0] == length:
            length *= left.pop()[1]
        return cls(address, end, tuple(left), length, owner)

    @property
    def num_runs(self) -> int:
        """Number of runs, over all axes."""
        return math.prod(count for _, count in self.axes)

    def first_two(self) -> Iterator["SpacedRuns"]:
        """Yield the first two entries of the outermost axis, each without that axis."""
        stride, count = self.axes[0]
        end = self.end - stride * (count - 1)
        yield SpacedRuns(self.address, end, self.axes[1:], self.length, self.owner)
        yield SpacedRuns(self.address + stride, end + stride, self.axes[1:], self.length, self.owner)

    def starts(self, origin: int) -> NDArray[np.uint64]:
        """Return the distance of each run from an address."""
        found = np.array([self.address - origin], np.uint64)
        for stride, count in self.axes:
            found = (found[:, None] + np.arange(count, dtype=np.uint64) * np.uint64(stride)).reshape(-1)
        return found


def find_overlap(cells: Sequence[SpacedRuns]) -> tuple[int, int] | None:
    """Find two owners with a byte in common; None if there are none.

    Raises:
        LayoutError: The cells are interleaved irregularly, and too many to be compared one by one.
    """
    groups = list(_irregular(cells))
    num_runs = sum(one.num_runs for group in groups for one in group)
    if num_runs > MAX_RUNS:
        raise LayoutError("regions are interleaved too irregularly to be checked", cells=num_runs, maximum=MAX_RUNS)
    return next((found for group in groups if (found := _compare_runs(group)) is not None), None)


def _irregular(cells: Sequence[SpacedRuns]) -> Iterator[list[SpacedRuns]]:
    """Yield groups of runs that must be compared one by one."""
    for group in _entangled(cells):
        period = group[0].axes[:1]
        if period and all(one.axes[:1] == period and one.address - group[0].address < period[0][0] for one in group):
            # Runs that are disjoint in the first period, and across its end, are disjoint in all periods.
            yield from _irregular([part for one in group for part in one.first_two()])
        else:
            yield group


def _entangled(cells: Sequence[SpacedRuns]) -> Iterator[list[SpacedRuns]]:
    """Yield groups of cells whose extents overlap, in the order of addresses."""
    group: list[SpacedRuns] = []
    end = 0
    for one in sorted(cells):
        if group and one.address >= end:
            if len(group) > 1:
                yield group
            group = []
        group.append(one)
        end = max(end, one.end)
    if len(group) > 1:
        yield group


def _compare_runs(group: Sequence[SpacedRuns]) -> tuple[int, int] | None:
    origin = group[0].address
    starts = np.concatenate([one.starts(origin) for one in group])
    places = np.repeat(np.arange(len(group)), [one.num_runs for one in group])
    order = np.argsort(starts, kind="stable")
    starts, places = starts[order], places[order]
    lasts = starts + np.array([one.length - 1 for one in group], np.uint64)[places]  # an end may exceed 64 bits
    shared = np.flatnonzero(starts[1:] <= lasts[:-1])
    if not shared.size:
        return None
    first, second = sorted(group[place].owner for place in places[shared[0] : shared[0] + 2].tolist())
    return first, second
