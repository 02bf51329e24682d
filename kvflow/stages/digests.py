"""Digests of a rank's own memory: of what is sent, to go with its notices, and of what has arrived, to compare."""

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

__all__ = ["Difference", "DigestWork", "check_digestible", "digests_of", "find_difference"]


class DigestWork(msgspec.Struct, frozen=True):
    """Digests that are yet to be worked out; that may be done in any thread.

    Attributes:
        layout: Of this rank.
        view: Lets its memory be read.
        slices: Of the route between the two ranks.
        expected: By component, which tokens the two hold.
        tables: By component, this rank's pages.
        wanted: By component, all tokens of the transfer.
    """

    layout: KVLayout
    view: View
    slices: Sequence[RegionSlice]
    expected: Mapping[str, ExpectedBytes]
    tables: Mapping[str, PageTable]
    wanted: Mapping[str, TokenRange]

    def digest(self, name: str, tokens: TokenRange, layers: LayerRange) -> int:
        """Work one digest out.

        Args:
            name: Component.
            tokens: Of this component.
            layers: Of which the digest is wanted.
        """
        scope = DigestScope(self.slices, self.expected[name], tokens, is_final(tokens, self.wanted[name]), layers)
        return digest(scope, self.layout.component(name), self.tables[name], self.view)


def digests_of(piece: Piece, layout: KVLayout, view: View) -> dict[str, int]:
    """Work out the digests of a piece, by component. May be called in any thread.

    Args:
        piece: About to be written.
        layout: Of this rank.
        view: Lets its memory be read.

    Raises:
        PlanError: It is device memory, or a table does not reach over its tokens.
        MemoryError: There is no memory left to do it with.
    """
    check_digestible(layout)
    link = piece.link
    work = DigestWork(layout, view, link.slices, link.route.expected, piece.pages, piece.grant.ranges)
    return {name: work.digest(name, tokens, piece.layers) for name, tokens in piece.ranges.items()}


class Difference(msgspec.Struct, frozen=True):
    """What is wrong with what has arrived.

    Attributes:
        reason: CORRUPT, or PROTOCOL if a digest is missing.
        detail: For a person.
    """

    reason: FailureReason
    detail: str


def find_difference(
    effect: VerifyDigests, layout: KVLayout, view: View, is_wanted: Callable[[], bool]
) -> Difference | None:
    """Compare what has arrived with its digests until the first difference. May be called in any thread.

    Args:
        effect: What has arrived.
        layout: Of this rank.
        view: Lets its memory be read.
        is_wanted: Says whether anybody still wants to know; the search ends if not.

    Raises:
        PlanError: It cannot be compared.
        MemoryError: There is no memory left to do it with.
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


def _find_difference(written: WrittenBy, work: DigestWork, is_wanted: Callable[[], bool]) -> Difference | None:
    for notice in written.notices:
        for name, tokens in notice.ranges.items() if notice.num_bytes else ():  # the rank may hold none of the tokens
            if not is_wanted():
                return None
            where = f"{written.rank.peer.rank}: tokens {tokens[0]}:{tokens[1]} of component {name}"
            sent = notice.digests.get(name)
            if sent is None:
                detail = f"{where} arrived without the requested digest"
                return Difference(FailureReason.PROTOCOL, detail)
            found = work.digest(name, tokens, notice.layer_range)
            if found != sent:
                detail = f"{where} have digest {found:08x}, but the sent data has {sent:08x}"
                return Difference(FailureReason.CORRUPT, detail)
    return None


def check_digestible(layout: KVLayout) -> None:
    """Refuse digests of memory that this process cannot read.

    Raises:
        PlanError: Some of it is device memory.
    """
    if not layout.is_on_host:
        raise PlanError("digests require host memory", memory_kind="VRAM")
