"""Digests of a rank's own memory: of sent data, for its notices, and of arrived data, for verification."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvflow.errors import FailureReason, PlanError
from kvflow.geometry.digest import DigestScope, View, digest
from kvflow.geometry.expected import ExpectedBytes
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import PageTable, read_page_tables
from kvflow.geometry.ranges import LayerRange, TokenRange, is_final
from kvflow.geometry.routes import RegionSlice
from kvflow.state.effects import Piece, VerifyDigests, WrittenBy

__all__ = ["DigestMismatch", "DigestWork", "check_digestible", "digests_of", "find_difference"]


class DigestWork(msgspec.Struct, frozen=True):
    """The input for computing digests, which may be done in any thread.

    Attributes:
        slices: Region slices of the route between the two ranks.
        expected: Which tokens both ranks hold, by component.
        tables: This rank's page tables, by component.
        wanted: All tokens of the transfer, by component.
    """

    layout: KVLayout
    view: View
    slices: Sequence[RegionSlice]
    expected: Mapping[str, ExpectedBytes]
    tables: Mapping[str, PageTable]
    wanted: Mapping[str, TokenRange]

    def digest(self, name: str, tokens: TokenRange, layers: LayerRange) -> int:
        """Return the digest of some tokens and layers of a component."""
        scope = DigestScope(self.slices, self.expected[name], tokens, is_final(tokens, self.wanted[name]), layers)
        return digest(scope, self.layout.component(name), self.tables[name], self.view)


def digests_of(piece: Piece, layout: KVLayout, view: View) -> dict[str, int]:
    """Return the digests of a piece that is about to be written, by component. May be called in any thread.

    Raises:
        PlanError: The layout has device memory, or a page table does not cover its tokens.
        MemoryError: Out of memory.
    """
    check_digestible(layout)
    link = piece.link
    work = DigestWork(layout, view, link.slices, link.route.expected, piece.pages, piece.grant.ranges)
    return {name: work.digest(name, tokens, piece.layers) for name, tokens in piece.ranges.items()}


class DigestMismatch(msgspec.Struct, frozen=True):
    """Why arrived data failed verification: CORRUPT, or PROTOCOL if a digest is missing."""

    reason: FailureReason
    detail: str


def find_difference(
    effect: VerifyDigests, layout: KVLayout, view: View, is_wanted: Callable[[], bool]
) -> DigestMismatch | None:
    """Compare arrived data with its digests, and return the first difference, if any. May be called in any thread.

    The search stops once `is_wanted` returns False.

    Raises:
        PlanError: The data cannot be compared.
        MemoryError: Out of memory.
    """
    opened = effect.opened
    tables = read_page_tables(opened.ranges, opened.pages, layout)
    for written in effect.written:
        rank = written.rank
        work = DigestWork(layout, view, rank.slices, rank.expected, tables, opened.ranges)
        difference = _find_difference(written, work, is_wanted)
        if difference is not None:
            return difference
    return None


def _find_difference(written: WrittenBy, work: DigestWork, is_wanted: Callable[[], bool]) -> DigestMismatch | None:
    for notice in written.notices:
        for name, tokens in notice.ranges.items() if notice.num_bytes else ():  # the rank may hold none of the tokens
            if not is_wanted():
                return None
            where = f"{written.rank.peer.rank}: tokens {tokens[0]}:{tokens[1]} of component {name}"
            sent = notice.digests.get(name)
            if sent is None:
                detail = f"{where} arrived without the requested digest"
                return DigestMismatch(FailureReason.PROTOCOL, detail)
            found = work.digest(name, tokens, notice.layer_range)
            if found != sent:
                detail = f"{where} have digest {found:08x}, but the sent data has {sent:08x}"
                return DigestMismatch(FailureReason.CORRUPT, detail)
    return None


def check_digestible(layout: KVLayout) -> None:
    """Raise PlanError unless this process can read all memory of a layout: digests are not made of device memory."""
    if not layout.is_on_host:
        raise PlanError("digests require host memory", memory_kind="VRAM")
