"""Pages that transfers hold on a decode rank, from their start until no peer can write to the pages. Pure."""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import DENSE, WIRE_PAGES

__all__ = ["HeldPage", "HeldPages"]

BLOCK_BYTES: Final = 2**18
"""Pages are converted in blocks of this size, which stay in the CPU's cache: four times as fast for millions."""


class HeldPage(NamedTuple):
    """A page that is held."""

    component: str
    page: int

    def is_in(self, pages: Mapping[str, bytes]) -> bool:
        """Return whether it is among pages encoded as `WIRE_PAGES` by component."""
        return bool((np.frombuffer(pages.get(self.component, b""), WIRE_PAGES) == self.page).any())


class HeldPages:
    """One flag for each page of each component; pages of different components are independent."""

    def __init__(self, layout: KVLayout) -> None:
        self._flags: dict[str, NDArray[np.bool_]] = {
            component.name: np.zeros(component.slots, np.bool_) for component in layout.components
        }

    def first_of(self, pages: Mapping[str, bytes]) -> HeldPage | None:
        """Return a held page among pages encoded as `WIRE_PAGES` by component; None if all are free."""
        for name, data in pages.items():
            flags = self._flags[name]
            for wanted in _blocks(data):
                held = flags[wanted]
                if True in held.tobytes():
                    return HeldPage(name, int(wanted[held.argmax()]))
        return None

    def hold(self, pages: Mapping[str, bytes]) -> HeldPage | None:
        """Mark distinct pages as held, unless one of them is; return the first such page."""
        if self._hold_many(pages):
            return None
        held = self.first_of(pages)
        if held is None:
            self._set(pages, is_held=True)
        return held

    def _hold_many(self, pages: Mapping[str, bytes]) -> bool:
        """Hold pages without looking at each before, if they are much of the pools; return whether all were free."""
        counts = {name: len(data) // WIRE_PAGES.itemsize for name, data in pages.items()}
        if not all(count * DENSE > len(self._flags[name]) for name, count in counts.items()):
            return False
        before = {name: self._flags[name].copy() for name in pages}
        self._set(pages, is_held=True)
        for name, flags in before.items():
            if np.count_nonzero(self._flags[name]) != np.count_nonzero(flags) + counts[name]:
                self._flags.update(before)
                return False
        return True

    def drop(self, pages: Mapping[str, bytes]) -> None:
        """Mark pages as free."""
        self._set(pages, is_held=False)

    def count(self) -> dict[str, int]:
        """Return how many pages of each component are held."""
        return {name: int(np.count_nonzero(flags)) for name, flags in self._flags.items()}

    def _set(self, pages: Mapping[str, bytes], *, is_held: bool) -> None:
        for name, data in pages.items():
            flags = self._flags[name]
            for wanted in _blocks(data):
                flags[wanted] = is_held


def _blocks(data: bytes) -> Iterator[NDArray[np.intp]]:
    """Return pages as `np.intp`, the dtype that numpy indexes with; converting them first is three times as fast."""
    if len(data) <= BLOCK_BYTES:
        yield np.frombuffer(data, WIRE_PAGES).astype(np.intp)
        return
    view = memoryview(data)
    for start in range(0, len(data), BLOCK_BYTES):
        yield np.frombuffer(view[start : start + BLOCK_BYTES], WIRE_PAGES).astype(np.intp)
