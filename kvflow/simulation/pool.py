"""The memory of one life of a rank, its pages, and who may touch them: the truth that the core is held against."""

from collections import deque
from collections.abc import Iterable, Mapping

from kvflow.geometry.layers import ALL_LAYERS, LayerRange
from kvflow.geometry.tokens import TokenRange
from kvflow.simulation.shapes import CELL_BYTES, CellTable, cell_value, layer_of

__all__ = ["Lease", "Pool", "Violation"]

POISON = 0xDEAD << 48
"""Fills pages when they are taken, together with the number of the lease."""


class Violation(Exception):
    """A promise was broken.

    Attributes:
        seed: Of the run, once known.
        time: In the run, in seconds, once known.
    """

    seed: int | None = None
    time: float = 0.0


class Lease:
    """Pages that an engine took for one transfer.

    Attributes:
        name: For stories.
        pages: For each component, its slots in token order.
        is_free: They were given back.
        is_quarantined: They are kept although the transfer has ended.
    """

    __slots__ = ("is_free", "is_quarantined", "name", "number", "pages")

    def __init__(self, number: int, name: str, pages: Mapping[str, tuple[int, ...]]) -> None:
        self.number = number
        self.name = name
        self.pages = pages
        self.is_free = False
        self.is_quarantined = False


class Pool:
    """Byte-true memory at a made-up address, and an allocator that reuses pages as soon as it can.

    Args:
        table: Where the cells are.
    """

    def __init__(self, table: CellTable) -> None:
        self.table = table
        self.memory = bytearray(table.num_bytes)
        self._words = memoryview(self.memory).cast("Q")
        self._free = {component.name: deque(range(component.slots)) for component in table.layout.components}
        self.owners: list[Lease | None] = [None] * table.num_pages
        self._num_leases = 0

    def take(self, name: str, counts: Mapping[str, int]) -> Lease | None:
        """Take pages, those that were given back last first; None if there are not enough."""
        if any(count > len(self._free[component]) for component, count in counts.items()):
            return None
        self._num_leases += 1
        pages = {
            component: tuple(self._free[component].pop() for _ in range(count)) for component, count in counts.items()
        }
        lease = Lease(self._num_leases, name, pages)
        for component, slots in pages.items():
            for slot in slots:
                page = self.table.first_page[component] + slot
                self.owners[page] = lease
                for token in self.table.cells[page]:
                    for word, _ in token:
                        self._words[word] = POISON | lease.number
        return lease

    def give_back(self, lease: Lease) -> None:
        """Take pages back; whoever touches them for this lease from now on breaks the first promise."""
        lease.is_free, lease.is_quarantined = True, False
        for component, slots in lease.pages.items():
            self._free[component].extend(reversed(slots))
            for slot in slots:
                self.owners[self.table.first_page[component] + slot] = None

    def compute(
        self, lease: Lease, component: str, tokens: TokenRange, content: int, layers: LayerRange = ALL_LAYERS
    ) -> None:
        """Write the cells of some tokens and layers, as a prefill engine does."""
        words = self._words
        start, stop = layers
        for token, cells in self._tokens(lease, component, tokens):
            for word, name in cells:
                if start <= layer_of(name) and (stop is None or layer_of(name) < stop):
                    words[word] = cell_value(content, name, token)

    def check_cells(self, lease: Lease, component: str, tokens: TokenRange, contents: Iterable[int]) -> str | None:
        """Say what is wrong with the cells of a lease: wanted ones must be there, the others untouched.

        Args:
            lease: Whose pages, taken for tokens from `tokens[0]` on.
            component: Which of them.
            tokens: That are wanted.
            contents: What may have been computed, one of them for all cells of a token.
        """
        allowed = tuple(contents)
        words = self._words
        poison = POISON | lease.number
        size = len(self.table.cells[self.table.first_page[component]])
        first = tokens[0] - tokens[0] % size
        every = (first, first + size * len(lease.pages[component]))
        for token, cells in self._tokens(lease, component, every, first):
            for word, name in cells:
                found = words[word]
                if not tokens[0] <= token < tokens[1]:
                    if found != poison:
                        return f"token {token} of {component} is not wanted but was written: {found:#x}"
                elif not any(found == cell_value(content, name, token) for content in allowed):
                    return f"token {token} of {component}, cell {name:#x}: found {found:#x}, expected {allowed}"
        return None

    def _tokens(
        self, lease: Lease, component: str, tokens: TokenRange, first: int = 0
    ) -> Iterable[tuple[int, tuple[tuple[int, int], ...]]]:
        """Tokens of a lease with their cells; `first` is the token at which its pages begin."""
        base, cells = self.table.first_page[component], self.table.cells
        size = len(cells[base])
        slots = lease.pages[component]
        for token in range(*tokens):
            slot, within = divmod(token - first, size)
            yield token, cells[base + slots[slot]][within]

    def intruded(self, address: int, length: int, lease: Lease) -> str | None:
        """Say whose bytes somebody touches for a lease that does not own them; None if it does."""
        offset = address - self.table.base
        if offset < 0 or offset + length > self.table.num_bytes:
            return f"address {address:#x} is outside the pool"
        start, stop = offset // CELL_BYTES, -(-(offset + length) // CELL_BYTES)
        for page in self.table.pages[start:stop]:
            owner = self.owners[page] if page >= 0 else None
            if owner is not lease:
                return f"page {page} belongs to {owner.name if owner else 'nobody'}"
        return None

    def num_free(self, component: str) -> int:
        """Pages that may be taken."""
        return len(self._free[component])

    @property
    def is_whole(self) -> bool:
        """Every page is free."""
        return sum(len(slots) for slots in self._free.values()) == self.table.num_pages

    def counts_add_up(self, leases: Iterable[Lease]) -> bool:
        """Say whether every page is free or in one of the leases."""
        free = sum(len(slots) for slots in self._free.values())
        held = sum(len(slots) for lease in leases for slots in lease.pages.values())
        return free + held == self.table.num_pages
