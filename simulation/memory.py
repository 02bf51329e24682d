"""The memory of one process, and the true owner of each of its pages."""

from collections import deque
from collections.abc import Iterable, Mapping

from kvflow.geometry.ranges import ALL_LAYERS, LayerRange, TokenRange
from kvflow.room import RoomId
from simulation.loop import Violation
from simulation.model import CELL_BYTES, CellTable, cell_value, layer_of

__all__ = ["Lease", "Pool"]

POISON = 0xDEAD << 48
"""Fill pattern of pages that are taken, combined with the number of the lease."""

FREE = 0xF4EE << 48
"""Fill pattern of pages that are free."""


class Lease:
    """Pages that an engine took for one transfer.

    Attributes:
        name: Name for stories.
        room: Room of the request.
        pages: For each component, its slots in token order.
        is_free: The pages were given back.
    """

    __slots__ = ("is_free", "name", "number", "pages", "room")

    def __init__(self, number: int, name: str, room: RoomId, pages: Mapping[str, tuple[int, ...]]) -> None:
        self.number = number
        self.name = name
        self.room = room
        self.pages = pages
        self.is_free = False


class Pool:
    """Byte-exact memory at a made-up address, with an allocator that reuses pages as soon as possible.

    Args:
        table: Location of the cells.
    """

    def __init__(self, table: CellTable) -> None:
        self.table = table
        self.memory = bytearray(table.num_bytes)
        self._words = memoryview(self.memory).cast("Q")
        self._free = {component.name: deque(range(component.slots)) for component in table.layout.components}
        self.owners: list[Lease | None] = [None] * table.num_pages
        self._num_leases = 0
        self._words_of = [[word for token in page for word, _ in token] for page in table.cells]
        for page in range(table.num_pages):
            self._fill(page, FREE)

    def take(self, name: str, room: RoomId, counts: Mapping[str, int]) -> Lease | None:
        """Take pages, most recently freed first; return None if there are not enough.

        Raises:
            Violation: A page was written to while it was free.
        """
        if any(count > len(self._free[component]) for component, count in counts.items()):
            return None
        self._num_leases += 1
        pages = {
            component: tuple(self._free[component].pop() for _ in range(count)) for component, count in counts.items()
        }
        lease = Lease(self._num_leases, name, room, pages)
        for page in self._numbers(lease):
            self._check_untouched(page)
            self.owners[page] = lease
            self._fill(page, POISON | lease.number)
        return lease

    def nothing(self, name: str, room: RoomId) -> Lease:
        """Return a lease of no pages, for a request that has none yet, or none any more."""
        self._num_leases += 1
        return Lease(self._num_leases, name, room, {})

    def give_back(self, lease: Lease) -> None:
        """Free the pages of a lease; any later access for this lease violates a promise."""
        lease.is_free = True
        for component, slots in lease.pages.items():
            self._free[component].extend(reversed(slots))
        for page in self._numbers(lease):
            self.owners[page] = None
            self._fill(page, FREE)

    def check_free_pages(self) -> None:
        """Check that free pages have not been written to.

        Raises:
            Violation: One has.
        """
        for page, owner in enumerate(self.owners):
            if owner is None:
                self._check_untouched(page)

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

    def find_wrong_cell(self, lease: Lease, component: str, tokens: TokenRange, contents: Iterable[int]) -> str | None:
        """Check that wanted cells of a lease are present and others untouched; return what is wrong, or None.

        Args:
            lease: The lease, taken for tokens from `tokens[0]` on.
            component: Component to check.
            tokens: Wanted tokens.
            contents: Contents that any wanted cell may have.
        """
        allowed = tuple(contents)
        words = self._words
        poison = POISON | lease.number
        size = len(self.table.cells[self.table.first_page[component]])
        first = tokens[0] - tokens[0] % size
        every = (first, first + size * len(lease.pages[component]))
        for token, cells in self._tokens(lease, component, every, first):
            is_wanted = tokens[0] <= token < tokens[1]
            for word, name in cells:
                found = words[word]
                if not is_wanted:
                    if found != poison:
                        return f"token {token} of {component} is not wanted but was written: {found:#x}"
                elif not any(found == cell_value(content, name, token) for content in allowed):
                    return f"token {token} of {component}, cell {name:#x}: found {found:#x}, expected {allowed}"
        return None

    def owner_of(self, address: int, length: int) -> Lease | None:
        """Return the lease whose pages contain some bytes; None unless all of them are in pages of one lease."""
        offset = address - self.table.base
        start, stop = offset // CELL_BYTES, -(-(offset + length) // CELL_BYTES)
        owners, pages = self.owners, self.table.pages
        found: Lease | None = None
        for page in set(pages[start:stop]):
            owner = owners[page] if page >= 0 else None
            if owner is None or (found is not None and owner is not found):
                return None
            found = owner
        return found

    def holds(self, address: int) -> bool:
        """Return whether an address is in this memory."""
        return 0 <= address - self.table.base < self.table.num_bytes

    def num_free(self, component: str) -> int:
        """Return the number of free pages."""
        return len(self._free[component])

    @property
    def is_whole(self) -> bool:
        """Every page is free."""
        return all(owner is None for owner in self.owners)

    def _numbers(self, lease: Lease) -> list[int]:
        first = self.table.first_page
        return [first[component] + slot for component, slots in lease.pages.items() for slot in slots]

    def _fill(self, page: int, value: int) -> None:
        words = self._words
        for word in self._words_of[page]:
            words[word] = value

    def _check_untouched(self, page: int) -> None:
        words = self._words
        if any(words[word] != FREE for word in self._words_of[page]):
            raise Violation(f"page {page} was written while it was free")

    def _tokens(
        self, lease: Lease, component: str, tokens: TokenRange, first: int = 0
    ) -> Iterable[tuple[int, tuple[tuple[int, int], ...]]]:
        """Yield tokens of a lease with their cells; `first` is the token at which its pages begin."""
        base, cells = self.table.first_page[component], self.table.cells
        size = len(cells[base])
        slots = lease.pages[component]
        for token in range(*tokens):
            slot, within = divmod(token - first, size)
            yield token, cells[base + slots[slot]][within]
