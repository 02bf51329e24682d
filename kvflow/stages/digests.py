"""Digests of a rank's own memory: what they take, and that it is there."""

from collections.abc import Mapping, Sequence

import msgspec

from kvflow.errors import PlanError
from kvflow.geometry.debts import Debt
from kvflow.geometry.digest import View, Written, digest
from kvflow.geometry.layers import ALL_LAYERS, LayerRange
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.pages import PageTable
from kvflow.geometry.routes import RoutePiece
from kvflow.geometry.tokens import TokenRange, closes

__all__ = ["DigestWork", "OwnMemory", "check_digestible"]


class OwnMemory(msgspec.Struct, frozen=True):
    """This rank's memory.

    Attributes:
        layout: What lies where.
        view: Lets it be read.
        max_bytes: Longest descriptor that the transport takes; None for no limit.
    """

    layout: KVLayout
    view: View
    max_bytes: int | None = None


class DigestWork(msgspec.Struct, frozen=True):
    """Digests that are yet to be worked out; that may be done in any thread.

    Attributes:
        memory: Of this rank.
        pieces: Of the route between the two ranks.
        debts: By component, which tokens the two hold.
        tables: By component, this rank's pages.
        wanted: By component, all tokens of the transfer.
        layers: Of which digests are wanted.
    """

    memory: OwnMemory
    pieces: Sequence[RoutePiece]
    debts: Mapping[str, Debt]
    tables: Mapping[str, PageTable]
    wanted: Mapping[str, TokenRange]
    layers: LayerRange = ALL_LAYERS

    def digest(self, name: str, tokens: TokenRange) -> int:
        """Work one digest out.

        Args:
            name: Component.
            tokens: Of this component.
        """
        written = Written(self.pieces, self.debts[name], tokens, closes(tokens, self.wanted[name]), self.layers)
        return digest(written, self.memory.layout.component(name), self.tables[name], self.memory.view)

    def digests(self, ranges: Mapping[str, TokenRange]) -> dict[str, int]:
        """Work the digests of several components out."""
        return {name: self.digest(name, tokens) for name, tokens in ranges.items()}


def check_digestible(layout: KVLayout) -> None:
    """Refuse digests of memory that this process cannot read.

    Raises:
        PlanError: It is device memory.
    """
    if layout.memory_kind != "DRAM":
        raise PlanError("digests need host memory", memory_kind=layout.memory_kind)
